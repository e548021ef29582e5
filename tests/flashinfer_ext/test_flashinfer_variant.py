"""The variants' own C++, compiled for the host: its masks and scores against the stand-ins'.

FlashInfer's registration macros are taken from the installed header; only what is CUDA's is
replaced.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer_ext.flashinfer_reference import _extend_mask
from flashinfer_ext.flashinfer_source import DECODE_VARIANT, PREFILL_VARIANT

HARNESS = r"""
#include <cmath>
#include <cstdint>
#define __device__
#define __host__
#define __forceinline__ inline
namespace math {
constexpr float log2e = 1.44269504088896340736f, inf = INFINITY;
inline float ptx_exp2(float x) { return std::exp2(x); }
inline float ptx_rcp(float x) { return 1.f / x; }
}
@MACROS@
struct AttentionVariantBase {};
@DECODE@
@PREFILL@
struct DecodeParams { int32_t *hole_at, *hole_end; double sm_scale, logit_cap; };
struct PrefillParams {
  int32_t *begins, *windows, *sinks; int64_t* position_starts; int32_t* positions;
  double sm_scale, logit_cap; int64_t part; uint32_t queries, keys;
  uint32_t get_qo_len(uint32_t) const { return queries; }
  uint32_t get_kv_len(uint32_t) const { return keys; }
};
extern "C" {
bool decode_mask(int32_t hole_at, int32_t hole_end, uint32_t slot) {
  DecodeParams params{&hole_at, &hole_end, 1., 0.};
  return RaggedDecode(params, 0, nullptr).LogitsMask(params, 0, 0, slot, 0, 0);
}
float score(float logits, double scale, double cap) {
  int32_t none = 0;
  DecodeParams params{&none, &none, scale, cap};
  RaggedDecode variant(params, 0, nullptr);
  float changed = variant.LogitsTransform(params, logits, 0, 0, 0, 0, 0);
  return changed * variant.sm_scale_log2;
}
float empty_output(float output) {
  int32_t none = 0;
  DecodeParams params{&none, &none, 1., 0.};
  float m = -math::inf, d = 1.f;
  return RaggedDecode(params, 0, nullptr).OutputTransform(params, output, 0, 0, 0, m, d, 1.f);
}
uint32_t window_left(int32_t window, uint32_t keys, int64_t part) {
  int32_t none = 0; int64_t start = 0;
  PrefillParams params{&none, &window, &none, &start, &none, 1., 0., part, 1, keys};
  return RaggedExtend(params, 0, nullptr).window_left;
}
void extend_mask(int32_t begin, int32_t window, int32_t sinks, int64_t start, int32_t* positions,
                 int64_t part, uint32_t queries, uint32_t keys, bool* out) {
  PrefillParams params{&begin, &window, &sinks, &start, positions, 1., 0., part, queries, keys};
  RaggedExtend variant(params, 0, nullptr);
  for (uint32_t q = 0; q < queries; ++q)
    for (uint32_t k = 0; k < keys; ++k)
      out[q * keys + k] = variant.LogitsMask(params, 0, q, k, 0, 0);
}
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    package = Path(pytest.importorskip("flashinfer").__file__).parent
    header = package / "data" / "include" / "flashinfer" / "attention" / "variant_helper.cuh"
    macros = re.search(
        r"#define REGISTER_QUERY_TRANSFORM.*?(?=struct AttentionVariantBase)",
        header.read_text(), re.DOTALL,
    )[0]  # fmt: skip
    folder = tmp_path_factory.mktemp("variant")
    source = HARNESS.replace("@MACROS@", macros)
    source = source.replace("@DECODE@", DECODE_VARIANT).replace("@PREFILL@", PREFILL_VARIANT)
    (folder / "host.cpp").write_text(source)
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", "host.so", "host.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "host.so"))
    library.decode_mask.restype = ctypes.c_bool
    library.score.restype = library.empty_output.restype = ctypes.c_float
    library.window_left.restype = ctypes.c_uint32
    return library


def test_decode_masks_the_hole_only(host: ctypes.CDLL) -> None:
    seen = [slot for slot in range(12) if host.decode_mask(4, 9, slot)]
    assert seen == [0, 1, 2, 3, 9, 10, 11]
    assert all(host.decode_mask(5, 5, slot) for slot in range(12))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("part", [0, 1, 2])
def test_extend_masks_as_the_stand_in(host: ctypes.CDLL, part: int, seed: int) -> None:
    rng = random.Random(seed)
    queries, begin, first = rng.randint(1, 40), rng.choice((1, 17, 60)), rng.randint(0, 5)
    keys = queries if part == 1 else rng.randint(1, 64)
    window, sinks = rng.choice((1, 5, 16, 33, 2**31 - 1)), rng.choice((0, 4, 17))
    positions = torch.tensor(
        [rng.choice((-1, rng.randint(0, begin + 9))) for _ in range(first + keys)],
        dtype=torch.int32,
    )
    out = torch.zeros(queries, keys, dtype=torch.bool)
    host.extend_mask(
        begin, window, sinks, ctypes.c_int64(first), ctypes.c_void_p(positions.data_ptr()),
        ctypes.c_int64(part), queries, keys, ctypes.c_void_p(out.data_ptr()),
    )  # fmt: skip
    rows = [torch.tensor([x]) for x in (begin, window, sinks, first)] + [positions]
    want = _extend_mask(0, queries, keys, rows, part, "cpu")
    if part == 1:  # the causal mode's own mask comes on top of the variant's
        out &= torch.ones(queries, keys, dtype=torch.bool).tril()
    assert torch.equal(out, want)


def test_only_the_chunk_on_itself_skips_tiles(host: ctypes.CDLL) -> None:
    lefts = [host.window_left(9, 70, ctypes.c_int64(part)) for part in (0, 1, 2)]
    assert lefts == [70, 8, 70]


@pytest.mark.parametrize(("scale", "cap"), [(0.125, 0.0), (0.125, 50.0), (1.0, 2.0)])
def test_scores_and_soft_cap(host: ctypes.CDLL, scale: float, cap: float) -> None:
    for logits in (-1e4, -37.0, -0.01, 0.0, 0.3, 12.0, 1e4):
        value = torch.tensor(logits, dtype=torch.float64) * scale
        want = (cap * torch.tanh(value / cap) if cap else value) / torch.log(torch.tensor(2.0))
        got = host.score(ctypes.c_float(logits), ctypes.c_double(scale), ctypes.c_double(cap))
        assert got == pytest.approx(want.item(), rel=1e-5, abs=2e-5)


def test_a_row_that_reads_nothing_is_zero_whatever_it_masked(host: ctypes.CDLL) -> None:
    assert host.empty_output(ctypes.c_float(float("nan"))) == 0.0

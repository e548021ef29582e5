"""Balance figures: our cut against the kernel, FlashInfer's and SGLang's against their own code."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from flashinfer_ext import balance
from flashinfer_ext.__main__ import main
from flashinfer_ext.balance import FULL, Batch
from flashinfer_ext.contract import DecodeBatch, LayerHeads
from flashinfer_ext.triton_work import WorkList

ARTIFACTS = Path(__file__).parents[2] / "artifacts"


@pytest.mark.parametrize("target", [4, 30, 264])
@pytest.mark.parametrize("lengths", [(5000, 1, 70, 640), (64,), (3, 9000)])
def test_our_items_are_the_kernels(lengths: tuple[int, ...], target: int) -> None:
    batch = Batch("x", lengths, (FULL, 128, 1000), sinks=4)
    rows, heads = len(lengths), 3
    work = WorkList.allocate(1, rows * heads, target, "cpu")
    ints = torch.int32
    work.fill(
        DecodeBatch(torch.arange(rows, dtype=ints), torch.tensor(lengths, dtype=ints)),
        LayerHeads(*(torch.tensor([x], dtype=ints) for x in (
            [0, 1, 2], list(batch.windows), [0, 4, 4]))),
    )  # fmt: skip
    row, part, chunk = work.item_rows[0], work.item_parts[0], int(work.chunks[0])
    live = row >= 0
    reads = work.row_lengths[0][row[live].long()]
    items = torch.minimum(reads - part[live] * chunk, torch.tensor(chunk))
    assert items.tolist() == balance.our_items(batch.reads(), target).tolist()


@pytest.mark.parametrize("lengths", [(32768,) * 64, (100, 90, 95), (64, 4000, 32768), (7,)])
@pytest.mark.parametrize(("heads", "group"), [(8, 1), (8, 4), (2, 20)])
def test_splits_are_sglangs(lengths: tuple[int, ...], heads: int, group: int) -> None:
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    theirs = torch.zeros(len(lengths), dtype=torch.int32)
    get_num_kv_splits_triton[(1,)](
        theirs, torch.tensor(lengths, dtype=torch.int32), len(lengths), 1, heads * group, heads,
        balance.SGLANG_SPLITS, 132, MAX_NUM_SEQ=256,
    )  # fmt: skip
    assert theirs.tolist() == balance.sglang_splits(lengths, heads, group, 132).tolist()


PLANNER = """
#include <flashinfer/attention/scheduler.cuh>
using namespace flashinfer;
namespace flashinfer {
template <PosEncodingMode M, uint32_t A, uint32_t B, uint32_t C, uint32_t D, uint32_t E, uint32_t F,
          typename V, typename Params>
__global__ void BatchDecodeWithPagedKVCacheKernel(const __grid_constant__ Params params) {}
}
struct Types { using DTypeKV = uint16_t; using IdType = int32_t; };
extern "C" long decode_chunk(int rows, int* indptr, int page) {
  bool split; uint32_t grid, pages, batch, gdy;
  if (BatchDecodeWithPagedKVCacheWorkEstimationDispatched<4, 128, PosEncodingMode::kNone, int,
      Types>(split, grid, pages, batch, gdy, rows, indptr, 4, page, true, nullptr)) return -2;
  return split ? long(pages) * page : -1;
}
extern "C" long prefill_chunk(int rows, int* qo, int* kv, int page, int grid) {
  auto [split, batch, padded, tile, chunk, a, b, c, d, e] = PrefillSplitQOKVIndptr<int32_t>(
      qo, kv, rows, rows, 4, 1, 128, page, grid, true, -1, -1, false, 0);
  return chunk;
}
"""

NO_DRIVER = """
static int blocks;
void set_blocks(int b) { blocks = b; }
int cudaGetDevice(int* d) { *d = 0; return 0; }
int cudaDeviceGetAttribute(int* v, int a, int d) { *v = a == 16 ? 132 : a == 75 ? 9 : 0; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int t, unsigned long s) {
  *n = blocks; return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* n, const void* f, int t, unsigned long s, unsigned flags) { *n = blocks; return 0; }
"""


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """FlashInfer's host planners, compiled from its headers; the GPU's figures are made up."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc: FlashInfer's planner cannot be compiled")
    data = Path(find_spec("flashinfer").origin).parent / "data"  # importing it takes 10 s
    parts = ("cub", "thrust", "libcudacxx/include")
    include = [data / "include", *(data / "cccl" / part for part in parts)]
    folder = tmp_path_factory.mktemp("planner")
    (folder / "planner.cu").write_text(PLANNER)
    (folder / "no_driver.c").write_text(NO_DRIVER)
    command = [
        nvcc, "-std=c++17", "-O0", "-shared", "-w", "-arch=sm_90", "-cudart=shared",
        "-Xcompiler=-fPIC", "-Xlinker=-Bsymbolic", *(f"-I{path}" for path in include),
        "-o", "planner.so", "planner.cu", "no_driver.c",
    ]  # fmt: skip
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"nvcc cannot build FlashInfer's planner here: {built.stderr[-300:]}")
    for library in sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libcudart.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    module = ctypes.CDLL(str(folder / "planner.so"))
    module.decode_chunk.restype = module.prefill_chunk.restype = ctypes.c_long
    return module


def pointer(values: np.ndarray) -> ctypes.c_void_p:
    return values.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page", [1, 16])
def test_plans_are_flashinfers(planner: ctypes.CDLL, seed: int, page: int) -> None:
    rng = np.random.default_rng(seed)
    for rows in (1, 8, 64, 263, 264, 512, 1055, 1056, 2048):
        reads = np.where(rng.random(rows) < 0.2, rng.integers(1, 32769, rows), 1028)
        indptr = np.concatenate([[0], (-(-reads // page)).cumsum()]).astype(np.int32)
        for ctas in (2, 8):
            planner.set_blocks(ctas)
            theirs = planner.decode_chunk(rows, pointer(indptr), page)
            ours = balance.flashinfer_decode_chunk(reads, page, ctas * 132)
            assert theirs == (-1 if ours is None else ours)
        ends = np.arange(rows + 1, dtype=np.int32)
        theirs = planner.prefill_chunk(rows, pointer(ends), pointer(indptr), page, 264)
        assert theirs == balance.flashinfer_prefill_chunk(reads, page, 264)


def test_finish_time_takes_items_in_order() -> None:
    assert balance.finish_time(np.array([3, 1, 1, 5]), 2) == 7
    assert balance.finish_time(np.array([5, 3, 1, 1]), 2) == 5


def test_every_cut_covers_every_token() -> None:
    for batch in balance.default_batches(4096, 256):
        for cut in balance.cuts_of(batch, balance.Chip()):
            assert cut.items * cut.mean == pytest.approx(batch.reads().sum(), rel=1e-3)
            assert cut.longest <= 4096 and cut.finish >= 1.0


def test_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "balance.json"
    (policy,) = (ARTIFACTS / "smollm2-135m-instruct" / "seqcalib").iterdir()
    assert main(["balance", "--policy", str(policy), "--json", str(out)]) == 0
    cuts = json.loads(out.read_text())
    assert len(cuts) == 20 and "of seqcalib" in cuts[-1]["batch"]
    assert "FlashInfer tensor-core" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["balance", "--policy", str(tmp_path)]) == 2
    wanted = f"flashinfer_ext: {tmp_path} is not a policy: no manifest.json\n"
    assert capsys.readouterr().err == wanted
    assert main(["balance", "--json", str(tmp_path / "no" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["balance", "--length", "0"])
    assert "a whole number from 1 to" in capsys.readouterr().err

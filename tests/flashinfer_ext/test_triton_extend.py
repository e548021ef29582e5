"""The Triton extend kernel against the torch reference: outputs and log-sum-exps.

History slots that no query may read, and those without a token, are NaN (see ``cases``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from flashinfer_ext import extend_reference
from flashinfer_ext.triton_extend import extend
from tests.flashinfer_ext.cases import FULL, ExtendCase, ExtendShape, make_extend_case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LSE_TOLERANCE = 1e-4  # the sums are float32 whatever the inputs
ROOM = 8  # elements around strided tensors


@dataclass(frozen=True)
class How:
    """How a case is run. ``strided``: all tensors of tokens are slices of larger ones."""

    cap: float = 0.0
    scale: float = 0.11
    strided: bool = False
    tolerance: float = 0.0  # 0: the dtype's


def buffer(like: torch.Tensor, strided: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(a NaN tensor with room around if strided, its part of ``like``'s shape)."""
    room = ROOM if strided else 0
    size = [n + room for n in like.shape]
    whole = torch.full(size, float("nan"), dtype=like.dtype, device=like.device)
    return whole, whole[tuple(slice(0, n) for n in like.shape)]


def run(case: ExtendCase, layer: int, how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one layer; nothing around them was written."""
    q, k, v = (buffer(x, how.strided)[1].copy_(x) for x in (case.q, case.k, case.v))
    size = (*case.q.shape[:2], case.layout.v_head_dim)
    all_out, out = buffer(case.q.new_empty(size), how.strided)
    all_lse, lse = buffer(case.q.new_empty(size[:2], dtype=torch.float32), how.strided)
    given = extend(
        q, k, v, case.arena, case.layout, case.heads, layer, case.batch, out, how.scale, how.cap,
        lse,
    )  # fmt: skip
    assert given is out
    outside = all_out.numel() - out.numel(), all_lse.numel() - lse.numel()
    assert (int(all_out.isnan().sum()), int(all_lse.isnan().sum())) == outside
    return out, lse


def check(shape: ExtendShape, seed: int, device: str, how: How | None = None) -> None:
    """All layers of a random case equal the reference."""
    how = how or How()
    case = make_extend_case(shape, seed, device)
    tolerance = how.tolerance or TOLERANCE[shape.dtype]
    for layer in range(shape.layers):
        out, lse = run(case, layer, how)
        expected, expected_lse = extend_reference.extend(
            case.q, case.k, case.v, case.arena, case.layout, case.heads, layer, case.batch,
            how.scale, how.cap,
        )  # fmt: skip
        torch.testing.assert_close(lse, expected_lse, atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(device, seed):
    rng = random.Random(seed)
    begins = [rng.choice((0, rng.randint(1, 50), 90)) for _ in range(rng.randint(1, 3))]
    shape = ExtendShape(
        tuple((begin, rng.choice((0, 1, rng.randint(2, 24)))) for begin in begins),
        heads=rng.randint(1, 2), group=rng.randint(1, 5), layers=rng.randint(1, 2),
        head_dim=rng.choice((32, 64, 72)), v_head_dim=rng.choice((None, 32, 56)),
        page=rng.choice((8, 16, 32)), windows=rng.sample((FULL, FULL, 5, 16, 50), 3),
        dtype=rng.choice(list(TOLERANCE)),
    )  # fmt: skip
    check(shape, seed, device, How(rng.choice((0.0, 4.0)), strided=rng.random() < 0.5))


@pytest.mark.parametrize(
    "chunks",
    [
        ((0, 1),),
        ((0, 33),),
        ((32, 16),),
        ((37, 20),),
        ((45, 1), (16, 31)),
        ((0, 7), (0, 0), (70, 11), (3, 1)),
        ((5, 0), (40, 0)),
    ],
    ids=str,
)
def test_chunks(device, chunks):
    """Chunks at 0, page by page and mid-page, of different lengths, some of them empty."""
    check(ExtendShape(chunks, group=2), 0, device)


@pytest.mark.parametrize("sinks", [0, 4, 16, 17])
@pytest.mark.parametrize("window", [1, 7, 16, 40])
def test_windows(device, window, sinks):
    """Windows below the chunk and into history; sinks in history, in the chunk and across both."""
    chunks = ((0, 50), (10, 20), (61, 9))
    check(ExtendShape(chunks, heads=1, group=2, windows=(window,), sinks=(sinks,)), window, device)


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize("window", [3, 70])
def test_sinks_far_behind_a_window(device, window, page):
    """A chunk of several tiles: those between its sinks and its window are skipped."""
    shape = ExtendShape(((0, 150),), heads=1, group=1, windows=(window,), sinks=(17,), page=page)
    check(shape, page, device)


@pytest.mark.parametrize("begin", [0, 60, 150])
def test_sinks_of_more_than_a_tile(device, begin):
    shape = ExtendShape(((begin, 140),), heads=1, group=1, windows=(9,), sinks=(100,))
    check(shape, begin, device)


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65])
def test_around_the_tile_sizes(device, length):
    check(ExtendShape(((0, length), (length, 2)), heads=1, group=1, windows=(FULL,)), 1, device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (256, 256), (80, 80), (64, 128), (96, 48), (16, 8)], ids=str
)
def test_head_dims_and_dtypes(device, dims, dtype):
    page = {64: 8, 128: 32}.get(dims[0], 16)
    shape = ExtendShape(
        ((20, 13), (0, 7)), head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, page=page,
        windows=(FULL, 10), group=2,
    )  # fmt: skip
    check(shape, sum(dims), device, How(scale=dims[0] ** -0.5))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 17])
def test_query_heads_of_a_kv_head(device, group):
    check(ExtendShape(((19, 8), (0, 3)), group=group, windows=(FULL, 6)), group, device)


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0])
def test_soft_cap(device, cap):
    check(ExtendShape(((19, 12),), windows=(FULL, 9)), 1, device, How(cap=cap))


# float32 scores of thousands are themselves right to 1e-4 or so
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as on a GPU: 1 - 2/inf
@pytest.mark.parametrize("cap", [0.0, 20.0])
def test_scores_of_thousands_do_not_overflow(device, cap):
    check(ExtendShape(((50, 30),), heads=1), 2, device, How(cap=cap, scale=200.0, tolerance=5e-3))


def test_each_layer_has_its_own_history(device):
    shape = ExtendShape(((40, 10), (7, 5)), layers=3, windows=(FULL, 9, 30), heads=3, group=1)
    check(shape, 5, device)


@pytest.mark.parametrize("window", [FULL, 12])
def test_strides(device, window):
    """All tensors are slices of larger ones: what lies around the outputs is not touched."""
    shape = ExtendShape(((33, 9), (0, 20)), v_head_dim=40, head_dim=48, windows=(window,), group=2)
    check(shape, 6, device, How(strided=True))


def test_without_a_log_sum_exp(device):
    case = make_extend_case(ExtendShape(((20, 9),)), 1, device)
    expected, _ = run(case, 0, How())
    out = torch.full_like(expected, float("nan"))
    extend(
        case.q, case.k, case.v, case.arena, case.layout, case.heads, 0, case.batch, out,
        How().scale,
    )  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.parametrize("cut", [1, 16, 20])
def test_chunking_changes_nothing(device, cut):
    """A prompt in one chunk, and its end as a second chunk over its beginning as history."""
    whole = make_extend_case(ExtendShape(((0, 40),), heads=1, windows=(12,), sinks=(4,)), 9, device)
    expected, expected_lse = run(whole, 0, How())
    shape = ExtendShape(((cut, 40 - cut),), heads=1, windows=(12,), sinks=(4,))
    part = make_extend_case(shape, 9, device)
    batch, layout = part.batch, part.layout
    start, slots = int(batch.position_starts[0, 0]), int(batch.counts[0, 0])
    first = int(batch.page_starts[0, 0])
    for slot, position in enumerate(batch.positions[start : start + slots].tolist()):
        if 0 <= position < cut:
            page, at = int(batch.pages[first + slot // layout.page_size]), slot % layout.page_size
            layout.keys(part.arena)[page, at] = whole.k[position, 0]
            layout.values(part.arena)[page, at] = whole.v[position, 0]
    part.q, part.k, part.v = whole.q[cut:], whole.k[cut:], whole.v[cut:]
    out, lse = run(part, 0, How())
    torch.testing.assert_close(out, expected[cut:], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected_lse[cut:], atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)


def test_more_query_heads_than_a_tile_has_rows_are_refused(device):
    case = make_extend_case(ExtendShape(((0, 3),), heads=1, group=65), 0, device)
    with pytest.raises(ValueError, match=r"^65 query heads of a kv head: 1 to \d+ are"):
        run(case, 0, How())

"""The Triton decode kernels against the torch reference: outputs and log-sum-exps.

Every slot that a row may not read is NaN (see ``cases``), so a read too many shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from flashinfer_ext import decode_reference, triton_decode
from flashinfer_ext.triton_decode import TritonDecode
from tests.flashinfer_ext.cases import FULL, Case, Shape, make_case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LSE_TOLERANCE = 1e-4  # the sums are float32 whatever the inputs


@dataclass(frozen=True)
class How:
    """How a case is run: see ``TritonDecode``. ``strided``: q, out and lse are slices."""

    target: int = 3
    cap: float = 0.0
    scale: float = 0.11
    may_split: bool = True
    spare_rows: int = 0
    strided: bool = False
    tolerance: float = 0.0  # 0: the dtype's


def decoder(shape: Shape, case: Case, how: How) -> TritonDecode:
    rows = len(shape.lengths) + how.spare_rows
    return TritonDecode(case.layout, case.heads, shape.group, rows, case.q.device, how.target)


def run(decode: TritonDecode, case: Case, layer: int, how: How) -> tuple:
    """(out, lse) of one planned layer, from buffers full of NaN, some with room around."""
    rows, q_heads = case.q.shape[:2]
    room = 2 if how.strided else 0

    def buffer(*size: int, dtype: torch.dtype) -> torch.Tensor:
        full = [n + room for n in size]
        return torch.full(full, float("nan"), dtype=dtype, device=case.q.device)

    inner = tuple(slice(0, n) for n in (rows, q_heads, case.layout.v_head_dim))
    all_q = buffer(*case.q.shape, dtype=case.q.dtype)
    q = all_q[tuple(slice(0, n) for n in case.q.shape)].copy_(case.q)
    all_out = buffer(rows, q_heads, case.layout.v_head_dim, dtype=case.q.dtype)
    all_lse = buffer(rows, q_heads, dtype=torch.float32)
    out, lse = all_out[inner], all_lse[inner[:2]]
    given = decode.run(
        q, case.arena, case.table, layer, case.batch, out, how.scale, how.cap, case.frozen, lse,
        how.may_split,
    )  # fmt: skip
    assert given is out
    outside = all_out.numel() - out.numel(), all_lse.numel() - lse.numel()
    assert (int(all_out.isnan().sum()), int(all_lse.isnan().sum())) == outside
    return out, lse


def compare(decode: TritonDecode, case: Case, layer: int, how: How) -> None:
    out, lse = run(decode, case, layer, how)
    expected, expected_lse = decode_reference.decode(
        case.q, case.arena, case.layout, case.table, case.heads, layer, case.batch, how.scale,
        how.cap, case.frozen,
    )  # fmt: skip
    tolerance = how.tolerance or TOLERANCE[case.q.dtype]
    torch.testing.assert_close(lse, expected_lse, atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def check(shape: Shape, seed: int, device: str, how: How | None = None) -> TritonDecode:
    """All layers of a random case equal the reference."""
    how = how or How()
    case = make_case(shape, seed, device)
    decode = decoder(shape, case, how)
    decode.plan(case.batch, case.frozen)
    for layer in range(shape.layers):
        compare(decode, case, layer, how)
    return decode


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(device, seed):
    rng = random.Random(seed)
    lengths = tuple(rng.choice((0, 1, rng.randint(2, 60), 170)) for _ in range(rng.randint(1, 4)))
    shape = Shape(
        lengths, heads=rng.randint(1, 3), group=rng.randint(1, 6), layers=rng.randint(1, 2),
        head_dim=rng.choice((32, 64, 72)), v_head_dim=rng.choice((None, 32, 56)),
        page=rng.choice((8, 16, 32)), windows=rng.sample((FULL, FULL, 5, 16, 50), 3),
        dtype=rng.choice(list(TOLERANCE)), frozen=rng.random() < 0.6,
    )  # fmt: skip
    how = How(
        rng.choice((1, 4, 30)), rng.choice((0.0, 4.0)), strided=rng.random() < 0.5,
        spare_rows=rng.randint(0, 2),
    )  # fmt: skip
    check(shape, seed, device, how)


@pytest.mark.parametrize(
    "lengths",
    [(1,), (0,), (0, 1, 0, 2), (5, 0, 33, 200), (15, 16, 17), (63, 64, 65), (128, 0, 0, 1, 129)],
    ids=str,
)
def test_lengths(device, lengths):
    """Padded rows give zeros and -inf; rows of one token give that token's value."""
    check(Shape(lengths), 0, device)


@pytest.mark.parametrize("sinks", [0, 4, 16, 17])
@pytest.mark.parametrize("window", [1, 16, 40, 64])
def test_windows(device, window, sinks):
    """Windows that cross pages, start mid-page or hold everything; sinks up to past the first."""
    lengths = (window, window + 1, window + 3, window + 18, 150)
    check(Shape(lengths, windows=(window,), sinks=(sinks,), group=1), window, device)


@pytest.mark.parametrize("seed", range(6))
def test_frozen_prompts_beside_windows(device, seed):
    """Kept counts and prompts end mid-page; some requests and all windowed heads are not frozen."""
    page = (16, 8, 32)[seed % 3]
    shape = Shape(
        (90, 41, 1, 2, 0, 130), heads=4, windows=(FULL, FULL, 30), page=page, frozen=True, group=2
    )
    check(shape, seed, device, How(target=(2, 64)[seed % 2]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (256, 256), (80, 80), (64, 128), (96, 48), (16, 8)], ids=str
)
def test_head_dims_and_dtypes(device, dims, dtype):
    page = {64: 8, 128: 32}.get(dims[0], 16)
    shape = Shape(
        (70, 0, 35), head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, page=page,
        windows=(FULL, 33), group=4,
    )  # fmt: skip
    check(shape, sum(dims), device, How(scale=dims[0] ** -0.5))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 17])
def test_query_heads_of_a_kv_head(device, group):
    check(Shape((100, 20), group=group, heads=3, windows=(FULL, 40)), group, device)


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0])
def test_soft_cap(device, cap):
    check(Shape((100, 20, 0), windows=(FULL, 40)), 1, device, How(cap=cap))


# float32 scores of thousands are themselves right to 1e-4 or so
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as on a GPU: 1 - 2/inf
@pytest.mark.parametrize("cap", [0.0, 20.0])
@pytest.mark.parametrize("target", [1, 8])
def test_scores_of_thousands_do_not_overflow(device, cap, target):
    how = How(cap=cap, scale=200.0, target=target, tolerance=5e-3)
    check(Shape((150, 20)), 2, device, how)


@pytest.mark.parametrize("frozen", [False, True])
def test_each_layer_has_its_own_windows(device, frozen):
    shape = Shape((120, 0, 45), layers=3, windows=(FULL, 20, 64), frozen=frozen, heads=3, group=2)
    check(shape, 5, device)


@pytest.mark.parametrize(("target", "parts"), [(1, 1), (2, 2), (7, 4), (64, 8)])
def test_rows_split_and_whole(device, target, parts):
    """One long row: in one piece where there are few programs, in many where there are many."""
    decode = check(Shape((500, 0, 3, 70), heads=1), 4, device, How(target=target))
    assert int(decode.work.row_parts.max()) == parts


def test_a_row_of_more_parts_than_are_merged_at_once(device):
    """The last part weighs most, so what was merged before it must be scaled down."""
    shape, how = Shape((1300,), heads=1, group=1), How(target=21)
    case = make_case(shape, 5, device)
    slot = int(case.table.slots[int(case.batch.requests[0]), 1299])
    page = int(case.table.pages[int(case.heads.units[0, 0]), slot // shape.page])
    query = case.q[0, 0]
    case.layout.keys(case.arena)[page, slot % shape.page] = 40 * query / query.norm()
    decode = decoder(shape, case, how)
    decode.plan(case.batch, case.frozen)
    compare(decode, case, 0, how)
    assert int(decode.work.row_parts.max()) == 21 > triton_decode.MERGED


def test_without_a_merge_where_no_row_can_be_split(device, monkeypatch):
    monkeypatch.setattr(triton_decode, "_merge_kernel", None)
    shape = Shape((64, 0, 300, 1), windows=(50, 64), sinks=(0,))
    check(shape, 0, device, How(target=64, may_split=False))


def test_the_merge_leaves_whole_rows_alone(device):
    check(Shape((64, 0, 300, 1), windows=(50, 64), sinks=(0,)), 0, device, How(target=64))


@pytest.mark.parametrize("target", [1, 16])
def test_strides(device, target):
    """q, out and lse are slices of larger tensors: what lies around them is not touched."""
    shape = Shape((90, 0, 130), v_head_dim=40, head_dim=48, windows=(FULL, 30))
    check(shape, 6, device, How(target=target, strided=True))


@pytest.mark.parametrize("target", [2, 16])
def test_buffers_serve_batches_of_any_size_in_turn(device, target):
    """Nothing of a larger batch's work list or partial results is left for a smaller one."""
    shapes = [
        Shape((300, 200, 100, 50), windows=(FULL, 40)), Shape((70,), windows=(FULL, 40)),
        Shape((0, 0), windows=(FULL, 40)), Shape((1, 260, 0), windows=(FULL, 40)),
    ]  # fmt: skip
    how = How(target=target)
    cases = [make_case(shape, 8, device) for shape in shapes]
    decode = decoder(shapes[0], cases[0], replace(how, spare_rows=1))
    for case in (*cases, cases[0]):
        decode.heads = case.heads
        decode.plan(case.batch)
        compare(decode, case, 0, how)


def test_lengths_may_change_in_place(device):
    """As a captured graph replays: the same tensors, one token on; only ``plan`` runs anew."""
    shape = Shape((80, 120), windows=(FULL,))
    case = make_case(shape, 3, device)
    decode = decoder(shape, case, How())
    for _ in range(3):
        decode.plan(case.batch)
        compare(decode, case, 0, How())
        case.batch.lengths.sub_(torch.tensor([79, 56], device=device)).clamp_(min=0)


@pytest.mark.parametrize("target", [1, 16])
def test_without_a_log_sum_exp(device, target):
    case = make_case(Shape((150, 0)), 1, device)
    decode = decoder(Shape((150, 0)), case, How(target=target))
    decode.plan(case.batch)
    expected, _ = run(decode, case, 0, How())
    out = torch.full_like(expected, float("nan"))
    decode.run(case.q, case.arena, case.table, 0, case.batch, out, How().scale)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("group", [0, 65])
def test_groups_out_of_range_are_refused(device, group):
    case = make_case(Shape((5,)), 0, device)
    with pytest.raises(ValueError, match=f"^{group} query heads of a kv head: 1 to 64"):
        TritonDecode(case.layout, case.heads, group, 1, device)

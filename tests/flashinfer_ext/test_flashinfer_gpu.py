"""The compiled FlashInfer variants against the references, on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from tests.flashinfer_ext.cases import ExtendShape, Shape, make_case, make_extend_case
from tests.flashinfer_ext.flashinfer_cases import (
    LENGTHS,
    LOOSE,
    SCALE,
    WINDOWS,
    check_decode,
    check_extend,
    planned_decode,
    planned_extend,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CONFIGS = [(64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16), (128, torch.float16)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), CONFIGS)
def test_decode_equals_the_reference(head_dim: int, dtype: torch.dtype, frozen: bool) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        shape = Shape(
            lengths=(*rng.sample(LENGTHS, 4), 0), layers=2, heads=3, head_dim=head_dim,
            windows=rng.choices(WINDOWS, k=4), page=rng.choice((8, 16, 32)),
            group=rng.choice((1, 3, 4, 8)), dtype=dtype, frozen=frozen,
        )  # fmt: skip
        case = make_case(shape, seed, "cuda")
        check_decode(case, planned_decode(case), rng.choice((0.0, 2.0)), LOOSE)


def test_a_long_row_is_cut_and_merged() -> None:
    case = make_case(Shape(lengths=(4000, 30), heads=1, dtype=torch.bfloat16), 0, "cuda")
    check_decode(case, planned_decode(case), within=LOOSE)


@pytest.mark.parametrize(("head_dim", "dtype"), CONFIGS)
def test_extend_equals_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        begins = (0, 1, 7, 16, 33, 64, 100)
        shape = ExtendShape(
            chunks=tuple((rng.choice(begins), rng.choice((1, 16, 50, 300))) for _ in range(3)),
            layers=2, heads=3, head_dim=head_dim, windows=rng.choices(WINDOWS, k=4),
            page=rng.choice((8, 16, 32)), group=rng.choice((1, 3, 4)), dtype=dtype,
        )  # fmt: skip
        case = make_extend_case(shape, seed, "cuda")
        check_extend(case, planned_extend(case), rng.choice((0.0, 2.0)), LOOSE)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_captured_decode_replays_with_other_lengths(rows: int) -> None:
    lengths = tuple(random.Random(rows).choices(LENGTHS[4:], k=rows))
    case = make_case(
        Shape(lengths=lengths, layers=2, windows=(40, 2**31 - 1), dtype=torch.bfloat16), 1, "cuda"
    )
    runner = planned_decode(case, page_capacity=64 * rows)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device="cuda")

    def step() -> None:
        runner.run(
            case.q, case.arena, case.table, 1, case.batch, out, SCALE, lse=lse, frozen=case.frozen
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    case.arena.nan_to_num_()
    for shorter in (0, 1, 9, 0):
        case.batch.lengths.copy_(torch.tensor(lengths) - shorter)
        runner.plan(case.batch, case.table)
        graph.replay()
        again, again_lse = out.clone(), lse.clone()
        step()
        torch.testing.assert_close(again, out, atol=0, rtol=0)
        torch.testing.assert_close(again_lse, lse, atol=0, rtol=0)
        check_decode(case, runner, within=LOOSE)


def test_warm_up_leaves_a_working_runner() -> None:
    case = make_case(Shape(lengths=(33,), dtype=torch.bfloat16), 0, "cuda")
    runner = planned_decode(case)
    runner.warm_up()
    runner.plan(case.batch, case.table)
    check_decode(case, runner, within=LOOSE)

"""FlashInfer's argument layout against the contract's references, run by torch stand-ins."""

from __future__ import annotations

import inspect
import random
import re
from pathlib import Path

import pytest
import torch

from flashinfer_ext.flashinfer_decode import FlashInferDecode, cache_views
from flashinfer_ext.flashinfer_extend import FlashInferExtend
from flashinfer_ext.flashinfer_reference import DecodeModule, PrefillModule
from flashinfer_ext.flashinfer_source import ModuleSpec
from tests.flashinfer_ext.cases import (
    FULL,
    GARBAGE,
    ExtendShape,
    Shape,
    make_case,
    make_extend_case,
)
from tests.flashinfer_ext.flashinfer_cases import (
    LENGTHS,
    SCALE,
    WINDOWS,
    check_decode,
    check_extend,
    planned_decode,
    planned_extend,
)


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins compute in the case's own dtype, the compiled modules in bf16 and fp16."""
    monkeypatch.setattr(
        "flashinfer_ext.flashinfer_decode.spec_of", lambda *_: ModuleSpec("decode", 64, "bf16")
    )
    monkeypatch.setattr(
        "flashinfer_ext.flashinfer_extend.spec_of", lambda *_: ModuleSpec("prefill", 64, "bf16")
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_decode_rows_equal_the_reference(seed: int, frozen: bool) -> None:
    rng = random.Random(seed)
    shape = Shape(
        lengths=(*rng.sample(LENGTHS, 4), 0), layers=2, heads=3, windows=rng.choices(WINDOWS, k=4),
        page=rng.choice((8, 16, 32)), group=rng.choice((1, 3, 4)), frozen=frozen,
    )  # fmt: skip
    case = make_case(shape, seed)
    check_decode(case, planned_decode(case, DecodeModule()), logit_cap=rng.choice((0.0, 2.0)))


@pytest.mark.parametrize(
    ("length", "window", "sinks"),
    [(40, 32, 4), (41, 32, 17), (40, 4, 36), (12, 4, 17), (48, 16, 16), (49, 16, 16), (50, 1, 0),
     (16, 16, 4), (17, 1, 16), (33, 2, 17), (64, 48, 17)],
)  # fmt: skip
def test_where_sinks_meet_the_window(length: int, window: int, sinks: int) -> None:
    case = make_case(Shape(lengths=(length,), windows=(window,), sinks=(sinks,)), 3)
    check_decode(case, planned_decode(case, DecodeModule()))


def test_a_page_is_listed_once_and_only_if_it_is_read() -> None:
    case = make_case(Shape(lengths=(100,), windows=(20,), sinks=(4,), heads=1), 0)
    runner = planned_decode(case, DecodeModule())
    # Positions 80..99 lie in pages 5 and 6, the sinks in page 0.
    expected = case.table.pages[
        0, case.table.slots[case.batch.requests[0].long(), [0, 80, 96]] // 16
    ]
    assert runner._plans[0].pages.tolist() == expected.tolist()
    assert runner._rows.hole_at.item() == 4 and runner._rows.hole_end.item() == 16


def test_nan_in_a_masked_slot_reaches_the_output() -> None:
    """The precondition on arenas is not caution: FlashInfer does multiply masked values by 0."""
    case = make_case(Shape(lengths=(40,), windows=(5,), sinks=(0,), heads=1), 1)
    runner = planned_decode(case, DecodeModule())
    page = runner._plans[0].pages[0].long()
    case.layout.values(case.arena)[page, 0] = float("nan")
    out = runner.run(case.q, case.arena, case.table, 0, case.batch, torch.empty_like(case.q), SCALE)
    assert out.isnan().any()


def test_padded_rows_list_one_masked_slot_of_the_write_sink() -> None:
    case = make_case(Shape(lengths=(0, 20, 0), heads=1), 2)
    runner = planned_decode(case, DecodeModule())
    case.layout.values(case.arena)[0, 0] = float("nan")  # even that does not reach them
    assert runner._rows.indptr[0].tolist() == [0, 1, 3, 4]
    assert runner._plans[0].pages[[0, 3]].tolist() == [0, 0]
    check_decode(case, runner)


def test_a_frozen_prompts_own_slots_are_not_looked_up() -> None:
    """A frozen prompt's dense pages are freed, and its logical slots may be another's."""
    for seed in range(4):
        case = make_case(Shape(lengths=(100, 65, 33), frozen=True), seed)
        assert case.frozen.prompts.any()
        for request in case.batch.requests.tolist():
            case.table.slots[request, : case.frozen.prompts[request]] = GARBAGE
        check_decode(case, planned_decode(case, DecodeModule()))


def test_lengths_that_change_in_place_need_a_new_plan_only() -> None:
    case = make_case(Shape(lengths=(65, 33), windows=(40, FULL), layers=2), 5)
    runner = planned_decode(case, DecodeModule(), page_capacity=64)
    places = [plan.pages.data_ptr() for plan in runner._plans]
    case.batch.lengths[0] -= 1
    case.batch.lengths[1] = 0
    runner.plan(case.batch, case.table)
    assert [plan.pages.data_ptr() for plan in runner._plans] == places
    assert [plan.pair for plan in runner._plans] == [0, 1]
    case.layout.keys(case.arena).nan_to_num_(), case.layout.values(case.arena).nan_to_num_()
    check_decode(case, runner)


def test_layers_of_equal_lengths_share_a_plan() -> None:
    runner = planned_decode(make_case(Shape(lengths=(65, 33), layers=3), 5), DecodeModule())
    assert [plan.pair for plan in runner._plans] == [0, 0, 0]


def test_too_much_for_the_buffers_is_refused() -> None:
    case = make_case(Shape(lengths=(65, 33)), 5)
    with pytest.raises(ValueError, match="room for 3"):
        planned_decode(case, DecodeModule(), page_capacity=3)
    runner = FlashInferDecode(case.layout, case.heads, 3, 1, "cpu", module=DecodeModule())
    with pytest.raises(ValueError, match="2 rows, the buffers hold 1"):
        runner.plan(case.batch, case.table)


def test_tensors_of_another_dtype_are_refused() -> None:
    case = make_case(Shape(lengths=(5,)), 0)
    runner = planned_decode(case, DecodeModule())
    with pytest.raises(ValueError, match=r"planned for torch.float32, given torch.bfloat16"):
        runner.run(
            case.q, case.arena.bfloat16(), case.table, 0, case.batch, torch.empty_like(case.q), 1.0
        )


def test_cache_views_have_equal_strides() -> None:
    """The decode kernel addresses K and V by one set of strides, and so does "equal" prefill."""
    layout = make_case(Shape(lengths=(5,)), 0).layout
    keys, values = cache_views(layout, layout.allocate(torch.bfloat16, "cpu"))
    assert keys.stride() == values.stride() == (2 * 16 * 64, 64, 64, 1)
    assert values.storage_offset() == 16 * 64


@pytest.mark.parametrize("seed", range(12))
def test_extend_rows_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    begins = (0, 1, 7, 16, 33, 64, 100)
    shape = ExtendShape(
        chunks=tuple((rng.choice(begins), rng.choice((1, 5, 16, 30, 50))) for _ in range(3)),
        layers=2, heads=3, windows=rng.choices(WINDOWS, k=4), page=rng.choice((8, 16, 32)),
        group=rng.choice((1, 3, 4)),
    )  # fmt: skip
    case = make_extend_case(shape, seed)
    check_extend(case, planned_extend(case, PrefillModule()), logit_cap=rng.choice((0.0, 2.0)))


def test_sinks_inside_the_chunk_are_a_run_of_their_own() -> None:
    case = make_extend_case(
        ExtendShape(chunks=((0, 40), (2, 40), (40, 8)), windows=(8,), sinks=(4,)), 0
    )
    runner = planned_extend(case, PrefillModule())
    # Two heads: 4 sinks of the first chunk, 2 of the second, none of the third.
    assert runner._sinks[0].indptr.tolist() == [0, 4, 6, 6, 10, 12, 12]
    check_extend(case, runner)


def test_one_query_beyond_the_window_reads_the_chunks_sinks() -> None:
    case = make_extend_case(ExtendShape(chunks=((0, 9),), windows=(8,), sinks=(4,)), 0)
    check_extend(case, planned_extend(case, PrefillModule()))


def test_a_first_chunk_has_no_history_run() -> None:
    case = make_extend_case(ExtendShape(chunks=((0, 20),)), 0)
    runner = planned_extend(case, PrefillModule())
    assert runner._history == [None] and runner._sinks == [None]
    check_extend(case, runner)


def test_an_empty_extend_is_nothing() -> None:
    case = make_extend_case(ExtendShape(chunks=((16, 0),)), 0)
    runner = planned_extend(case, PrefillModule())
    out = torch.empty(0, 6, 64)
    assert runner.run(case.q, case.k, case.v, case.arena, 0, case.batch, out, SCALE) is out


def test_warm_up_runs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for module, name in ((DecodeModule, "run"), (PrefillModule, "paged_run")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _o=original, _n=name: (ran.append(_n), _o(*a)))
    case = make_case(Shape(lengths=(5,)), 0)
    FlashInferDecode(case.layout, case.heads, 3, 2, "cpu", module=DecodeModule()).warm_up()
    FlashInferExtend(case.layout, case.heads, 3, "cpu", module=PrefillModule()).warm_up()
    assert ran == ["run", "paged_run"]


@pytest.mark.parametrize(
    ("kind", "file", "function", "method"),
    [
        ("decode", "batch_decode.cu", "BatchDecodeWithPagedKVCachePlan", DecodeModule.plan),
        ("decode", "batch_decode.cu", "BatchDecodeWithPagedKVCacheRun", DecodeModule.run),
        ("prefill", "batch_prefill.cu", "BatchPrefillWithKVCachePlan", PrefillModule.plan),
        ("prefill", "batch_prefill.cu", "BatchPrefillWithRaggedKVCacheRun",
         PrefillModule.ragged_run),
        ("prefill", "batch_prefill_paged.cuh", "BatchPrefillWithPagedKVCacheRun",
         PrefillModule.paged_run),
    ],
)  # fmt: skip
def test_stand_ins_take_what_the_installed_bindings_take(kind, file, function, method) -> None:
    root = Path(pytest.importorskip("flashinfer").__file__).parent / "data" / "csrc"
    declared = re.search(rf"{function}\((.*?)\) {{", (root / file).read_text(), re.DOTALL)[1]
    own = ", ADDITIONAL" if " ADDITIONAL_FUNC_PARAMS" in declared else ""
    declared = declared.replace(" ADDITIONAL_FUNC_PARAMS", "")
    names = [re.split(r"[\s>]+", part.split("=")[0].strip())[-1] for part in declared.split(",")]
    if own:
        spec = ModuleSpec(kind, 64, "bf16")
        names += [*spec.tensors, *spec.scalars]
    assert list(inspect.signature(method).parameters)[1:] == names

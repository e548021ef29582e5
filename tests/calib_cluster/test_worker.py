"""A worker that lost its place answers nothing: a wrong number would be worse than none."""

from __future__ import annotations

from pathlib import Path

import pytest

from calib_cluster.errors import CalibrationError
from calib_cluster.worker import CalibrationWorker, worker_spec
from kvpolicy.geometry import read_geometry

IDS = [[(i * 7 + k) % 1000 for i in range(96)] for k in range(2)]
FULL_ROW = [("tau0", "tau0", None)]


@pytest.fixture
def worker(tiny_model: Path) -> CalibrationWorker:
    """A worker that has started with two prompts."""
    made = CalibrationWorker(worker_spec(tiny_model, read_geometry(tiny_model), "float32"))
    made.start(list(enumerate(IDS)), "tau0")
    return made


def test_failure_in_the_middle_of_an_advance_ends_it(
    worker: CalibrationWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt is a layer ahead of the other: nothing may be computed from that."""
    step, calls = worker._stepped.step, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no memory for this prompt")
        return step(*args)

    worker.advance(0, FULL_ROW, 0)
    monkeypatch.setattr(worker._stepped, "step", failing)
    with pytest.raises(MemoryError):
        worker.advance(1, FULL_ROW, 0)
    monkeypatch.undo()
    for later in (lambda: worker.advance(2, FULL_ROW, 0), lambda: worker.judge(2, [16], 0)):
        with pytest.raises(CalibrationError, match="no memory for this prompt"):
            later()


def test_only_the_next_layer_is_taken(worker: CalibrationWorker) -> None:
    with pytest.raises(CalibrationError, match=r"cannot go on at layer 1: .* layer 0"):
        worker.judge(1, [16], 0)
    worker.advance(0, FULL_ROW, 0)
    assert [t.prompt for t in worker.judge(1, [16], 0)["tau0"]] == [0, 1]


def test_other_weights_or_libraries_than_the_drivers_are_refused(tiny_model: Path) -> None:
    import msgspec

    spec = worker_spec(tiny_model, read_geometry(tiny_model), "float32")
    assert CalibrationWorker(spec).probe().available > 0
    for changed in ({"weights_sample": "0" * 64}, {"libraries": {"torch": "1.0"}}):
        with pytest.raises(CalibrationError, match=r"another model|install the same"):
            CalibrationWorker(msgspec.structs.replace(spec, **changed)).probe()

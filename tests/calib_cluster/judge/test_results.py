"""Finished cases on disk, what is made of them, and whole files."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from calib_cluster.errors import CalibrationError
from calib_cluster.judge.results import (
    CASES_FILE,
    CaseLog,
    CaseResult,
    Result,
    Settings,
    read_result,
    write_result,
)
from calib_cluster.judge.scoring import Score
from calib_cluster.judge.summary import ANSWERS, cells, differences, grouped

SETTINGS = Settings(
    schema=1, model="m", model_config="c", model_weights={}, policies={"head": "rule"},
    peers={}, budgets=(64,), tasks=("needle", "text"), protocols=("aware",), lengths=(512,),
    per_task=2, seed=0, texts={}, items="i", code="k", libraries={},
)  # fmt: skip


def score(arm: str, budget: int | None, value: float) -> Score:
    return Score(arm, budget, float(budget or 512), value, value == 1, 2 - value, 0.5, 0.75)


def case(task: str, index: int, *values: float) -> CaseResult:
    """Scores of full, head and random, in this order."""
    arms = zip((("full", None), ("head", 64), ("random", 64)), values, strict=True)
    scores = [score(*arm, value) for arm, value in arms]
    protocol = "plain" if task == "text" else "aware"
    return CaseResult(task, protocol, 512, index, "one", 0.5, "d", 512, 6, 1.0, scores)


CASES = [
    case("needle", 0, 1.0, 1.0, 0.0), case("needle", 1, 1.0, 0.5, 0.25),
    case("recall", 0, 0.75, 0.25, 0.5), case("text", 0, 1.0, 1.0, 1.0),
]  # fmt: skip


def test_cases_are_on_disk_one_by_one_and_resume_finds_them(tmp_path):
    log = CaseLog(tmp_path / "new", SETTINGS, resume=False)
    for number, one in enumerate(CASES, start=1):
        log.add(one)
        found = CaseLog(tmp_path / "new", SETTINGS, resume=True).cases
        assert found == CASES[:number]
    with pytest.raises(CalibrationError, match="holds an earlier run: --resume goes on"):
        CaseLog(tmp_path / "new", SETTINGS, resume=False)


def test_resume_without_an_earlier_run_begins_one(tmp_path):
    assert CaseLog(tmp_path, SETTINGS, resume=True).cases == []


def test_a_line_that_was_cut_off_is_dropped_and_written_again(tmp_path):
    log = CaseLog(tmp_path, SETTINGS, resume=False)
    for one in CASES[:2]:
        log.add(one)
    path = tmp_path / CASES_FILE
    path.write_bytes(path.read_bytes()[:-40])
    again = CaseLog(tmp_path, SETTINGS, resume=True)
    assert again.cases == CASES[:1]
    again.add(CASES[1])
    assert CaseLog(tmp_path, SETTINGS, resume=True).cases == CASES[:2]


def test_other_settings_are_refused_by_name(tmp_path):
    CaseLog(tmp_path, SETTINGS, resume=False)
    other = msgspec.structs.replace(SETTINGS, seed=7, budgets=(64, 128))
    with pytest.raises(CalibrationError, match=r"budgets: \(64, 128\) -> \(64,\); seed: 7 -> 0"):
        CaseLog(tmp_path, other, resume=True)


@pytest.mark.parametrize(
    ("line", "told"),
    [(b"{}", "line 3, is damaged"), (b"\xff", "line 3, is damaged"), (None, "holds a case twice")],
)
def test_damaged_cases_are_refused(tmp_path, line, told):
    CaseLog(tmp_path, SETTINGS, resume=False).add(CASES[0])
    with (tmp_path / CASES_FILE).open("ab") as file:
        file.write((line or msgspec.json.encode(CASES[0])) + b"\n")
    with pytest.raises(CalibrationError, match=told):
        CaseLog(tmp_path, SETTINGS, resume=True)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"--out .*file/out: Not a directory"):
        CaseLog(tmp_path / "file" / "out", SETTINGS, resume=False)


def test_means_and_paired_differences_by_hand():
    found = {(c.task, c.arm): c for c in cells(CASES)}
    assert found["needle", "head"].accuracy == 0.75 and found["needle", "head"].exact == 0.5
    assert found["needle", "full"].kept == 512 and found["needle", "full"].budget is None
    together = found[ANSWERS, "head"]
    assert (together.n, together.accuracy) == (3, pytest.approx(1.75 / 3))
    assert found["text", "head"].protocol == "plain" and ("text", ANSWERS) not in found
    pairs = {(d.task, d.beside, d.measure): d.interval for d in differences(CASES, "head")}
    interval = pairs["needle", "random", "accuracy"]
    assert (interval.n, interval.mean, interval.low, interval.high) == (2, 0.625, 0.25, 1.0)
    assert pairs[ANSWERS, "full", "accuracy"].mean == pytest.approx((0 - 0.5 - 0.5) / 3)
    assert {key[2] for key in pairs if key[0] == "text"} == {"kl", "nll", "agreement"}
    assert not any(beside == "head" for _, beside, _ in pairs)


def test_pairs_are_of_the_same_item_whatever_the_order():
    turned = [CASES[2], CASES[3], CASES[1], CASES[0]]
    assert differences(turned, "head") == differences(CASES, "head")
    assert list(grouped(turned)) == list(grouped(CASES))


def test_results_are_read_back_as_written(tmp_path):
    result = Result(
        1, ["python"], {}, SETTINGS, True, "head", 2000, cells(CASES), differences(CASES, "head"),
        CASES,
    )  # fmt: skip
    assert read_result(write_result(tmp_path, result)) == result
    (tmp_path / "other.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(result, schema=2))
    )
    with pytest.raises(CalibrationError, match="has schema 2, this reads 1"):
        read_result(tmp_path / "other.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(CalibrationError, match=r"bad\.json is no result of the judge"):
        read_result(tmp_path / "bad.json")
    with pytest.raises(CalibrationError, match="cannot read"):
        read_result(tmp_path / "none.json")
    assert np.isfinite([c.nll for c in result.cells]).all()

"""On the trained hybrid SeqCalib's windows keep what uniform ones of as many bytes lose."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvpolicy.__main__ import main as kvpolicy
from loadtest.__main__ import main
from loadtest.hybrid.recall import Result

MODEL = Path(__file__).parents[1] / "weights" / "recall-hybrid"

pytestmark = pytest.mark.slow  # three servers, prompts of 2048 tokens


def test_calibrated_windows_keep_recall_where_uniform_ones_lose_it(tmp_path):
    made = ["new", "--model", str(MODEL), "--kind", "uniform", "--window", "1096"]
    assert kvpolicy([*made, "--sinks", "4", "--out", str(tmp_path)]) == 0
    (uniform,) = tmp_path.glob("*/*/*")
    policies = ["full", "seqcalib:tau-0.97", str(uniform)]
    told = ["--model", str(MODEL), "--policies", *policies, "--items", "2", "--seed", "7"]
    assert main(["hybrid-recall", *told, "--out", str(tmp_path / "out")]) == 0
    result = msgspec.json.decode((tmp_path / "out" / "recall.json").read_bytes(), type=Result)
    _, calibrated, even = result.arms
    assert even.residency >= calibrated.residency and calibrated.residency < 0.6
    right = [{score.task: score.right for score in arm.scores} for arm in result.arms]
    assert right[0]["recall"] >= 6, "of 8, with everything kept"
    assert right[1]["recall"] >= right[0]["recall"] - 1
    assert right[2]["recall"] <= 2
    assert all(arm.cached_tokens > 0 for arm in result.arms)

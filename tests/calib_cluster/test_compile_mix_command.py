"""``compile --rule mix`` from a command line: query weights, questions, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from calib_cluster.__main__ import main
from calib_cluster.compile_memory import estimate_reward_peak
from calib_cluster.compile_worker import Drawing
from calib_cluster.rewards.actions import MIX_GRID, PAPER_GRID, ActionGrid
from calib_cluster.rewards.model import RewardModel
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RULES
from tests.calib_cluster.in_process import without_ray
from tests.calib_cluster.tiny import artifact_of
from tests.calib_cluster.tiny_compile import TinyCompile

MIX = ("--rule", "mix", "--corpus", "records", "records-later", "key-value", "--length", "400",
       "--draws", "4", "--budgets", "48")  # fmt: skip


def run(made: TinyCompile, capsys, *extra: str) -> str:
    capsys.readouterr()
    with without_ray():
        status = main(made.arguments(*MIX, *extra))
    out, error = capsys.readouterr()
    assert status == 0, error
    return out


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt whose copies were measured."""
    found: list[int] = []
    plain = RewardModel.copies
    monkeypatch.setattr(
        RewardModel, "copies",
        lambda self, prompt, *rest: found.append(len(prompt)) or plain(self, prompt, *rest),
    )  # fmt: skip
    return found


def test_any_number_of_workers_and_any_interruption_give_one_policy(
    tiny_model: Path, tmp_path, capsys, counted
):
    one, two = (TinyCompile(tiny_model, tmp_path / name / "artifacts") for name in ("1", "2"))
    log = run(one, capsys)
    assert "records 2, records-later 1, key-value 1" in log
    assert "query heads that retrieve: measured on 4 prompts" in log and counted == [400] * 4
    made = artifact_of(log)
    assert artifact_of(run(two, capsys, "--workers", "2")).manifest.version == made.manifest.version
    mix = made.retention.mix
    assert mix.shares.shape[0] == 1 and mix.query_weights.max() == 1

    one.shards[2].unlink()
    (one.records / "result.json").unlink()
    counted.clear()
    again = run(one, capsys, "--resume")
    assert not counted, "query weights are durable: records depend on them"
    assert "3 shards of reward records are there already" in again
    assert artifact_of(again).manifest.version == made.manifest.version
    assert "already complete" in run(one, capsys)


def test_growth_keeps_the_query_weights(tiny_model: Path, tmp_path, capsys, counted):
    made = TinyCompile(tiny_model, tmp_path / "artifacts")
    run(made, capsys)
    before = {path.name: path.read_bytes() for path in made.shards}
    counted.clear()
    log = run(made, capsys, "--prompts", "7", "--extend")
    assert "4 shards of reward records are there already" in log and not counted
    after = {path.name: path.read_bytes() for path in made.shards}
    assert len(after) == 7 and before.items() <= after.items()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--even", "0"), "the even part must be in (0, 1], found 0"),
        (("--behaviour", "one-at-a-time"), "rule mix is compiled from factorial draws"),
        (("--draws-per-cell", "9"), "rule mix has no gate and no risk cells"),
    ],
)
def test_bad_input_is_one_line(tiny_model: Path, tmp_path, capsys, extra, message):
    made = TinyCompile(tiny_model, tmp_path / "artifacts")
    with without_ray():
        status = main(made.arguments(*MIX, *extra))
    error = capsys.readouterr().err.strip()
    assert status == 2 and message in error and len(error.splitlines()) == 1
    assert not made.records.exists()


def test_a_mix_is_known_to_need_more_memory(tiny_model: Path):
    """It holds each query head's squares, every mixture's order, and wider kept sets."""
    geometry = read_geometry(tiny_model)

    def hidden(rule: str, grid: ActionGrid, length: int) -> int:
        drawing = Drawing(RULES[rule], "factorial", (48,), 4, 0, 8, grid)
        return estimate_reward_peak(
            geometry, tiny_model, length=length, continuation=16, drawing=drawing, runtime=0
        ).hidden

    more = [hidden("mix", MIX_GRID, t) - hidden("paper", PAPER_GRID, t) for t in (2048, 4096)]
    units = sum(layer.num_kv_heads for layer in geometry.attention_layers)
    assert more[0] > 4 * units * 2048 * len(MIX_GRID.quotas)
    assert 1.5 < more[1] / more[0] < 2.1

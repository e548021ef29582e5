"""The command from end to end on a random model."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from pathlib import Path

import pytest
from matplotlib.image import imread
from transformers import AutoTokenizer

from calib_cluster.__main__ import main
from calib_cluster.errors import CalibrationError
from calib_cluster.judge import bench, find_policy, load_texts, make_items
from calib_cluster.judge.results import read_result
from kvpolicy.geometry import read_geometry

PEERS = "snapkv,adakv,chunkkv,recency"


@pytest.fixture
def command(reader: Path, texts: Path):
    """``command(out, *flags)``: the arguments of a small run."""

    def arguments(out: Path, *flags: str) -> list[str]:
        given = {
            "--model": str(reader), "--texts": str(texts), "--out": str(out), "--length": "512",
            "--per-task": "1", "--budgets": "20,64", "--peers": PEERS, "--policies": "head,paper",
        }  # fmt: skip
        given |= dict(zip(flags[::2], flags[1::2], strict=False))
        return ["judge", *(word for pair in given.items() for word in pair if word)]

    return arguments


def scores_of(folder: Path) -> list:
    """Every case without its time."""
    cases = json.loads((folder / "judge.json").read_bytes())["cases"]
    return [{k: v for k, v in case.items() if k != "seconds"} for case in cases]


def test_a_whole_run(command, tmp_path, capsys):
    """Every task under both protocols: files, tables, equal budgets, differences."""
    assert main(command(tmp_path)) == 0
    result = read_result(tmp_path / "judge.json")
    assert result.finished and len(result.cases) == 6 * 2 + 1 and result.against == "head"
    assert set(result.settings.peers) == set(PEERS.split(","))
    for case in result.cases:
        assert [s.arm for s in case.scores[:1]] == ["full"] and len(case.scores) == 1 + 6 * 2
        assert case.tokens == 512 - (case.task == "labels") or case.protocol == "agnostic"
        kept = {(s.arm, s.budget): s.kept for s in case.scores}
        for arm in ("head", "snapkv", "adakv", "recency"):
            assert [kept[arm, 20], kept[arm, 64]] == [20, 64]
        assert kept["chunkkv", 20] <= 20 and 40 < kept["chunkkv", 64] <= 64
    assert {d.beside for d in result.differences} == {"full", "paper", *PEERS.split(",")}
    out = capsys.readouterr().out
    tables, _, ranking = out.partition("Behind the best arm, over 26 columns")
    assert tables.count("T=512, ") == 6 * 2 + 2 + 1  # a table each, and all answers together
    assert ranking.count("T=512, ") == len(result.losses) == 6
    assert [loss.worst for loss in result.losses] == sorted(loss.worst for loss in result.losses)
    assert "T=512, aware, needle, n=1" in out and "head minus it" in out
    assert re.search(r"paper: rule paper \(observe=64 .*uniform tables", " ".join(out.split()))
    assert max(map(len, out.split("\n")[:30])) <= 150
    image = imread(tmp_path / "judge.png")
    assert image.shape[0] > 500 and image.shape[1] > 1000 and image[..., :3].std() > 0.05


def test_resume_goes_on_and_gives_the_same(command, tmp_path, monkeypatch, capsys):
    """Interrupted in its third case: what there is is kept, shown and gone on with."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = "--tasks", "needle,text", "--per-task", "2"
    assert main(command(whole, *flags)) == 0
    plain, calls = bench.Bench.run, []

    def interrupted(self, *task):
        calls.append(task)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, *task)

    monkeypatch.setattr(bench.Bench, "run", interrupted)
    capsys.readouterr()
    assert main(command(cut, *flags)) == 130
    told = capsys.readouterr()
    assert "2 cases so far, not finished" in told.out and "--resume continues" in told.err
    assert not read_result(cut / "judge.json").finished and len(scores_of(cut)) == 2
    assert main(command(cut, *flags)) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert main([*command(cut, *flags, "--seed", "3"), "--resume"]) == 2
    assert "seed: 3 -> 0" in capsys.readouterr().err
    calls.append("more")  # past the third call
    assert main([*command(cut, *flags), "--resume"]) == 0
    assert len(calls) == 3 + 1 + 4  # the one that was interrupted, and those after it
    assert scores_of(cut) == scores_of(whole)
    assert main([*command(cut, *flags), "--resume"]) == 0 and len(calls) == 8


def test_two_workers_give_what_one_gives_until_one_is_killed(reader, texts):
    """The same scores as in this process; a killed worker (for want of memory) ends the run."""
    tokenizer = AutoTokenizer.from_pretrained(reader)
    items = make_items(
        load_texts([str(texts)]), tokenizer, tasks=["needle", "text"], length=512, per_task=2,
        seed=0,
    )  # fmt: skip
    geometry = read_geometry(reader)
    policy = find_policy("head", geometry)
    spec = bench.BenchSpec(reader, geometry, (policy,), ("recency",), (20, 64), 0)
    tasks = [(item, item.protocols(["aware"])[0]) for item in items]
    alone = {case.key: case.scores for case in bench.run_cases(spec, tasks, 1)}
    results = bench.run_cases(spec, tasks * 200, 2)
    found = {}
    while found.keys() != alone.keys():
        case = next(results)
        found[case.key] = case.scores
    assert found == alone and len(multiprocessing.active_children()) == 2
    multiprocessing.active_children()[0].kill()
    with pytest.raises(CalibrationError, match=r"a worker died .* --resume goes on"):
        list(results)
    deadline = time.monotonic() + 30  # the pool's own thread may be the one that reaps it
    while multiprocessing.active_children():
        assert time.monotonic() < deadline, "a worker outlived the run"
        time.sleep(0.05)


def test_what_a_worker_cannot_load_is_told_by_its_first_case(monkeypatch):
    monkeypatch.setattr(bench, "_bench", CalibrationError("no such model"))
    with pytest.raises(CalibrationError, match="no such model"):
        bench._run(None, "aware")


def test_no_policy_and_no_budget_below_the_prompt(command, tmp_path, capsys):
    flags = "--policies", "none", "--budgets", "5000", "--tasks", "needle", "--protocols", "aware"
    assert main(command(tmp_path, *flags)) == 0
    result = read_result(tmp_path / "judge.json")
    assert result.against is None and result.differences == []
    assert all(s.kl == 0 and s.kept == 512 for s in result.cases[0].scores)
    assert "minus it" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--policies", "nothing"), "--policies nothing: no policy 'nothing'"),
        (("--policies", "full"), "full has no retention tables"),
        (("--policies", "head,head"), "'head' is named twice"),
        (("--peers", "snapkv,"), "--peers 'snapkv,': '' is not accepted: give snapkv"),
        (("--tasks", "riddle"), "--tasks 'riddle': 'riddle' is not accepted: give needle"),
        (("--tasks", "none"), "leave nothing to judge"),
        (("--protocols", "blind"), "give aware, agnostic"),
        (("--budgets", "12,0"), "whole numbers of at least 1"),
        (("--budgets", "12"), "chunkkv keeps whole chunks of 20 tokens"),
        (("--length", "100"), "--length '100' is not accepted: give whole numbers of at least 256"),
        (("--per-task", "0"), "--per-task 0 is not accepted"),
        (("--against", "nobody"), "--against 'nobody' is no arm of this run: give head, paper"),
        (("--texts", "no-such-text"), "'no-such-text' is neither a file or folder nor a recipe"),
        (("--model", "/no/such/model"), "--model: "),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(command, tmp_path, capsys, flags, told):
    assert main(command(tmp_path / "out", *flags)) == 2
    error = capsys.readouterr().err.strip()
    assert told in error and "\n" not in error and error.startswith("calib_cluster: ")
    assert not (tmp_path / "out").exists()

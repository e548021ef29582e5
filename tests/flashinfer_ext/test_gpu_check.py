"""``gpu-check`` without a GPU: arguments, journal, workers that break, report, bundle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer_ext import gpu_bundle, gpu_check
from flashinfer_ext.bench_journal import Budget, Journal, JournalError, commit_of, read_lines
from flashinfer_ext.bench_report import plain_table, print_report, rows_of
from flashinfer_ext.gpu_tests import count_outcomes

ROOT = Path(__file__).parents[2]
RUN = {"id": "1", "gpu": "H200", "versions": {"torch": "2.11"}, "command": "x", "commit": "abc"}


def cli(*args: str) -> int:
    """Exit status."""
    try:
        return gpu_check.main(list(args))
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path, capsys):
    assert cli("--out", str(tmp_path / "out")) == 2
    assert not (tmp_path / "out").exists()
    error = capsys.readouterr().err
    assert error.startswith("gpu-check needs a CUDA GPU; torch ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("args", [("--seconds", "0"), ("--seconds", "x"), ("--only", "prefill")])
def test_bad_arguments(args, capsys):
    assert cli(*args) == 2
    assert args[1] in capsys.readouterr().err


def test_reports_of_other_files_are_refused(tmp_path, capsys):
    assert cli("--report", str(tmp_path / "none")) == 2
    (tmp_path / "other").write_text('{"kind": "decode"}\n')
    assert cli("--report", str(tmp_path / "other")) == 2
    (tmp_path / "empty").write_text("")
    assert cli("--report", str(tmp_path / "empty")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("/")[0] for line in lines[:2]] == [
        "gpu-check: cannot read ",
        "gpu-check: ",
    ]
    assert "line 1: not a result of gpu-check" in lines[1]
    assert "no results" in lines[2]


# The journal


def test_each_line_is_on_disk_at_once_with_its_run_and_share_of_the_copy(tmp_path):
    path = tmp_path / "deep" / "f.jsonl"
    journal = Journal(path, RUN)
    journal.add({"kind": "decode", "bytes_per_s": 50})
    journal.add({"kind": "copy", "bytes_per_s": 100})
    journal.add({"kind": "decode", "bytes_per_s": 50})
    lines = read_lines(path)
    assert [line.get("roofline") for line in lines] == [None, None, 0.5]
    assert all(line["run"] == RUN for line in lines)


def test_a_line_that_was_cut_off_costs_itself_only(tmp_path):
    path = tmp_path / "f.jsonl"
    Journal(path, RUN).add({"kind": "copy"})
    with path.open("a") as file:
        file.write('{"kind": "dec')
    Journal(path, {**RUN, "id": "2"}).add({"kind": "copy"})
    assert [line["run"]["id"] for line in read_lines(path)] == ["1", "2"]


def test_a_results_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot write"):
        Journal(tmp_path / "file" / "f.jsonl", RUN)


def test_the_budget_never_grows():
    now = [10.0]
    budget = Budget(5, lambda: now[0])
    assert budget.left() == 5
    now[0] = 14.0
    assert budget.left() == 1
    now[0] = 99.0
    assert budget.left() == 0


def test_the_commit_comes_from_git_or_the_bundle(tmp_path):
    assert commit_of(tmp_path, None) == ""
    assert commit_of(tmp_path, tmp_path) == ""
    (tmp_path / "bundle.json").write_text('{"commit": "abc"}')
    assert commit_of(tmp_path, tmp_path) == "abc"


# Workers

WORKER = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float)
parser.add_argument("--skip", nargs="*")
parser.add_argument("--cases", nargs="+")
args = parser.parse_args()
say = lambda **event: print(json.dumps(event), flush=True)
for case in args.cases:
    say(begin=case)
    kind = case.split()[0]
    if "crash" in case and "decode/bad" not in args.skip:
        say(trying="decode/bad")
        print("illegal memory access", file=sys.stderr)
        sys.exit(1)
    if "hang" in case:
        say(trying="decode/slow")
        time.sleep(60)
    say(case=case, kind=kind, contender="x", status="ok", pid=os.getpid())
"""


@pytest.fixture
def workers(tmp_path):
    """``workers(seconds, silence)``: (journal, workers of the script above)."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def make(seconds: float = 60, silence: float = 30):
        journal = Journal(tmp_path / "f.jsonl", RUN)
        command = [sys.executable, str(script)]
        return journal, gpu_check.Workers(journal, Budget(seconds), False, command, silence)

    return make


def test_a_case_that_breaks_its_worker_costs_itself_only(workers):
    journal, pool = workers()
    pool.run(["decode 1", "decode crash 2", "decode 3", "decode crash 4", "decode crash 5"])
    lines = journal.lines
    assert [line["status"] for line in lines[:-1]] == ["ok", "failed", "ok", "failed", "ok"]
    assert lines[1]["reason"] == "the worker ended with 1: illegal memory access"
    assert (lines[1]["case"], lines[1]["contender"]) == ("decode crash 2", "bad")
    assert lines[0]["pid"] != lines[2]["pid"]
    assert lines[-1] == {"kind": "end", "not_begun": []}


def test_a_case_that_hangs_is_ended(workers):
    journal, pool = workers(silence=1.0)
    pool.run(["decode hang", "decode 2"])
    assert [line.get("status") for line in journal.lines] == ["failed", "ok", None]
    assert journal.lines[0]["reason"] == "silent for 1.0 s"
    assert journal.lines[0]["contender"] == "slow"


def test_what_was_not_begun_is_noted(workers):
    journal, pool = workers(seconds=0)
    pool.run(["decode 1", "decode 2"])
    assert journal.lines == [{"kind": "end", "not_begun": ["decode 1", "decode 2"]}]


def test_a_worker_that_does_not_start_is_told_once(workers):
    journal, pool = workers()
    pool.command = [sys.executable, "-c", "raise SystemExit('no torch')"]
    pool.run(["decode 1", "decode 2"])
    assert [line["kind"] for line in journal.lines] == ["worker", "end"]
    assert journal.lines[0]["reason"] == "the worker ended with 1: no torch"


# The tests' outcomes

PLAIN = """
tests/flashinfer_ext/test_a.py::test_x[cuda-1] PASSED        [ 10%]
tests/flashinfer_ext/test_a.py::test_x[cuda-2] FAILED        [ 20%]
tests/flashinfer_ext/test_a.py::test_y SKIPPED (no reason)   [ 30%]
"""
ENDED = """=================== FAILURES ===================
tests/flashinfer_ext/test_a.py::test_x PASSED in a captured output
=========================== short test summary info ============================
FAILED tests/flashinfer_ext/test_a.py::test_x[cuda-2] - AssertionError: not close!
ERROR tests/flashinfer_ext/test_b.py - ModuleNotFoundError: No module named 'msgspec'
"""


def test_outcomes_of_a_run_that_ended_and_of_one_that_was_cut_off():
    assert count_outcomes(PLAIN)["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    found = count_outcomes(PLAIN + ENDED)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert found["failures"][0].endswith("test_x[cuda-2]: AssertionError: not close!")
    workers = "[gw3] [ 12%] PASSED tests/flashinfer_ext/test_a.py::test_x[cuda-1] \n"
    assert count_outcomes(workers * 2)["counts"] == {"passed": 2}


def test_the_gpu_tests_are_collected_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-c", gpu_bundle.LAUNCH, "", "--collect-only", "-q", "-m", "gpu",
         "-p", "no:cacheprovider", "tests/flashinfer_ext/test_triton_store.py"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_layers_are_told_apart[cuda]" in done.stdout


# The report


def timed(case: str, contender: str, median: float, **more) -> dict:
    times = {"median_us": median, "p10_us": median - 1, "p90_us": median + 1}
    return {"case": case, "kind": case.split()[0], "contender": contender, "status": "ok",
            **times, **more}  # fmt: skip


CANNED = [
    {"kind": "tests", "status": "failed", "counts": {"passed": 3, "failed": 1},
     "failures": ["t: wrong"], "notes": ["FlashInfer's tests are left out"]},
    timed("copy", "torch copy", 100, bytes_per_s=4e12),
    timed("decode a", "raggedkv triton", 50, bytes_per_s=3e12, roofline=0.75),
    timed("decode a", "dense flashinfer", 75, bytes_per_s=2e12, roofline=0.5),
    {"case": "decode a", "kind": "decode", "contender": "dense sglang triton",
     "status": "unavailable", "reason": "sglang is not installed"},
    timed("extend b", "dense torch sdpa", 75, tflops=412.3),
    {"kind": "end", "not_begun": ["x", "y"]},
]  # fmt: skip


def test_the_report_of_a_canned_file(tmp_path, capsys):
    path = tmp_path / "f.jsonl"
    first, second = Journal(path, RUN), Journal(path, {**RUN, "id": "2"})
    for line in CANNED:
        first.add(line)
    second.add(timed("decode a", "raggedkv triton", 500))
    second.add(timed("decode a", "dense flashinfer", 250))
    rows = list(rows_of(read_lines(path)[:6]))
    assert rows[1] == (
        "decode a", "raggedkv triton", "50.0", "49.0", "51.0", "3000 GB/s", "0.75", "1.00",
    )  # fmt: skip
    assert rows[2][-1] == "1.50"
    assert rows[3][2] == "unavailable: sglang is not installed"
    assert rows[4][5] == "412.3 TFLOP/s"
    table = plain_table(rows)
    assert {line.index("49.0") for line in table[2:3]} == {table[3].index("74.0")}
    assert all(line.startswith(" " * len("decode a")) for line in table[3:5])
    assert cli("--report", str(path)) == 0
    shown = capsys.readouterr().out
    for text in (
        "run 1 on H200 (torch 2.11)",
        "commit: abc",
        "3 passed, 1 failed",
        "t: wrong",
        "not begun, out of time: 2 cases",
        "left out",
        "run 2 on H200",
        "0.50",
    ):
        assert text in shown


def test_the_report_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_report([{**line, "run": RUN} for line in CANNED])
    assert "dense flashinfer" in capsys.readouterr().out


# The bundle


def test_a_bundle_of_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGEDKV_FLASHINFER", str(tmp_path / "modules"))
    folder = tmp_path / "bundle"
    notes = gpu_bundle.make_bundle(ROOT, folder, download=False)
    assert f"no prebuilt ragged_decode_d128_bf16 in {tmp_path / 'modules'}" in notes[0]
    about = json.loads((folder / "bundle.json").read_text())
    assert about["notes"] == notes[:-1]
    assert gpu_bundle.make_bundle(ROOT, folder, download=False) == notes
    other = tmp_path / "mine"
    other.mkdir()
    with pytest.raises(gpu_bundle.BundleError, match="is not a bundle"):
        gpu_bundle.make_bundle(ROOT, other, download=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "mine"]


def test_a_bundle_is_used_where_the_machine_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RAGGEDKV_FLASHINFER", raising=False)
    assert not gpu_bundle.use_bundle(tmp_path)
    (tmp_path / "bundle.json").write_text("{}")
    assert gpu_bundle.use_bundle(tmp_path)
    assert str(tmp_path / "site") in sys.path[-2:]
    assert os.environ.pop("RAGGEDKV_FLASHINFER") == str(tmp_path / "modules")

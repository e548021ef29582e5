"""``gpu-check`` without a GPU: arguments, journal, workers that break, every case's code path."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer_ext import bench_ragged, bench_sglang, gpu_bundle, gpu_check
from flashinfer_ext.bench_cases import FULL, KINDS, BenchCase, full_cases, small_cases
from flashinfer_ext.bench_checks import Unavailable, worst_error
from flashinfer_ext.bench_data import Storage, decode_data, extend_data
from flashinfer_ext.bench_dense import dense_lengths
from flashinfer_ext.bench_journal import Budget, Journal, JournalError, commit_of, read_lines
from flashinfer_ext.bench_report import plain_table, print_report, rows_of
from flashinfer_ext.bench_timing import Timing
from flashinfer_ext.bench_worker import Bench, run_cases
from flashinfer_ext.gpu_tests import count_outcomes
from flashinfer_ext.triton_decode import TritonDecode
from tests.flashinfer_ext.cases import reads
from tests.flashinfer_ext.conftest import INTERPRETED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RUN = {"id": "1", "gpu": "H200", "versions": {"torch": "2.11"}, "command": "x", "commit": "abc"}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


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


def test_cases_are_named_apart_and_the_most_telling_come_first():
    cases = full_cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert names[:2] == ["copy", "decode skewed 64x D128 G4"]
    assert {case.kind for case in cases[:10]} == set(KINDS)
    decodes = {
        (c.windows, c.requests, c.head_dim, c.group) for c in cases if c.kind == "decode"
    }  # fmt: skip
    wanted = {
        (w, r, d, g)
        for w in ("uniform", "skewed") for r in (8, 64, 256) for d in (64, 128) for g in (1, 4, 8)
    }  # fmt: skip
    assert wanted <= decodes
    extends = {(c.head_dim, *c.lengths) for c in cases if c.kind == "extend"}
    assert extends == {(d, h, t) for d in (64, 128) for h in (0, 8192) for t in (512, 2048)}


# What is measured


def test_a_batch_reads_what_its_formula_says():
    case = small_cases()[1]
    data = decode_data(case, Storage(torch.float16, CPU), page=8)
    lengths = data.batch.lengths.tolist()
    want = [
        [int(reads(n - 1, window, case.sinks, n).sum()) for window in case.head_windows]
        for n in lengths
    ]
    assert data.reads.tolist() == want
    assert data.kv_bytes() == sum(map(sum, want)) * 2 * case.head_dim * 2
    assert data.page_bytes(8) == 4 * sum(-(-n // 8) for row in want for n in row)
    heads = len(case.head_windows)
    for length, row in zip(dense_lengths(data).tolist(), want, strict=True):
        assert 0 <= length * heads - sum(row) < heads


def test_every_token_that_is_read_has_a_page_of_its_own():
    case = dataclasses.replace(small_cases()[1], requests=4)
    data = decode_data(case, Storage(torch.float16, CPU), page=8)
    owned = []
    for r, length in enumerate(data.batch.lengths.tolist()):
        for h, window in enumerate(case.head_windows):
            tokens = reads(length - 1, window, case.sinks, length).nonzero().flatten()
            slots = data.table.slots[r, tokens].long()
            pages = data.table.pages[int(data.heads.units[0, h]), slots // 8]
            assert (slots % 8 == tokens % 8).all()
            owned += pages.unique().tolist()
    assert len(set(owned)) == len(owned)
    assert sorted(owned) == list(range(1, data.layout.num_pages))


def test_flops_count_the_pairs_that_are_seen():
    case = BenchCase("extend", "skewed", 2, 16, 3, (40, 50), small=True)
    data = extend_data(case, Storage(torch.float16, CPU), page=8)
    pairs = sum(
        int(reads(t, window, case.sinks, 90).sum())
        for window in case.head_windows for t in range(40, 90)
    )  # fmt: skip
    assert data.flops() == pairs * 2 * 3 * 4 * 16
    assert data.flops((FULL, FULL)) == 2 * sum(range(41, 91)) * 2 * 3 * 4 * 16


def test_lengths_shrink_where_memory_is_short(monkeypatch):
    storage = Storage(torch.float16, CPU)
    monkeypatch.setattr(storage, "limit", lambda: 2 * 64 * 2 * 80)
    data = decode_data(small_cases()[2], storage)
    assert int(data.lengths.sum()) <= 48
    assert int(data.lengths.min()) >= 1


def test_percentiles():
    timing = Timing.of([float(n) for n in range(20, -1, -1)], graph=True)
    assert (timing.p10_us, timing.median_us, timing.p90_us, timing.repeats) == (2, 10, 18, 21)


def test_an_error_is_seen_in_any_one_head():
    want = torch.randn(3, 4, 16) * 1e-3
    assert worst_error(want, want) == 0
    wrong = want.clone()
    wrong[2, 1] *= 1.1
    assert worst_error(wrong, want) == pytest.approx(0.1, rel=1e-3)
    wrong[0, 0, 0] = float("nan")
    assert worst_error(wrong, want) == float("inf")


@pytest.fixture
def no_sglang(monkeypatch):
    """Its import takes ten seconds; the carried copy is tried on its own."""

    def absent():
        raise Unavailable("left out here")

    monkeypatch.setattr(bench_sglang, "kernels", absent)


def results(events) -> dict[tuple[str, str], dict]:
    """By case and contender."""
    return {(e["case"], e["contender"]): e for e in events if "case" in e}


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_every_kind_of_case_runs_and_is_right(no_sglang):
    cases = small_cases()
    assert {case.kind for case in cases} == set(KINDS)
    found = results(run_cases(Bench(CPU, dry=True), cases))
    reasons = {key: e.get("reason") for key, e in found.items() if e["status"] != "ok"}
    assert {contender for _, contender in reasons} == {"dense sglang triton"}
    assert set(reasons.values()) == {"left out here"}
    decode = {key[1]: e for key, e in found.items() if key[0] == cases[1].name}
    assert len(decode) == 6
    assert len([key for key in found if key[0] == cases[-1].name]) == 4
    measured = [e for e in decode.values() if e["status"] == "ok"]
    assert all(e["error"] < 5e-3 and e["bytes"] >= e["kv_bytes"] // 2 for e in measured)
    assert max(e["bytes"] for e in measured) < 1.2 * min(e["bytes"] for e in measured)


@interpreted
@pytest.mark.parametrize("spoil", [0.0, float("nan")])
def test_a_wrong_result_is_told_and_not_timed(no_sglang, monkeypatch, spoil):
    right = TritonDecode.run

    def wrong(self, q, arena, table, layer, batch, out, *rest, **options):
        right(self, q, arena, table, layer, batch, out, *rest, **options)
        out[-1, -1] = spoil

    monkeypatch.setattr(bench_ragged.TritonDecode, "run", wrong)
    bench = Bench(CPU, dry=True)
    monkeypatch.setattr(bench, "_load", lambda *_: (_ for _ in ()).throw(Unavailable("none")))
    cases = [case for case in small_cases() if case.kind in ("decode", "replay")][::2]
    found = results(run_cases(bench, cases))
    ours = [e for (_, name), e in found.items() if name == "raggedkv triton"]
    assert [e["status"] for e in ours] == ["wrong"] * len(cases)
    assert all("median_us" not in e for e in ours)
    assert found[cases[0].name, "dense torch sdpa"]["status"] == "ok"
    assert found[cases[0].name, "dense flashinfer"]["reason"] == "none"


def test_no_case_is_begun_after_the_time_and_failures_are_lines(monkeypatch):
    bench = Bench(CPU, dry=True)
    assert list(run_cases(bench, small_cases(), seconds=0)) == []
    case = dataclasses.replace(small_cases()[1], windows="none")
    events = list(run_cases(bench, [case, small_cases()[0]]))
    assert events[0] == {"begin": case.name}
    assert (events[1]["status"], events[1]["reason"]) == ("failed", "KeyError: 'none'")
    assert events[-1]["status"] == "ok"


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


@interpreted
def test_sglangs_carried_kernel_runs_without_sglang(tmp_path):
    """Its sources as they are, what they import replaced, through the worker's own process."""
    pytest.importorskip("sglang.version")
    (tmp_path / "bundle").mkdir()
    assert gpu_bundle._sglang(tmp_path / "bundle") == []
    case = small_cases()[2].name
    paths = [str(tmp_path / "bundle" / "sglang"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "flashinfer_ext.bench_worker", "--dry-run", "--cases", case],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = results(map(json.loads, done.stdout.splitlines()))
    assert found[case, "dense sglang triton"]["status"] == "ok", found
    assert found[case, "dense sglang triton"]["error"] < 5e-3

"""The cases of ``gpu-check`` on a CPU: what they measure, and each contender's whole code path."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashinfer_ext import bench_ragged, bench_sglang, gpu_bundle
from flashinfer_ext.bench_cases import FULL, KINDS, BenchCase, full_cases, small_cases
from flashinfer_ext.bench_checks import Unavailable, worst_error
from flashinfer_ext.bench_data import Storage, decode_data, extend_data
from flashinfer_ext.bench_dense import dense_lengths
from flashinfer_ext.bench_timing import Timing
from flashinfer_ext.bench_worker import Bench, run_cases
from flashinfer_ext.triton_decode import TritonDecode
from tests.flashinfer_ext.cases import reads
from tests.flashinfer_ext.conftest import INTERPRETED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


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

"""The quality command end to end, against servers that only pretend."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.geometry import read_geometry
from kvpolicy.windows import FULL, WindowPolicy
from loadtest import quality_setup, servers
from loadtest.__main__ import main
from loadtest.quality_contenders import Contender, Kind
from loadtest.quality_measure import Fleet, serving_spec, text_score
from loadtest.quality_report import compare, show
from loadtest.quality_results import Result
from loadtest.quality_texts import Excerpt
from tests.loadtest import quality_server
from tests.loadtest.quality_model import prose, write_model

CONTEXT = 400
SIZES = ("--context", str(CONTEXT), "--texts-per-run", "4", "--needles", "4", "--bootstrap", "200")


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def policy(model, tmp_path) -> str:
    """Points tau-0.95 (all units of window 64) and tau-0.99 (a quarter of them)."""
    geometry = read_geometry(model)
    some = np.full((4, 2), FULL, dtype=np.int32)
    some[0] = 64
    points = [
        PointSpec("tau-0.95", WindowPolicy.uniform(geometry, 64, 4)),
        PointSpec("tau-0.99", WindowPolicy(geometry, some, 4)),
    ]
    return str(write_artifact(tmp_path / "a", model_name="m", name="p", points=points))


@pytest.fixture
def texts(tmp_path) -> str:
    rows = [{"text": prose(900, start), "corpus": name} for name, start in (("a", 0), ("b", 9000))]
    (tmp_path / "held-out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "held-out.jsonl")


class Starts:
    """The servers of one test: ``policies`` that were served, ``modes`` of those to come."""

    def __init__(self) -> None:
        self.policies: list[str] = []
        self.modes: list[str] = []

    def command(self, model_dir: Path, port: int, _: bool, flags: Sequence[str]) -> list[str]:
        """Command line of a fake server instead of SGLang's."""
        self.policies.append(flags[flags.index("--kv-policy") + 1])
        mode = self.modes.pop(0) if self.modes else "answer"
        where = [str(port), mode, str(model_dir), self.policies[-1]]
        return [sys.executable, quality_server.__file__, *where]


@pytest.fixture
def started(monkeypatch, children) -> Iterator[Starts]:
    """Makes every server a fake one. No child may be left behind."""
    starts = Starts()
    monkeypatch.setattr(servers, "_command", starts.command)
    yield starts
    assert children() == []


@pytest.fixture
def quality(model, policy, texts, tmp_path):
    """``quality(*flags)`` runs the command with small sizes; returns its status."""

    def run(*flags: str) -> int:
        where = ["--model", str(model), "--policy", policy, "--texts", texts]
        return main(["quality", *where, "--out", str(tmp_path / "out"), *SIZES, *flags])

    return run


def read(tmp_path) -> Result:
    return msgspec.json.decode((tmp_path / "out" / "quality.json").read_bytes(), type=Result)


@pytest.mark.parametrize("at_once", ["1", "3"])
def test_every_contender_is_served_scored_and_compared(quality, started, tmp_path, capsys, at_once):
    assert quality("--servers", at_once) == 0
    result = read(tmp_path)
    assert [row.name for row in result.rows] == [
        "full",
        "tau-0.95",
        "tau-0.99",
        "uniform",
        "shuffled",
    ]
    assert result.complete and len(started.policies) == 5 and started.policies.count("full") == 1
    windowed = {"full": 0, "tau-0.95": 1, "tau-0.99": 0.25, "uniform": 1, "shuffled": 0.25}
    for row in result.rows:
        assert [t.nll for t in row.texts] == pytest.approx([1 + windowed[row.name]] * 4)
        assert [t.late for t in row.texts] == pytest.approx([1 + windowed[row.name]] * 4)
        assert [n.found for n in row.needles] == [windowed[row.name] <= 0.5] * 4
        assert row.peak_pages == quality_server.PEAK_PAGES
    differences = {
        (c.name, c.beside, c.measure): c.interval.mean
        for c in result.comparisons
        if c.corpus == "all"
    }
    assert differences["tau-0.95", "full", "nll"] == pytest.approx(1)
    assert differences["uniform", "tau-0.99", "nll"] == pytest.approx(0.75)
    assert differences["uniform", "tau-0.99", "retrieval"] == -1
    assert differences["shuffled", "tau-0.99", "late"] == pytest.approx(0)
    assert ("shuffled", "tau-0.95", "nll") not in differences
    words = " ".join(capsys.readouterr().out.split())
    assert "tau-0.95 +1.0000 +1.0000 -1.000 - full [+1.0000, +1.0000]" in words
    image = Image.open(tmp_path / "out" / "quality.png")
    assert image.width >= 800 and image.height > image.width


def test_the_intervals_can_be_computed_again_from_the_file(quality, started, tmp_path):
    quality()
    result = read(tmp_path)
    assert compare(result.rows, result.bootstrap, result.seed) == result.comparisons
    assert {c.corpus for c in result.comparisons} == {"all", "a", "b"}
    served = np.array(result.row("tau-0.99").windows)
    assert (served == FULL).sum() == 6 and (served == 64).sum() == 2
    assert result.row("uniform").residency >= result.row("tau-0.99").residency
    flags = [flag for row in result.rows for flag in row.flags]
    assert not [flag for flag in flags if "/" in flag], (
        "folders of this machine are nobody's business"
    )


def test_only_the_points_asked_for_and_no_baselines(quality, started, tmp_path):
    assert quality("--point", "tau-0.95", "--baselines", "none") == 0
    assert [row.name for row in read(tmp_path).rows] == ["full", "tau-0.95"]


def test_one_measure_alone(quality, started, tmp_path):
    assert quality("--needles", "0", "--point", "tau-0.99", "--baselines", "none") == 0
    assert {c.measure for c in read(tmp_path).comparisons} == {"nll", "late"}


# -- resuming --------------------------------------------------------------------------------------


def test_a_broken_run_keeps_what_it_has_and_resumes(
    quality, started, tmp_path, monkeypatch, capsys
):
    started.modes[:] = ["answer", "answer", "die"]
    assert quality("--servers", "1") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: tau-0.99: " in line and "MemoryError: no more pages" in line
    partial = read(tmp_path)
    assert [row.name for row in partial.rows] == ["full", "tau-0.95"] and not partial.complete
    started.policies.clear()
    assert quality("--resume") == 0
    assert len(started.policies) == 3
    resumed = read(tmp_path)
    assert resumed.complete and resumed.rows[:2] == partial.rows
    started.policies.clear()
    assert quality("--resume") == 0 and started.policies == []
    assert "5 of 5 contenders are already measured" in capsys.readouterr().err
    assert read(tmp_path).rows == resumed.rows


def test_resuming_measures_again_what_other_prompts_or_windows_gave(quality, started, tmp_path):
    quality()
    rows = {row.name: row for row in read(tmp_path).rows}
    started.policies.clear()
    assert quality("--resume", "--baseline-point", "tau-0.95") == 0
    other = {row.name: row for row in read(tmp_path).rows}
    # all units of tau-0.95 are alike: its shuffle, and its uniform, is itself
    assert started.policies == [] and other["shuffled"].windows == rows["tau-0.95"].windows
    assert [rows[n] == other[n] for n in rows] == [True, True, True, False, False]
    assert quality("--resume", "--seed", "1") == 0
    assert len(started.policies) == 5
    assert not {r.fingerprint for r in read(tmp_path).rows} & {r.fingerprint for r in rows.values()}


def test_results_are_not_overwritten_by_accident(quality, started, tmp_path, capsys):
    quality("--point", "tau-0.95", "--baselines", "none")
    before = (tmp_path / "out" / "quality.json").read_bytes()
    assert quality() == 2
    assert "holds a quality.json: add --resume" in capsys.readouterr().err
    assert (tmp_path / "out" / "quality.json").read_bytes() == before


def test_a_damaged_result_is_named(quality, started, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "quality.json").write_text("{")
    assert quality("--resume") == 2
    assert "--resume: " in (line := capsys.readouterr().err.splitlines()[-1])
    assert "quality.json is not readable" in line


# -- servers that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("die", "/ MemoryError: no more pages; log: "),
        ("lie", "full: the server holds (window, sinks, units) [(2147483647, 0, 9)], not"),
        ("short", "full: the server scored 399 tokens of a prompt of 400"),
    ],
)
def test_a_server_that_fails_is_one_line(quality, started, capsys, mode, says):
    started.modes[:] = [mode]
    assert quality("--servers", "1") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert says in line and "error: full: " in line


def test_a_server_that_dies_ends_the_others(quality, started, capsys):
    started.modes[:] = ["hang", "die"]
    assert quality("--servers", "2") == 2
    assert "MemoryError: no more pages" in capsys.readouterr().err.splitlines()[-1]


def test_an_interrupt_while_servers_hang_leaves_none(quality, started, children):
    started.modes[:] = ["hang", "hang"]

    def interrupt() -> None:
        while len(children()) < 2:
            time.sleep(0.1)
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell that starts the tests in the background has them ignore interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        assert quality("--servers", "2") == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_fleet_starts_nothing(model):
    fleet = Fleet()
    fleet.close()
    server = servers.Server(model)
    with pytest.raises(servers.ServerError, match="stopped"), fleet.serve(server):
        pass
    assert server.returncode is None
    server.stop()


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--context", "64"], "--context 64 is not accepted: give at least 128"),
        (
            ["--context", "2040"],
            "--context 2040 is not accepted: with 12 tokens of answer this model",
        ),
        (["--texts-per-run", "-1"], "--texts-per-run -1 is not accepted"),
        (["--needles", "0", "--texts-per-run", "0"], "leave nothing to measure"),
        (["--bootstrap", "10"], "--bootstrap 10 is not accepted: give at least 100"),
        (["--threads", "0"], "--threads 0 is not accepted"),
        (["--servers", "0"], "--servers 0 is not accepted: give 1 to 16"),
        (["--concurrency", "0"], "--concurrency 0 is not accepted"),
        (["--seed", "-1"], "--seed -1 is not accepted"),
        (["--baselines", "random"], "--baselines 'random' is not accepted"),
        (["--point", "tau-1"], "--point 'tau-1' is not in the policy"),
        (["--policy", "nothing-like-it"], "--policy: no policy 'nothing-like-it' found"),
        (["--policy", "full"], "--policy full is built in and has no points"),
        (["--model", "nowhere"], "--model 'nowhere' is neither a demo model"),
        (["--texts", "nowhere.txt"], "--texts nowhere.txt: No such file"),
        (["--texts-per-run", "400"], "--texts: corpus 'a' holds"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(quality, started, capsys, flags, says):
    assert quality(*flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err
    assert started.policies == []


def test_matplotlib_is_asked_for_before_anything_is_measured(quality, started, capsys, monkeypatch):
    monkeypatch.setattr(quality_setup.importlib.util, "find_spec", lambda name: None)
    assert quality() == 2
    assert "pip install matplotlib" in capsys.readouterr().err and started.policies == []


def test_a_contender_is_served_from_its_own_artifact(model, tmp_path):
    from kvpolicy.artifact import load_artifact

    wanted = WindowPolicy.uniform(read_geometry(model), 77, 3)
    spec = serving_spec(Contender("uniform", Kind.UNIFORM, wanted), tmp_path)
    assert load_artifact(spec).policy() == wanted


# -- scores and the report -------------------------------------------------------------------------


def test_late_positions_are_those_from_half_the_context_on():
    logprobs = [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    score = text_score(Excerpt("a", [0] * 6), logprobs)
    assert (score.nll, score.late) == (3.0, 4.0)


@pytest.mark.parametrize("width", [80, 100])
def test_the_report_is_whole_at_its_widths(quality, started, tmp_path, width):
    quality("--baselines", "uniform,shuffled:2")
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    show(read(tmp_path), [Path("out/quality.json")], console)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert "a true loss below about 75% can stay unseen" in " ".join(text.split())
    assert "Not every contender" not in text

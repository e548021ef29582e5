"""max-batch and max-context on servers that only pretend: what they find, and every way out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from loadtest import servers
from loadtest.__main__ import main
from loadtest.capacity import batch, client, context
from loadtest.capacity.results import BatchResult, ContextResult
from loadtest.servers import Server, ServerError
from tests.loadtest.capacity_fakes import by_side, launching, quick_client
from tests.loadtest.capacity_server import DIES, PAGE_BYTES, PAGES_A_REQUEST, Behaviour
from tests.loadtest.quality_model import write_model
from tests.loadtest.test_capacity_setup import running, windows

__all__ = ["running", "windows"]  # fixtures

KV_BYTES = "600kB"  # two requests of 512 + 16 tokens at full length


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("capacity") / "model")


@pytest.fixture
def run(model, windows, tmp_path, monkeypatch, capsys, children):
    """``run(name, *flags)`` is the exit status and stderr of a command; it may leave no child."""
    monkeypatch.setattr(batch, "drive", quick_client)

    def go(name: str, *flags: str) -> tuple[int, str]:
        given = ["--model", str(model), "--policy", windows, "--quick", "--kv-bytes", KV_BYTES]
        before = len(children())
        status = main([name, *given, "--out", str(tmp_path), *flags])
        assert len(children()) == before
        return status, capsys.readouterr().err

    return go


def found(folder: Path, kind: type):
    name = "max-batch.json" if kind is BatchResult else "max-context.json"
    return msgspec.json.decode((folder / name).read_bytes(), type=kind)


OK = {"stock": Behaviour(), "full": Behaviour(ragged=True)}


# -- max-batch -------------------------------------------------------------------------------------


def test_each_servers_largest_batch_is_found_and_timed_beside_the_equal_one(
    run, tmp_path, monkeypatch
):
    wide = Behaviour(slots=4, ragged=True, understands=400)
    launching(monkeypatch, by_side(**OK, windows=wide))
    status, said = run("max-batch")
    assert status == 0
    result = found(tmp_path, BatchResult)
    assert result.finished and result.equal == 2 and result.context == 512
    assert [side.largest for side in result.sides] == [2, 2, 4]
    assert [[run.batch for run in side.runs] for side in result.sides] == [
        [1, 2],
        [1, 2],
        [1, 2, 4],
    ]
    stock, _, narrow = result.sides
    assert stock.predicted == 2 and stock.probes[0].sent == 4 and stock.probes[0].withdrawn == 2
    assert narrow.probes[0].sent == narrow.predicted + 2 and narrow.probes[0].together == 4
    assert (stock.needles.found, narrow.needles.found) == (3, 0)
    assert stock.needles.depths == narrow.needles.depths
    assert narrow.kv_bytes == 4 * PAGES_A_REQUEST * PAGE_BYTES
    for run_ in (run for side in result.sides for run in side.runs):
        assert run_.output_tokens == 16 * run_.batch and run_.retractions == 0
        assert run_.memory_bytes > 1_000_000 and run_.cpu_ms_per_output_token >= 0
    assert "RaggedKV windows: 4 together (predicted" in said
    names = {"max-batch.json", "report.html"}
    logs = {f"max-batch-{role}.log" for role in ("stock", "full", "windows")}
    assert {path.name for path in tmp_path.iterdir()} == names | logs


def test_a_batch_that_ends_in_retractions_is_bisected(run, tmp_path, monkeypatch):
    tight = Behaviour(slots=20, safe=3, ragged=True)
    launching(monkeypatch, by_side(windows=tight))
    assert run("max-batch", "--vs", "none", "--needles", "0")[0] == 0
    (side,) = found(tmp_path, BatchResult).sides
    assert side.largest == 3 and side.at_largest.batch == 3 and side.at_largest.retractions == 0
    assert side.probes[0].retractions > 0 and side.needles is None
    sent = [probe.sent for probe in side.probes]
    assert len(sent) == len(set(sent)) <= 8
    assert all((probe.retractions == 0) == (probe.sent <= 3) for probe in side.probes)


def test_more_than_predicted_is_looked_for(run, tmp_path, monkeypatch):
    launching(monkeypatch, by_side(stock=Behaviour(slots=7), full=OK["full"], windows=OK["full"]))
    assert run("max-batch", "--needles", "0")[0] == 0
    stock = found(tmp_path, BatchResult).sides[0]
    assert (stock.predicted, stock.largest) == (2, 7)
    assert [probe.sent for probe in stock.probes] == [4, 8]


def test_a_result_of_the_other_command_is_on_the_page_too(run, tmp_path, monkeypatch):
    launching(monkeypatch, by_side(**OK, windows=OK["full"]))
    assert run("max-context", "--up-to", "512", "--step", "128", "--needles", "0")[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "Longest context" in page and "Largest batch" not in page
    assert run("max-batch", "--needles", "0")[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "Longest context" in page and "Largest batch" in page


# -- every way out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max-batch", "max-context"])
def test_a_server_that_dies_is_one_line_and_what_was_measured_stays(
    run, tmp_path, monkeypatch, name
):
    launching(monkeypatch, by_side(**OK, windows=Behaviour(dies_after=2, ragged=True)))
    status, said = run(name, "--up-to", "512") if name == "max-context" else run(name)
    assert status == 2
    last = said.rstrip().splitlines()[-1]
    assert "RaggedKV windows: the server exited with 7" in last and DIES in last
    result = found(tmp_path, BatchResult if name == "max-batch" else ContextResult)
    assert not result.finished and [side.server.role for side in result.sides] == ["stock", "full"]
    assert "This run is not finished" in (tmp_path / "report.html").read_text()
    assert f"2 of 3 servers were measured, kept in {tmp_path}" in said


def test_a_server_that_does_not_start_is_one_line(run, tmp_path, monkeypatch):
    words = [sys.executable, "-c", "print('raggedkv: no such thing'); raise SystemExit(3)"]
    monkeypatch.setattr(servers, "_command", lambda *_: words)
    status, said = run("max-batch")
    last = said.rstrip().splitlines()[-1]
    assert status == 2 and "stock SGLang: the server exited with 3; it said: raggedkv: no" in last
    assert not (tmp_path / "max-batch.json").exists()


@pytest.mark.parametrize("name", ["max-batch", "max-context"])
def test_a_server_that_hangs_is_given_up(run, monkeypatch, name):
    launching(monkeypatch, by_side(**OK | {"stock": Behaviour(hangs=True)}, windows=Behaviour()))
    status, said = run(name, "--limit-seconds", "1.5")
    assert status == 2
    last = said.rstrip().splitlines()[-1]
    assert "stock SGLang" in last and ("not answered in 2 s" in last or "after 2 s" in last)


@pytest.mark.parametrize(
    ("name", "where"), [("max-batch", "timing"), ("max-batch", "sent"), ("max-context", "prompt")]
)
def test_an_interrupt_keeps_what_was_measured_and_leaves_no_process(
    run, tmp_path, monkeypatch, name, where
):
    launching(monkeypatch, by_side(**OK, windows=OK["full"]))
    module = batch if name == "max-batch" else context
    kind = module.BatchBench if name == "max-batch" else module.ContextBench
    plain = kind.measure

    def interrupted(self, *args):
        if self.side.role == "full":
            say = self.say

            def stop(text: str) -> None:
                if where in text:
                    raise KeyboardInterrupt
                say(text)

            self.say = stop
        return plain(self, *args)

    monkeypatch.setattr(kind, "measure", interrupted)
    status, said = run(name, "--needles", "1")
    assert status == 130 and said.rstrip().endswith("interrupted")
    result = found(tmp_path, BatchResult if name == "max-batch" else ContextResult)
    assert not result.finished and [side.server.role for side in result.sides] == ["stock"]


# -- max-context -----------------------------------------------------------------------------------


def test_the_longest_prompt_and_the_longest_that_is_understood(run, tmp_path, monkeypatch):
    stock = Behaviour(limit=900, understands=700)
    full = Behaviour(limit=1000, stuck=True, ragged=True)
    narrow = Behaviour(ragged=True, token_seconds=0.2)  # long enough to be seen by a slow watch
    launching(monkeypatch, by_side(stock=stock, full=full, windows=narrow))
    status, said = run("max-context", "--up-to", "1500")
    assert status == 0
    result = found(tmp_path, ContextResult)
    assert [side.longest for side in result.sides] == [896, 960, 1500]
    assert [side.answered for side in result.sides] == [640, 960, 1500]
    assert [side.needles.found for side in result.sides] == [3, 3, 3]
    stock, full, narrow = result.sides
    assert {tried.outcome for tried in stock.attempts} == {"answered", "refused"}
    assert {tried.outcome for tried in full.attempts} == {"answered", "waiting"}
    refused = next(tried for tried in stock.attempts if tried.outcome == "refused")
    assert "exceed the limit" in refused.said and refused.prefill_seconds is None
    assert narrow.predicted == 1500, "a cache that stops growing takes every prompt"
    assert narrow.kv_bytes == PAGES_A_REQUEST * PAGE_BYTES and narrow.prefill_seconds > 0.04
    assert all(point.length <= narrow.predicted for point in narrow.curve)
    assert len(stock.attempts) <= 9 and "longest prompt 896 (predicted" in said


def test_answers_that_come_short_do_not_count_as_completed(run, tmp_path, monkeypatch):
    launching(monkeypatch, by_side(windows=Behaviour(stops=True)))
    assert run("max-context", "--vs", "none", "--needles", "0", "--up-to", "512")[0] == 0
    (side,) = found(tmp_path, ContextResult).sides
    assert (side.longest, side.answered, side.kv_bytes) == (0, 0, None)
    assert {tried.outcome for tried in side.attempts} == {"short"}


# -- servers that run already ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max-batch", "max-context"])
def test_servers_at_addresses_are_measured_and_left_running(run, running, tmp_path, name):
    ours, theirs = running(Behaviour(slots=3, ragged=True)), running(Behaviour())
    flags = ["--up-to", "512"] if name == "max-context" else []
    status, _ = run(name, "--url", ours, "--vs-url", theirs, *flags)
    assert status == 0
    result = found(tmp_path, BatchResult if name == "max-batch" else ContextResult)
    assert [side.server.url for side in result.sides] == [theirs, ours]
    assert [side.server.name for side in result.sides] == ["stock SGLang", "RaggedKV windows"]
    if name == "max-batch":
        assert [side.largest for side in result.sides] == [2, 3]
        assert result.sides[1].at_largest.memory_bytes is None
        assert result.sides[1].at_largest.cpu_seconds is None
    for url in (ours, theirs):
        assert servers.Client(url).load() == (0, 0)


# -- SGLang's own client ---------------------------------------------------------------------------


@pytest.fixture
def pretended(model, monkeypatch, tmp_path, children):
    def start(behaviour: Behaviour) -> Server:
        launching(monkeypatch, lambda flags: behaviour)
        return Server(model, log=tmp_path / "it.log")

    yield start
    assert children() == []


def prompts(model: Path, count: int):
    from transformers import AutoTokenizer

    from loadtest.capacity.texts import exact_prompts

    return exact_prompts(AutoTokenizer.from_pretrained(model), count, 300, seed=0)


def test_sglangs_own_client_reports_what_the_server_did(pretended, model):
    calls: list[str] = []
    look, begun = (lambda: calls.append("look")), (lambda: calls.append("begun"))
    with pretended(Behaviour(slots=3, token_seconds=0.05)) as server:
        report = client.drive(server, model, prompts(model, 3), 9, 300, look, begun)
    assert report.completed == 3 and report.total_output_tokens == 27
    assert report.input_lens == [300] * 3 and report.output_lens == [9] * 3
    assert 40 < report.median_tpot_ms < 400 and report.median_ttft_ms >= 50
    assert report.cached_tokens == 0
    assert calls.count("begun") == 1 and calls.index("begun") > 2, "its own start is left out"
    assert report.output_throughput == pytest.approx(27 / report.duration, rel=1e-3)


def test_a_client_whose_server_dies_or_hangs_is_ended(pretended, model, monkeypatch):
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(client, "command", lambda *_: slow)
    with pretended(Behaviour()) as server:
        with pytest.raises(ServerError, match="no end of the run after 1 s"):
            client.drive(server, model, prompts(model, 1), 9, 1, lambda: None, lambda: None)
        server._process.kill()
        with pytest.raises(ServerError, match="the server exited with -9"):
            client.drive(server, model, prompts(model, 1), 9, 60, lambda: None, lambda: None)


def test_a_client_that_writes_nothing_is_told_with_its_last_words(pretended, model, monkeypatch):
    words = [sys.executable, "-c", "raise SystemExit('no module of that name')"]
    monkeypatch.setattr(client, "command", lambda *_: words)
    with pretended(Behaviour()) as server, pytest.raises(ServerError, match="no module of that"):
        client.drive(server, model, prompts(model, 1), 9, 60, lambda: None, lambda: None)


def test_a_request_that_the_client_could_not_finish_fails_the_run(tmp_path):
    report = {
        "duration": 1.0, "completed": 1, "total_output_tokens": 1, "output_throughput": 1.0,
        "total_throughput": 1.0, "median_ttft_ms": 1.0, "p99_ttft_ms": 1.0, "median_tpot_ms": 1.0,
        "p99_tpot_ms": 1.0, "input_lens": [1], "output_lens": [1, 0],
        "errors": ["", "Connection\nreset"], "request_rate": float("inf"),
    }  # fmt: skip
    written, log = tmp_path / "out", tmp_path / "log"
    written.write_text(json.dumps(report))
    log.write_text("")
    with pytest.raises(ServerError, match="1 of 2 requests were answered: Connection reset"):
        client._read(written, log, 0, 2)
    assert client._read(written, log, 0, 1).duration == 1.0
    written.write_text("[]")
    with pytest.raises(ServerError, match="a report that is none"):
        client._read(written, log, 0, 1)


def test_the_command_ends_when_it_is_interrupted_from_outside(model, tmp_path):
    """A real Ctrl-C to a real process: status 130, and nothing of it lives on."""
    code = (
        "import sys; from tests.loadtest.capacity_fakes import *; import pytest\n"
        "from loadtest.__main__ import main\n"
        "launching(pytest.MonkeyPatch(), lambda flags: Behaviour(hangs=True))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "max-batch", "--model", str(model), "--policy", "native"]
    words += ["--quick", "--kv-bytes", KV_BYTES, "--out", str(tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    for line in process.stderr:
        if "sent at once" in line:
            break
    time.sleep(0.5)
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(2)
    rest = process.stderr.read()
    assert process.wait(60) == 130 and "interrupted" in rest and tree
    assert not [child for child in tree if child.is_running() and child.status() != "zombie"]

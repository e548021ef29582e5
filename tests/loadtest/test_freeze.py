"""The freeze benchmark without SGLang: flags, predictions, measuring, ratios, what it writes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from argparse import ArgumentParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from transformers import LlamaConfig

from loadtest import freeze, freeze_measure, freeze_plot, freeze_report, servers
from loadtest.__main__ import main
from loadtest.demo_workload import frozen, make_workload
from loadtest.errors import UserError
from loadtest.freeze_measure import measure_batch, measure_pairs
from loadtest.freeze_results import Pair, Result, first_token, ratio
from loadtest.freeze_setup import Setup, make_setup
from loadtest.servers import Server, ServerError
from tests.loadtest import freeze_server

UNITS, PAGE = 6, 16
PAGE_BYTES = PAGE * 2 * 8 * 4  # K and V, head dim 8, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a config.json only: 3 layers of 2 KV heads, head dim 8."""
    config = LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        hidden_size=32, intermediate_size=64, vocab_size=64, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("freeze") / "model"
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(model, tmp_path_factory) -> str:
    """Everything at full length, frozen by the rule ``head``, for ``model``."""
    return made(model, tmp_path_factory.mktemp("policies"), "--retention", "head")


def made(model: Path, root: Path, *flags: str) -> str:
    from kvpolicy.__main__ import main as kvpolicy

    where = ["--model", str(model), "--out", str(root), "--kind", "native", "--name", "it"]
    assert kvpolicy(["new", *where, *flags]) == 0
    (manifest,) = root.rglob("manifest.json")
    return str(manifest.parent)


def setup(model: Path, policy: str, out: Path, *flags: str) -> Setup:
    parser = ArgumentParser()
    freeze.add_arguments(parser)
    given = ["--model", str(model), "--policy", policy, "--out", str(out), *flags]
    return make_setup(parser.parse_args(given))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompt", "0"], "--prompt-tokens 0 is not accepted: give at least 1"),
        (["--output", "6"], "--output-tokens 6 is not accepted: give at least 7"),
        (["--budget", "512"], "--budget-tokens 512 is not accepted: give 1 to 511"),
        (["--requests", "0"], "--requests 0 is not accepted: give 1 to 64"),
        (["--pairs", "1"], "--pairs 1 is not accepted: give at least 2"),
        (["--bytes", "lots"], "--kv-bytes: size 'lots' not understood"),
        (["--bytes", "50kB"], "do not hold one request of 528 tokens"),
        (["--bytes", "1GB"], "requests would fit in stock SGLang; at most 62 are measured"),
        (["--policy", "nothing-like-it"], "--policy: no policy 'nothing-like-it' found"),
        (["--policy", "native"], "--policy: policy native has no retention tables"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
        (["--model", "nowhere"], "--model 'nowhere' is neither a demo model"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(model, policy, flags, says, capsys, monkeypatch):
    monkeypatch.setattr(freeze, "_Benchmark", None)  # nothing may start
    given = ["--model", str(model), "--policy", policy, "--quick", "--bytes", "2MB", *flags]
    assert main(["freeze", *given]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and says in line


# -- predictions -----------------------------------------------------------------------------------


def admitted(pages: int, prompt: int, output: int, budget: int) -> int:
    """Requests that decode together, by admitting them one by one and reserving their ends."""
    kept = -(-budget // PAGE)
    ends = max(len({p // PAGE for p in range(prompt, n)}) for n in range(prompt, prompt + output))
    decoding, whole = kept + ends, -(-prompt // PAGE) + kept
    if prompt % PAGE:
        decoding = max(decoding, kept + 1)
    held, count = 0, 0
    while held + max(whole, decoding) <= pages // UNITS:
        held += decoding
        count += 1
    return count


@pytest.mark.parametrize("prompt", [160, 170, 512])
@pytest.mark.parametrize("budget", [16, 17, 100])
@pytest.mark.parametrize("size", [200_000, 470_000, 1_000_000])
def test_frozen_requests_that_fit_are_those_admission_would_let_in(
    model, policy, prompt, budget, size
):
    work = make_workload(str(model), str(size), 1, prompt, 40, 0)
    contender = frozen(work, policy, budget, "--policy")
    pages = size // PAGE_BYTES - 1  # one page is the write sink
    assert contender.predicted == admitted(pages, prompt, 40, budget)
    assert contender.request_bytes % (UNITS * PAGE_BYTES) == 0


def test_all_servers_get_the_same_bytes_and_stock_sets_the_equal_batch(model, policy, tmp_path):
    found = setup(model, policy, tmp_path / "out", "--quick", "--bytes", "1MB")
    stock, unfrozen, froze = found.contenders
    tokens = int(stock.flags[stock.flags.index("--max-total-tokens") + 1])
    assert tokens == 1_000_000 // (UNITS * PAGE_BYTES) * PAGE
    for contender in (unfrozen, froze):
        assert contender.flags[contender.flags.index("--kv-arena-bytes") + 1] == "1000000"
    assert froze.flags[-2:] == ("--kv-budget-tokens", "64") and "native" in unfrozen.flags
    assert found.equal == stock.predicted == 4 < froze.predicted
    assert found.sent(froze) == froze.predicted + 2
    fewer = setup(model, policy, tmp_path / "out", "--quick", "--bytes", "1MB", "--requests", "3")
    assert fewer.equal == 3 == fewer.sent(froze)


# -- measuring, against a server that only pretends ------------------------------------------------


@pytest.fixture
def pretend(model, monkeypatch, tmp_path, children):
    """``pretend(mode, slots)`` is a fake server, not yet started; none may be left afterwards."""

    def start(mode: str, slots: int = 2) -> Server:
        words = [sys.executable, freeze_server.__file__]
        command = lambda model_dir, port, *_: [*words, str(port), mode, str(slots)]  # noqa: E731
        monkeypatch.setattr(servers, "_command", command)
        return Server(model, log=tmp_path / "it.log")

    yield start
    assert children() == []


PROMPTS = [[i, i + 1] for i in range(5)]


def test_a_batch_is_what_decodes_together_and_the_rest_is_withdrawn(pretend):
    said: list[str] = []
    with pretend("frozen") as server:
        batch = measure_batch(server, PROMPTS, 16, True, said.append)
    assert (batch.sent, batch.finished, batch.withdrawn) == (5, 2, 3)
    assert batch.peak_decoding == batch.peak_frozen == 2
    assert batch.output_tokens == 2 * 16
    least = freeze_server.PREFILL_SECONDS + 15 * freeze_server.TOKEN_SECONDS
    assert batch.seconds >= least - 0.01 and batch.cpu_seconds >= 0
    assert batch.tokens_per_second == pytest.approx(32 / batch.seconds, rel=0.01)
    assert batch.decode_tokens_per_second > batch.tokens_per_second
    assert any("2 decoding" in line for line in said)


def test_nothing_is_withdrawn_where_all_fit(pretend):
    with pretend("stock", slots=8) as server:
        batch = measure_batch(server, PROMPTS, 16, False, lambda _: None)
    assert (batch.finished, batch.withdrawn, batch.peak_decoding) == (5, 0, 5)
    assert batch.peak_frozen is None


def test_pairs_alternate_and_show_what_the_freeze_takes(pretend, monkeypatch):
    order: list[bool] = []
    plain = freeze_measure._first_token

    def noted(server, prompt, budget):
        order.append(budget is not None)
        return plain(server, prompt, budget)

    monkeypatch.setattr(freeze_measure, "_first_token", noted)
    with pretend("frozen") as server:
        pairs = measure_pairs(server, PROMPTS[:3], 64, lambda _: None)
    assert order == [False, True, True, False, False, True]
    assert all(pair.off >= freeze_server.PREFILL_SECONDS for pair in pairs)
    found = first_token(pairs, seed=0)
    assert found.on_median - found.off_median > 0.3 * freeze_server.FREEZE_SECONDS


@pytest.mark.parametrize("mode", ["stock", "warm"])
def test_a_pair_that_was_not_frozen_or_not_cold_is_refused(pretend, mode):
    with pretend(mode) as server, pytest.raises(ServerError, match="was reported as"):
        measure_pairs(server, PROMPTS[:2], 64, lambda _: None)


def test_a_server_that_dies_fails_the_batch(pretend):
    with pretend("die") as server, pytest.raises(ServerError):
        measure_batch(server, PROMPTS, 8, False, lambda _: None)


def test_an_interrupt_while_requests_hang_leaves_no_server(pretend):
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pretend("hang") as server, pytest.raises(KeyboardInterrupt):
        measure_batch(server, PROMPTS, 8, False, interrupt)


# -- ratios ----------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_pairs_ratios_whatever_drifts():
    drift = np.linspace(1, 9, 7)
    found = ratio(1.03 * drift, drift, seed=0)
    assert (found.n, found.median) == (7, pytest.approx(1.03))
    assert found.low == pytest.approx(1.03) and found.high == pytest.approx(1.03)


def test_a_ratios_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.1, (200, 9))
    covers = [f.low <= 1.2 <= f.high for f in (ratio(1.2 + n, np.ones(9), 1) for n in noise)]
    assert 0.85 <= np.mean(covers) <= 1


def test_no_pairs_are_no_ratio():
    with pytest.raises(ValueError, match="no pairs"):
        ratio([], [], 0)


def test_first_token_keeps_off_and_on_apart():
    found = first_token([Pair(2, 3, 4, 4), Pair(2, 3, 4, 4)], seed=0)
    assert (found.off_median, found.on_median) == (2, 3)
    assert found.ratio.median == 1.5 and found.cpu_ratio.median == 1


# -- the command, with servers that pretend --------------------------------------------------------


@pytest.fixture(scope="module")
def finished(model, policy, tmp_path_factory) -> tuple[Result, Path, str]:
    """The command's result, folder and output: stock holds 4, unfrozen 4, frozen 8."""

    def command(model_dir, port, warmup, flags):
        mode, slots = ("frozen", 8) if "--kv-budget-tokens" in flags else ("stock", 4)
        return [sys.executable, freeze_server.__file__, str(port), mode, str(slots)]

    out, said = tmp_path_factory.mktemp("finished"), io.StringIO()
    flags = ["--policy", policy, "--bytes", "1MB", "--requests", "10", "--pairs", "2"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(servers, "_command", command)
        patch.setattr(Setup, "prompts", lambda s: ([[i] for i in range(12)], [[1], [2]]))
        assert main(["freeze", "--model", str(model), "--quick", "--out", str(out), *flags]) == 0
    result = msgspec.json.decode((out / "freeze.json").read_bytes(), type=Result)
    return result, out, said.getvalue()


def test_the_command_writes_figures_and_a_plot_and_says_them(finished):
    result, out, said = finished
    stock, unfrozen, froze = result.sides
    assert [side.equal.finished for side in result.sides] == [4, 4, 4]
    assert [side.largest.peak_decoding for side in result.sides] == [4, 4, 8]
    assert froze.equal.sent == 4 and froze.largest.withdrawn == 2
    assert stock.equal == stock.largest, "one run serves both where the sizes agree"
    assert (stock.kept_share, unfrozen.kept_share, froze.kept_share) == (None, None, 0.25)
    assert result.first_token.ratio.n == 2 and result.first_token.ratio.median > 1
    assert result.seed == 0 and result.command and result.machine.versions["sglang"] == "0.5.23"
    assert len(result.machine.loads) == 4
    assert (out / "freeze.png").stat().st_size > 10_000
    logs = {f"freeze-{name}.log" for name in ("stock-sglang", "raggedkv-unfrozen")}
    assert {path.name for path in out.iterdir()} == {
        "freeze.json", "freeze.png", "freeze-raggedkv-frozen.log", *logs
    }  # fmt: skip
    words = " ".join(said.split())
    assert "Frozen requests that decode together: 2.00x stock's (2 of 10 sent" in words
    assert "Output tokens per CPU second, frozen:" in words
    assert "2 pairs" in words and "not the full model's" in words


def test_the_table_is_whole_and_owns_up_to_a_busy_machine(finished):
    result, _, _ = finished
    console = Console(file=io.StringIO(), width=100)
    console.print(freeze_report.table(result))
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 100
    for fact in ("25.0%", "(2.00x)", "100 %", f"({result.sides[2].predicted})"):
        assert fact in text or fact == "(2.00x)"
    busy = msgspec.structs.replace(result.machine, busy=True)
    spoken = freeze_report.meaning(msgspec.structs.replace(result, machine=busy))
    assert any("Other work ran" in line for line in spoken)
    idle = msgspec.structs.replace(result.machine, busy=False)
    spoken = freeze_report.meaning(msgspec.structs.replace(result, machine=idle))
    assert not any("Other work ran" in line for line in spoken)


def test_a_plot_that_cannot_be_written_is_one_line(finished, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*freeze\.png: No such file"):
        freeze_plot.write_plot(finished[0], tmp_path / "gone")
    assert json.loads((finished[1] / "freeze.json").read_text())["sides"]

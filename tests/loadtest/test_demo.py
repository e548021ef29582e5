"""The demo's parts without SGLang: flags, predictions, measuring, checking, what it prints."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from transformers import LlamaConfig

from loadtest import demo, demo_report, servers
from loadtest.__main__ import main
from loadtest.demo_measure import Agreement, Checked, Measured, agreement, check, measure, sample
from loadtest.demo_workload import FREEZE_POLICY, Contender, make_workload, ragged, stock
from loadtest.errors import UserError
from loadtest.reference import Comparison
from loadtest.servers import TextCompletion
from tests.loadtest import fake_server

UNIT_TOKEN_BYTES = 2 * 8 * 4  # K and V, head dim 8, float32
UNITS = 6


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder with a config.json only: 3 layers of 2 KV heads, head dim 8."""
    config = LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        hidden_size=32, intermediate_size=64, vocab_size=64, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def policy(model, tmp_path) -> str:
    """Window 64, 4 sinks, for ``model``."""
    from kvpolicy.__main__ import main as kvpolicy

    where = ["--model", str(model), "--out", str(tmp_path / "artifacts")]
    assert kvpolicy(["new", *where, "--kind", "uniform", "--window", "64", "--sinks", "4"]) == 0
    (manifest,) = (tmp_path / "artifacts").rglob("manifest.json")
    return str(manifest.parent)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--requests", "0"], "--requests 0 is not accepted: give 1 to 64"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0 is not accepted: give at least 1"),
        (["--output-tokens", "-3"], "--output-tokens -3 is not accepted: give at least 1"),
        (["--checks", "-1"], "--checks -1 is not accepted: give at least 0"),
        (["--kv-bytes", "lots"], "--kv-bytes: size 'lots' not understood"),
        (["--kv-bytes", "50000"], "do not hold one request of 1764 tokens"),
        (["--prompt-tokens", "2000"], "is 2064; this model takes at most 2048"),
        (["--policy", "nothing-like-it"], "--policy: no policy 'nothing-like-it' found"),
        (["--model", "nowhere"], "--model 'nowhere' is neither a demo model"),
        (["--policy", "full", "--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(model, flags, says, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_Demo", None)  # nothing may start
    assert main(["demo", "--model", str(model), *flags]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and says in line


def most_at_once(kv_bytes: int, held) -> int:
    """Requests that fit together, where ``held(length)`` tokens a unit are held at a length."""
    peak = max(held(length) for length in range(1, 501))
    return kv_bytes // (peak * UNITS * UNIT_TOKEN_BYTES)


def pages_up(tokens: int) -> int:
    return -(-tokens // 16) * 16


def window_held(length: int) -> int:
    """Tokens held with window 64, 4 sinks and one page of slack, in whole pages, by enumeration."""
    pages = {p // 16 for p in range(max(0, length - 80), length)} | {p // 16 for p in range(4)}
    return 16 * len([p for p in pages if p * 16 < length])


def test_predictions_are_the_bytes_over_the_largest_a_request_holds(model, policy):
    work = make_workload(str(model), "1MB", 12, 480, 20, 4)
    dense, windowed = stock(work), ragged(work, policy)
    assert dense.predicted == most_at_once(1_000_000, pages_up) == 5
    assert windowed.predicted == most_at_once(1_000_000, window_held) == 23
    tokens = int(dense.flags[dense.flags.index("--max-total-tokens") + 1])
    assert tokens == 1_000_000 // (UNITS * UNIT_TOKEN_BYTES) // 16 * 16
    assert windowed.flags == ("--kv-policy", policy, "--kv-arena-bytes", "1000000")


def test_no_more_is_checked_than_was_sent(model):
    assert make_workload(str(model), "1MB", 2, 480, 20, checks=4).checks == 2


# -- measuring, against a server that only pretends ------------------------------------------------


@pytest.fixture
def pretend(model, monkeypatch, tmp_path, children):
    """``pretend(mode, ...)`` measures a fake server; afterwards no child process may be left."""
    work = make_workload(str(model), "1MB", 5, 4, 3, 0)

    def run(mode: str, policy_id: str | None = None, progress=lambda *_: None, budget=None):
        command = lambda model_dir, port, *_: [  # noqa: E731
            sys.executable, fake_server.__file__, str(port), mode
        ]  # fmt: skip
        monkeypatch.setattr(servers, "_command", command)
        contender = Contender("it", policy_id, (), None, 1, 2, budget)
        prompts = [[i, i + 1, i + 2, i + 3] for i in range(5)]
        return measure(contender, work, prompts, tmp_path / "it.log", progress)

    yield run
    assert children() == []


def test_stock_is_measured_by_what_its_load_says(pretend):
    seen: list[tuple[int, int]] = []
    measured, answers = pretend("answer", progress=lambda *now: seen.append(now))
    assert [a.output_ids for a in answers] == [[i, i + 1, i + 2] for i in range(5)]
    assert measured.peak_running == fake_server.SLOTS and measured.retractions == 3
    assert measured.peak_pages == 3 * UNITS  # 40 tokens are 3 pages
    assert measured.peak_bytes == measured.peak_pages * 16 * UNIT_TOKEN_BYTES
    assert measured.seconds >= 3 * fake_server.WORK_SECONDS
    assert seen[-1] == (5, 0) and any(running == 2 for _, running in seen)


def test_ragged_is_measured_by_its_own_peak(pretend):
    measured, _ = pretend("answer", policy_id="p@1")
    assert measured.peak_pages == fake_server.PEAK_PAGES and measured.kept_share is None
    assert measured.peak_bytes == fake_server.PEAK_PAGES * fake_server.PAGE_BYTES


def test_a_frozen_run_says_what_its_prompts_kept(pretend):
    assert pretend("answer", policy_id="p@1", budget=1)[0].kept_share == 0.25


def test_a_server_that_refuses_is_quoted(pretend, tmp_path):
    with pytest.raises(UserError) as error:
        pretend("refuse")
    assert str(error.value) == (
        "it: the server exited with 3; it said: raggedkv: refusing to start: policy 'x' is "
        f"damaged; log: {tmp_path / 'it.log'}"
    )


def test_a_server_that_dies_is_quoted(pretend, tmp_path):
    with pytest.raises(UserError) as error:
        pretend("die")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert "MemoryError: no more pages" in str(error.value)
    assert str(tmp_path / "it.log") in str(error.value)


def test_an_interrupt_while_requests_hang_leaves_no_server(pretend):
    def interrupt(answered: int, running: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretend("hang", progress=interrupt)


# -- checking --------------------------------------------------------------------------------------


def completion(*ids: int) -> TextCompletion:
    return TextCompletion(list(ids), [-1.0] * len(ids), "", "length", {})


class Scripted:
    """A reference that gives one prepared Comparison a call."""

    def __init__(self, *comparisons: tuple[list[float], list[float]]) -> None:
        self.comparisons = [Comparison(np.array(d), np.array(r)) for d, r in comparisons]

    def compare_greedy(self, prompt, output_ids, logprobs) -> Comparison:
        return self.comparisons.pop(0)


def test_an_answer_is_equal_only_if_every_token_is():
    answers, prompts = [completion(1, 2)] * 4, [[0]] * 4
    nan = float("nan")
    reference = Scripted(
        ([1e-6, 9e-5], [0, 0]), ([2e-4, 0], [0, 0]), ([0, 0], [0, 0.5]), ([nan, 0], [0, 0])
    )
    got = check(reference, prompts, answers, range(4), lambda _: None)
    assert (got.answers, got.equal, got.tokens, got.equal_tokens) == (4, 1, 8, 5)


def test_nothing_checked_is_not_equal_to_anything():
    assert check(Scripted(), [], [], [], lambda _: None) == Checked(0, 0, 0, 0, None)


def test_sample_spreads_over_all_requests():
    assert [sample(n, 12) for n in (0, 1, 2, 4, 12)] == [
        [], [0], [0, 11], [0, 4, 7, 11], list(range(12))
    ]  # fmt: skip


def test_agreement_counts_tokens_before_the_first_other_one():
    ours = [completion(1, 2, 3), completion(1, 9, 3), completion(4, 5, 6)]
    stocks = [completion(1, 2, 3), completion(1, 2, 3), completion(7, 5, 6)]
    assert agreement(stocks, ours) == Agreement(answers=3, same=1, tokens=9, same_tokens=4)


# -- what it prints and writes ---------------------------------------------------------------------


def result(
    equal: int = 4, same: int = 3, windows: int = 1, frozen: bool = False
) -> demo_report.Result:
    def row(name: str, policy_id, running: int, held: int, equal: int, same: int, kept=None):
        measured = Measured(
            name, policy_id, windows, 16 if kept else running, running, 0, 39_960, held * running,
            held, 123.4, 6.21, 30.0, ["python"], "log", kept,
        )  # fmt: skip
        checked = Checked(0 if kept else 4, equal, 256, 64 * equal, None if kept else 2e-5)
        return demo_report.Row(measured, checked, Agreement(12, same, 768, 64 * same))

    rows = [row("stock SGLang", None, 4, 81_838_080, 4, 12)]
    rows.append(row("RaggedKV", "uniform-512-s4@d6b887f86103", 12, 25_804_800, equal, same))
    if frozen:
        rows.append(row("RaggedKV frozen", "head-uniform@1", 12, 15_482_880, 0, 0, kept=0.15))
    return demo_report.Result("/models/a model", 330_000_000, 12, 1700, 64, 16, rows)


def shown(result: demo_report.Result, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    demo_report.show(result, "uniform-512-s4", Path("out/demo.json"), console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_the_report_is_whole_at_its_widths(width):
    text = shown(result(), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for fact in ("327.4 MB", "309.7 MB", "39,960 pages", "81.8 MB", "25.8 MB", "4 of 4", "(12)"):
        assert fact in text
    words = " ".join(text.split())
    assert "RaggedKV ran 12 requests at once where stock SGLang ran 4 (3.0x)" in words
    assert "25% of the output tokens come before the first one that differs" in words
    assert "windows do change what the model says" in words


@pytest.mark.parametrize("width", [80, 100])
def test_a_frozen_run_is_shown_as_what_it_is(width):
    text = shown(result(frozen=True), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "12 ran at once of 16 that fit" in words and "Only 12 were sent" in words
    assert "decodes from 15% of it, 19% of a dense request's bytes" in words
    assert "This is lossy: 0% of the output tokens" in words
    assert "does not" in words and "apply" in words and "NOT every answer" not in words
    assert "lossy" not in shown(result(), width)


@pytest.mark.parametrize(
    ("flags", "freezes"),
    [([], True), (["--freeze", "none"], False), (["--freeze", FREEZE_POLICY], True)],
)
def test_the_default_model_is_also_served_frozen(flags, freezes, tmp_path, monkeypatch, smollm2):
    seen: list[Contender] = []
    monkeypatch.setattr(demo._Demo, "compare", lambda _, c, __: seen.extend(c) or result())
    assert main(["demo", "--out", str(tmp_path / "out"), *flags]) == 0
    assert [c.name for c in seen[:2]] == ["stock SGLang", "RaggedKV"]
    assert [(c.name, c.budget) for c in seen[2:]] == [("RaggedKV frozen", 256)] * freezes


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--freeze", "full"], "--freeze: policy full has no retention tables"),
        (
            ["--freeze", FREEZE_POLICY],
            f"--freeze: policy '{FREEZE_POLICY}' exists only for other models",
        ),
        (["--freeze", "full", "--budget-tokens", "1700"], "give 1 to 1699"),
    ],
)
def test_a_policy_that_cannot_freeze_is_refused(model, flags, says, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_Demo", None)
    given = ["--model", str(model), "--policy", "full", "--kv-bytes", "20MB", *flags]
    assert main(["demo", *given]) == 2
    assert says in capsys.readouterr().err


def test_the_report_owns_up_to_an_answer_that_is_not_its_references():
    assert "NOT every answer is equal" in " ".join(shown(result(equal=3), 80).split())
    assert "NOT every" not in shown(result(), 80)


def test_only_a_uniform_policy_is_called_one():
    assert "treats all heads alike" in " ".join(shown(result(), 80).split())
    assert "treats all heads alike" not in " ".join(shown(result(windows=4), 80).split())


def test_equal_answers_are_not_called_changed():
    assert "do change" not in shown(result(same=12), 80)


def test_the_commands_to_go_on_are_valid_shell():
    serve, ask = demo_report.by_hand(Path("/models/a model"), "p@1", 330_000_000)
    words = shlex.split(serve)
    assert words[1:3] == ["-m", "sglang.launch_server"]
    assert words[words.index("--model-path") + 1] == "/models/a model"
    assert words[words.index("--kv-arena-bytes") + 1] == "330000000"
    body = shlex.split(ask)
    assert json.loads(body[body.index("-d") + 1])["prompt"]


def test_the_result_is_written_whole_or_not_at_all(tmp_path):
    path = demo_report.write_result(result(), tmp_path)
    assert msgspec.json.decode(path.read_bytes(), type=demo_report.Result) == result()
    assert [p.name for p in tmp_path.iterdir()] == ["demo.json"]
    with pytest.raises(UserError, match=r"cannot write .*demo\.json: No such file"):
        demo_report.write_result(result(), tmp_path / "gone")


@pytest.mark.parametrize(("equal", "status"), [(4, 0), (3, 1)])
def test_the_status_says_whether_the_answers_were_equal(
    model, tmp_path, monkeypatch, capsys, equal, status
):
    monkeypatch.setattr(demo._Demo, "compare", lambda *_: result(equal))
    argv = ["demo", "--model", str(model), "--policy", "full", "--out", str(tmp_path / "out")]
    assert main(argv) == status
    assert (tmp_path / "out" / "demo.json").is_file()
    assert "requests at once where stock" in " ".join(capsys.readouterr().out.split())

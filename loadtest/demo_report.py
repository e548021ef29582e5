"""The demo's table, what it means, and how to go on by hand."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

import msgspec
from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from kvpolicy.render import human_bytes
from loadtest.demo_measure import Agreement, Checked, Measured
from loadtest.result_files import write_json

RESULT_FILE = "demo.json"
PROMPT = "The capital of France is"


class Row(msgspec.Struct, frozen=True):
    """One server: its figures, its check against the reference, its answers beside stock's."""

    measured: Measured
    checked: Checked
    beside_stock: Agreement


class Result(msgspec.Struct, frozen=True):
    """Contents of ``demo.json``."""

    model: str
    kv_bytes: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    page_tokens: int
    rows: list[Row]


def write_result(result: Result, folder: Path) -> Path:
    """Write ``folder/demo.json`` by one rename. Raises UserError if it cannot be written."""
    return write_json(folder / RESULT_FILE, result)


def table(result: Result) -> Table:
    """Stock, RaggedKV and, if it ran, RaggedKV frozen, a row each; fits 80 columns."""
    title = (
        f"{result.requests} requests of {result.prompt_tokens} + {result.output_tokens} tokens, "
        f"{human_bytes(result.kv_bytes)} of KV cache for each server"
    )
    grid = Table(title=title, title_justify="left", box=HORIZONTALS, show_lines=True)
    grid.padding = 0
    grid.add_column("server")
    for heading in (
        "requests\nat once\n(predicted)", "re-\ntracted", "peak KV\nheld", "KV per\nrequest",
        "equal\nto its\nreference", "end to\nend", "output\ntokens/s",
    ):  # fmt: skip
        grid.add_column(heading, justify="right")
    for row in result.rows:
        grid.add_row(*_cells(row))
    return grid


def _cells(row: Row) -> list[str]:
    it, checked = row.measured, row.checked
    equal = f"{checked.equal} of {checked.answers}" if checked.answers else "not checked"
    equal = equal if it.kept_share is None else "does not\napply"
    return [
        it.name.replace(" ", "\n"),
        f"{it.peak_running}\n({it.predicted})",
        str(it.retractions),
        f"{it.peak_bytes / 1e6:.1f} MB\n{it.peak_pages:,} pages",
        f"{it.request_bytes / 1e6:.1f} MB",
        equal,
        f"{it.seconds:.0f} s",
        f"{it.tokens_per_second:.1f}",
    ]


def meaning(result: Result) -> list[str]:
    """What the table says, and what it does not, in sentences."""
    stock, ragged, *frozen = result.rows
    return [
        _capacity(result, stock.measured, ragged.measured),
        _exactness([stock, ragged]),
        _fidelity(ragged),
        *(_freeze(result, stock, row) for row in frozen),
    ]


def _capacity(result: Result, stock: Measured, ragged: Measured) -> str:
    sent = f"In the same {human_bytes(result.kv_bytes)}, RaggedKV ran {ragged.peak_running} "
    sent += f"requests at once where stock SGLang ran {stock.peak_running}"
    if stock.peak_running:
        sent += f" ({ragged.peak_running / stock.peak_running:.1f}x)"
    share = ragged.request_bytes / stock.request_bytes
    sent += (
        f": each holds {share:.0%} of a dense request's bytes, known before serving from the "
        "policy alone."
    )
    if ragged.predicted > result.requests:
        sent += f" {ragged.predicted} would have fitted; only {result.requests} were sent."
    return sent + " A page is 16 tokens of one KV head of one layer."


def _exactness(rows: Sequence[Row]) -> str:
    checked = [row.checked for row in rows]
    if not all(c.answers for c in checked):
        return "No answer was compared with a reference (--checks 0)."
    worst = max(c.worst or 0.0 for c in checked)
    text = (
        "The reference is Hugging Face transformers in float32, for RaggedKV with each head's "
        "window as a mask: the same next token everywhere, log-probabilities within 1e-4 "
        f"(worst {worst:.1e}). "
    )
    if all(c.equal == c.answers for c in checked):
        return text + "Every answer checked is equal: dropping the pages changed nothing else."
    return text + "NOT every answer is equal, which is a bug: please report it with demo.json."


def _fidelity(ragged: Row) -> str:
    beside = ragged.beside_stock
    share = f"{beside.same_tokens / beside.tokens:.0%} of the output tokens come before the first "
    share += f"one that differs from stock's; {beside.same} of {beside.answers} answers are the "
    share += f"same throughout. Policy: {ragged.measured.policy_id}."
    if beside.same == beside.answers:
        return share
    text = "The windows do change what the model says: " + share
    if ragged.measured.windows == 1:
        text += (
            " This policy treats all heads alike, so it also cuts those that look far back; a "
            "calibrated one (seqcalib) gives each head its own window."
        )
    return text


def _freeze(result: Result, stock: Row, frozen: Row) -> str:
    """What a freeze brings and what it costs, as far as it was measured."""
    it, beside = frozen.measured, frozen.beside_stock
    text = (
        f"Frozen ({it.policy_id}), {it.peak_running} ran at once of {it.predicted} that fit: once "
        f"its prompt is read, a request decodes from {it.kept_share or 0:.0%} of it, "
        f"{it.request_bytes / stock.measured.request_bytes:.0%} of a dense request's bytes. "
    )
    if it.predicted > result.requests:
        text += f"Only {result.requests} were sent. "
    share = beside.same_tokens / beside.tokens
    return text + (
        f"This is lossy: {share:.0%} of the output tokens come before the first that differs from "
        "stock's, and what that costs in quality is not measured here."
    )


def by_hand(model: Path, policy: str, kv_bytes: int) -> list[str]:
    """Shell lines that start the RaggedKV server and ask it something."""
    serve = (
        f"{_python()} -m sglang.launch_server",
        f"--model-path {shlex.quote(str(model))}",
        f"--kv-policy {shlex.quote(policy)} --kv-arena-bytes {kv_bytes}",
        "--device cpu --dtype float32 --port 30000",
    )
    body = f'{{"prompt": "{PROMPT}", "max_tokens": 32}}'
    ask = (
        "curl http://127.0.0.1:30000/v1/completions",
        "-H 'Content-Type: application/json'",
        f"-d '{body}'",
    )
    return [" \\\n    ".join(serve), " \\\n    ".join(ask)]


def _python() -> str:
    """How to call this interpreter from the current folder."""
    found = shutil.which("python")
    if found is not None and Path(found) == Path(sys.executable):
        return "python"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.quote(str(python))


def show(result: Result, policy: str, saved: Path, console: Console) -> None:
    """Print the table, the sentences, and the commands to go on with."""
    console.print(table(result))
    console.print()
    for sentence in meaning(result):
        console.print(sentence)
        console.print()
    console.print("To start it by hand, and to ask it something:")
    for command in by_hand(Path(result.model), policy, result.kv_bytes):
        console.print(indent(command, "  "), soft_wrap=True)
    console.print(f"\nFigures: {saved}; the servers' logs are beside it.", soft_wrap=True)

"""The tables for a terminal, and what they say in sentences, gains and losses alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from kvpolicy.render import human_bytes
from loadtest.capacity.compare import (
    Beside,
    at_equal,
    at_largest,
    base_of,
    cpu_at_equal,
    offered,
    tax_of,
    times,
)
from loadtest.capacity.results import BatchResult, BatchSide, ContextResult, ContextSide, Needles
from loadtest.capacity.sides import Role
from loadtest.freeze_results import Machine

NOTHING = "–"
EVEN = 0.03
"""Ratios nearer to 1 than this are called the same: one run cannot tell them apart."""


def show(result: BatchResult | ContextResult, written: Sequence[Path], console: Console) -> None:
    """Print the table, the sentences, and where the files are."""
    is_batch = isinstance(result, BatchResult)
    console.print(batch_table(result) if is_batch else context_table(result))
    for side in result.sides:
        console.print(f"  {side.server.name}: {side.server.what}")
    for sentence in batch_meaning(result) if is_batch else context_meaning(result):
        console.print(sentence)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


def batch_table(result: BatchResult) -> Table:
    """One row a server; fits 100 columns."""
    grid = _grid(
        f"{result.model}: prompts of {result.context} tokens, {result.output} of output, "
        f"{human_bytes(result.kv_bytes)} of KV cache for each server",
        (
            "together\n(pre-\ndicted)", "KV of\neach", f"output\ntokens/s\nat batch {result.equal}",
            "at its\nlargest", "first token,\nbetween two\nat equal", "CPU per\ntoken", "memory",
            "needles\nfound", "re-\ntracted",
        ),
    )  # fmt: skip
    base = base_of(result.sides)
    for side in result.sides:
        grid.add_row(*_batch_cells(result, side, base))
    return grid


def _batch_cells(result: BatchResult, side: BatchSide, base: BatchSide | None) -> list[str]:
    equal = side.run(min(result.equal, side.largest)) or side.at_largest
    largest = side.at_largest
    cpu = equal.cpu_ms_per_output_token
    retracted = [run.retractions for run in side.runs]
    other = base if base is not side else None
    return [
        side.server.name.replace(" ", "\n"),
        f"{side.largest}\n({side.predicted})",
        f"{side.request_bytes / 1e6:.1f} MB",
        _rate(equal.output_tokens_per_second, other and at_equal(result, side, other)),
        _rate(largest.output_tokens_per_second, other and at_largest(side, other)),
        f"{equal.ttft_median_ms / 1000:.1f} s\n{equal.tpot_median_ms:.0f} ms",
        NOTHING if cpu is None else f"{cpu:.0f} ms",
        memory(largest.memory_bytes),
        found(side.needles),
        NOTHING if None in retracted else str(sum(retracted)),
    ]


def context_table(result: ContextResult) -> Table:
    """One row a server; fits 100 columns."""
    grid = _grid(
        f"{result.model}: one prompt at a time, {human_bytes(result.kv_bytes)} of KV cache for "
        f"each server, prompts up to {result.up_to} tokens in steps of {result.step}",
        (
            "longest\nprompt", "predicted", "still\nunderstood", "KV at the\nlongest",
            "predicted", "memory", "first\ntoken", f"needles\nat {result.context}",
        ),
    )  # fmt: skip
    base = base_of(result.sides)
    for side in result.sides:
        ratio = "" if base in (None, side) else f"\n({times(Beside(side.longest, base.longest))})"
        seconds = side.prefill_seconds
        grid.add_row(
            side.server.name.replace(" ", "\n"),
            f"{side.longest}{ratio}",
            str(side.predicted),
            str(side.answered),
            NOTHING if side.kv_bytes is None else f"{side.kv_bytes / 1e6:.1f} MB",
            f"{side.predicted_kv_bytes / 1e6:.1f} MB",
            memory(side.memory_bytes),
            NOTHING if seconds is None else f"{seconds:.1f} s",
            found(side.needles),
        )
    return grid


def _grid(title: str, headings: Sequence[str]) -> Table:
    grid = Table(title=title, title_justify="left", box=HORIZONTALS, show_lines=True)
    grid.padding = 0
    grid.add_column("server")
    for heading in headings:
        grid.add_column(heading, justify="right")
    return grid


def _rate(value: float, beside: Beside | None) -> str:
    return f"{value:.2f}" if beside is None else f"{value:.2f}\n({times(beside)})"


def memory(count: int | None) -> str:
    """``1.25 GB``, or a dash where it is not known."""
    return NOTHING if count is None else human_bytes(count)


def found(needles: Needles | None) -> str:
    """``9 of 10``, or a dash if none was asked."""
    return NOTHING if needles is None else f"{needles.found} of {needles.asked}"


# -- sentences ---------------------------------------------------------------------------------


def batch_meaning(result: BatchResult) -> list[str]:
    """What the load says: gains, the tax, what the answers lost, and how far to trust it."""
    base = base_of(result.sides)
    lines = [] if base is None else [_gain(side, base) for side in offered(result.sides)]
    if base is not None:
        lines += _tax(result, base)
        lines += [_speed(result, side, base) for side in offered(result.sides)]
    return lines + _quality(result.sides) + _caveats(result.finished, result.machine)


def _gain(side: BatchSide, base: BatchSide) -> str:
    held = Beside(side.request_bytes, base.request_bytes)
    exact = "as predicted" if side.largest == side.predicted else f"{side.predicted} predicted"
    return (
        f"{side.server.name} ran {side.largest} requests together where {base.server.name} ran "
        f"{base.largest} ({times(Beside(side.largest, base.largest))}, {exact}): each holds "
        f"{held.ratio or 0:.0%} of the bytes."
    )


def _tax(result: BatchResult, base: BatchSide) -> list[str]:
    tax = tax_of(result)
    full = next((side for side in result.sides if side.server.role == Role.FULL), None)
    if tax is None or full is None:
        return []
    cpu = cpu_at_equal(result, full, base)
    text = f"The engine itself, nothing dropped: {times(tax)} of stock's output rate at batch "
    text += f"{result.equal}{_verdict(tax, result.machine)}"
    return [f"{text}." if cpu is None else f"{text}, CPU time per token {times(cpu)}."]


def _speed(result: BatchResult, side: BatchSide, base: BatchSide) -> str:
    equal, cpu = at_equal(result, side, base), cpu_at_equal(result, side, base)
    largest, machine = at_largest(side, base), result.machine
    text = (
        f"{side.server.name}, output tokens/s: {times(equal)} at batch "
        f"{min(result.equal, side.largest)}{_verdict(equal, machine)}, "
        f"{times(largest)} at each one's largest{_verdict(largest, machine)}"
    )
    return f"{text}." if cpu is None else f"{text}; CPU time per token {times(cpu)} at equal batch."


def _verdict(beside: Beside | None, machine: Machine) -> str:
    """`` (slower)`` where we lose, said as plainly as a gain; nothing if other work ran."""
    ratio = None if beside is None else beside.ratio
    if machine.busy:
        return ""
    if ratio is None or abs(ratio - 1) < EVEN:
        return " (the same within one run's noise)" if ratio is not None else ""
    return " (slower)" if ratio < 1 else " (faster)"


def context_meaning(result: ContextResult) -> list[str]:
    """What the longest prompts say."""
    base, lines = base_of(result.sides), []
    for side in result.sides if base is None else offered(result.sides):
        lines.append(_reach(result, side, base))
    return lines + _quality(result.sides) + _caveats(result.finished, result.machine)


def _reach(result: ContextResult, side: ContextSide, base: ContextSide | None) -> str:
    text = f"{side.server.name} completes prompts up to {side.longest} tokens"
    if side.longest >= result.up_to:
        text += " (as far as was tried; memory would allow more)"
    if base is not None:
        ratio = Beside(side.longest, base.longest)
        text += f" where {base.server.name} reaches {base.longest} ({times(ratio)})"
        if side.longest < base.longest:
            text += ", which is less"
            if side.server.budget_tokens:
                text += ": a prompt is held whole, and what it keeps beside it, until it is frozen"
    if side.answered < side.longest:
        text += f", but its needles are found in most depths only up to {side.answered}"
    return text + "."


def _quality(sides: Sequence[BatchSide | ContextSide]) -> list[str]:
    asked = [(side.server.name, side.needles) for side in sides if side.needles is not None]
    if not asked:
        return ["What it costs in quality was not asked (--needles 0)."]
    counts = ", ".join(f"{name} {needles.found}" for name, needles in asked)
    first = asked[0][1]
    return [
        f"The same {first.asked} needle questions at {first.context} tokens, found: {counts}. "
        "So few show a collapse, not a small loss: `loadtest quality` measures that."
    ]


def _caveats(finished: bool, machine: Machine) -> list[str]:
    lines = [] if finished else ["This run is not finished: some servers are missing."]
    if machine.busy:
        lines.append(
            f"Other work ran on this machine (load {max(machine.loads):.1f} on {machine.cores} "
            "cores): read CPU time per token and ratios, not seconds."
        )
    return lines

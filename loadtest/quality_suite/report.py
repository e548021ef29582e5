"""The suite's tables: floors first to last, where needles are lost, and what servers answered."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.quality_suite.floors import Verdict
from loadtest.quality_suite.heatmap import BINS, needle_grids
from loadtest.quality_suite.judging import show_judged
from loadtest.quality_suite.results import SuiteResult
from loadtest.quality_suite.suites import CHANCES, NOTHING

RED = "bold red"


def show(result: SuiteResult, console: Console) -> None:
    """Print every table, and what they mean."""
    if result.cases:
        below = frozenset(v.key for v in result.verdicts if v.below)
        show_judged(result, console, below)
        console.print()
    tables = [*heat_tables(result), served_table(result), floor_table(result)]
    for table in tables:
        if table is not None:
            console.print(table)
            console.print()
    for line in notes(result):
        console.print(Text(line))


def heat_tables(result: SuiteResult) -> list[Table]:
    """Needles by depth: a row an arm and budget, a table a length."""
    lengths, grids = needle_grids(result)
    tables = []
    for column, length in enumerate(lengths):
        table = _table(f"Needles by depth, T={length}: share of tokens right", "arm", "budget")
        for row in range(BINS):
            table.add_column(f"{row / BINS:.0%}-{(row + 1) / BINS:.0%}", justify="right")
        for (name, budget), grid in grids.items():
            values = [_share(value) for value in grid[:, column]]
            table.add_row(name, str(budget or ""), *values)
        tables.append(table)
    return tables


def served_table(result: SuiteResult) -> Table | None:
    """Exact answers, accepted answers found and tokens right, by task and served arm."""
    if not result.served:
        return None
    title = "Served, greedy: exact answers / answers found / tokens right"
    table = _table(title, "arm", "kept")
    groups = list(dict.fromkeys((c.length, c.task) for c in result.served))
    for length, task in groups:
        table.add_column(f"{task}\nT={length}", justify="right", no_wrap=True)
    for arm in dict.fromkeys(c.arm for c in result.served):
        cells = []
        for group in groups:
            own = [c for c in result.served if (c.arm, c.length, c.task) == (arm, *group)]
            means = [_mean([getattr(c, name) for c in own]) for name in _MEASURES]
            low = any(
                v.below and v.budget is None and (v.arm, v.length, v.task) == (arm, *group)
                for v in result.verdicts
            )
            cells.append(Text(" / ".join(map(_share, means)), style=RED if low else ""))
        kept = result.kept.get(arm)
        table.add_row(arm, "?" if kept is None else f"{kept:.0%}", *cells)
    return table


_MEASURES = ("exact", "found", "accuracy")


def floor_table(result: SuiteResult) -> Table | None:
    """Every task's floor, what dropping everything scores, and in red the arms below."""
    if not result.verdicts:
        return None
    table = _table("Floors", "task", "T", "protocol", "full", "nothing", "chance", "floor")
    table.add_column("policies below", overflow="fold")
    table.add_column("peers below", overflow="fold")
    groups: dict[tuple, list[Verdict]] = {}
    for verdict in result.verdicts:
        served = verdict.budget is None
        key = verdict.task, verdict.length, verdict.protocol, served
        groups.setdefault(key, []).append(verdict)
    for (task, length, protocol, served), members in groups.items():
        first = members[0]
        nothing = "" if first.nothing is None else _share(first.nothing)
        chance = _share(CHANCES[task]) if task in CHANCES else ""
        name = f"{task} (served)" if served else task
        row = [name, str(length), protocol, _share(first.full), nothing, chance]
        ours = [v for v in members if v.arm not in result.settings.peers]
        peers = [v for v in members if v.arm in result.settings.peers]
        row.append(f"{first.floor:.0%} of full")
        table.add_row(*row, _below(ours, shares=True), _below(peers, shares=False))
    return table


def _below(verdicts: Sequence[Verdict], shares: bool) -> Text:
    """Arms and the budgets at which they are below, with the ``shares`` of full that they keep."""
    if not verdicts:
        return Text("")
    if not verdicts[0].signal:
        return Text("no signal", style="dim")
    budgets: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.below:
            at = "" if verdict.budget is None else f"{verdict.budget}"
            share = f": {verdict.share:.0%}" if shares else ""
            budgets.setdefault(verdict.arm, []).append(f"{at}{share}".removeprefix(": "))
    if not budgets:
        return Text("none", style="green")
    told = "; ".join(f"{arm} ({', '.join(found)})" for arm, found in budgets.items())
    return Text(told, style=RED)


def notes(result: SuiteResult) -> list[str]:
    """What the tables say, and what they do not."""
    settings = result.settings
    lines = [
        f"Red: keeps less than the task's floor, a share of the full cache's score. {NOTHING}: all "
        "of the prompt dropped but its last token. No signal: full is not .2 above nothing and "
        "chance, no verdict.",
    ]
    if result.served:
        lines.append(
            "Served answers are decoded freely, the judge's are given each right token before the "
            "next: compare exact answers with the judge's, tokens only among served arms. Verdicts "
            "on served arms are on exact answers."
        )
        lines.append("; ".join(f"{arm}: {title}" for arm, title in settings.served.items()))
    if settings.task_files:
        lines.append(
            f"Task files {', '.join(settings.task_files)}: {settings.cut} prompts cut in the "
            f"middle to the length, {settings.skipped} rows skipped (no answer, or a question that "
            "fills half of it)."
        )
    if not result.finished:
        lines.append("Not finished: --resume goes on.")
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _share(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}".removeprefix("0") if value < 1 else "1.00"

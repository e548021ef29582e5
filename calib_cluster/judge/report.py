"""The judge's tables: every arm at every budget, a table for each length, protocol and task."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calib_cluster.judge.arms import FULL
from calib_cluster.judge.items import TEXT
from calib_cluster.judge.results import Cell, Result
from calib_cluster.judge.summary import Group, measures_of
from kvpolicy.bootstrap import Interval

NOTES = (
    "kept: mean tokens a kv head. acc(uracy): answer tokens that are the most likely one, given "
    "those before, without the first after the compression, which the prefill predicts. exact: "
    "answers that greedy decoding gives. KL: full cache to arm, nats a token; same: most likely "
    "token as with the full cache. Behind the best: the part of its right answer tokens that an "
    "arm gets wrong; of text, the part of its KL that the best avoids. Peers are kvpress's own "
    "code with its defaults."
)


Place = tuple[int, str, str, str, int | None]  # length, protocol, task, arm, budget


def show(result: Result, console: Console, below: Set[Place] = frozenset()) -> None:
    """Print all tables, those ``below`` a floor in red, and what was measured."""
    settings = result.settings
    for group in dict.fromkeys((c.length, c.protocol, c.task) for c in result.cells):
        for table in _tables(result, group, console, below):
            console.print(table)
        console.print()
    if len(result.losses) > 1:
        console.print(_losses(result))
        console.print()
    console.print(Text(NOTES))
    named = {**settings.policies, **settings.peers}
    console.print(Text("; ".join(f"{name}: {title}" for name, title in named.items())))
    done = len(result.cases)
    state = f"{done} cases" if result.finished else f"{done} cases so far, not finished"
    console.print(Text(f"{settings.model}, seed {settings.seed}: {state}"))


def _losses(result: Result) -> Table:
    """Every arm's worst and mean loss over all columns, the least first."""
    columns = max(loss.columns for loss in result.losses)
    title = f"Behind the best arm, over {columns} columns: the least worst loss first"
    table = Table(title=title, title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    for name in ("arm", "worst", "mean", "worst at"):
        table.add_column(name, justify="right" if name in ("worst", "mean") else "left")
    for loss in result.losses:
        at = f"T={loss.length}, {loss.protocol}, {loss.task}, B={loss.budget}"
        table.add_row(loss.arm, f"{loss.worst:.0%}", f"{loss.mean:.0%}", at)
    return table


def _tables(result: Result, group: Group, console: Console, below: Set[Place]) -> list[Table]:
    """One group's results, in as many tables as the console's width makes of all budgets."""
    budgets, unbounded = result.settings.budgets, console.options.update(max_width=10_000)
    for count in range(len(budgets), 0, -1):
        parts = [budgets[i : i + count] for i in range(0, len(budgets), count)]
        tables = [_table(result, group, part, below) for part in parts]
        if max(console.measure(t, options=unbounded).maximum for t in tables) <= console.width:
            break
    return tables


def _table(result: Result, group: Group, budgets: Sequence[int], below: Set[Place]) -> Table:
    length, protocol, task = group
    cells = {(c.arm, c.budget): c for c in result.cells if (c.length, c.protocol, c.task) == group}
    main, full = measures_of(task)[0], cells[FULL, None]
    title = f"T={length}, {protocol}, {task}, n={full.n}: {_title(full, task)}"
    table = Table(title=title, title_justify="left", box=HORIZONTALS, padding=(0, 1, 0, 0))
    table.add_column("\narm", no_wrap=True)
    for budget in budgets:
        table.add_column(f"B={budget}\nkept", justify="right", no_wrap=True)
        table.add_column(
            "\nKL same" if task == TEXT else "\nacc exact", justify="right", no_wrap=True
        )
        if result.against:
            table.add_column(f"\n{result.against} minus it", justify="right", no_wrap=True)
    intervals = {
        (d.beside, d.budget): d.interval
        for d in result.differences
        if (d.length, d.protocol, d.task) == group and d.measure == main
    }
    pick = min if main == "kl" else max
    for arm in dict.fromkeys(arm for arm, _ in cells if arm != FULL):
        row: list[Text | str] = [arm]
        for budget in budgets:
            cell = cells[arm, budget]
            best = pick(getattr(c, main) for (_, b), c in cells.items() if b == budget)
            style = "bold" if getattr(cell, main) == best else ""
            style += " red" if (*group, arm, budget) in below else ""
            row += [f"{cell.kept:.1f}", Text(_values(cell, task), style=style)]
            if result.against:
                row.append(_signed(intervals.get((arm, budget))))
        table.add_row(*row)
    return table


def _title(full: Cell, task: str) -> str:
    if task == TEXT:
        return f"KL to the full cache and same top token; NLL of full {full.nll:.3f}"
    return f"accuracy and exact; full cache {full.accuracy:.3f} {full.exact:.2f}"


def _values(cell: Cell, task: str) -> str:
    if task == TEXT:
        return f"{_short(f'{cell.kl:.3f}')} {_short(f'{cell.agreement:.2f}')}"
    return f"{_short(f'{cell.accuracy:.3f}')} {_short(f'{cell.exact:.2f}')}"


def _signed(interval: Interval | None) -> Text:
    """A difference with its interval; bold where that excludes zero."""
    if interval is None:
        return Text("")
    low, high = (_short(f"{x:+.2f}") for x in (interval.low, interval.high))
    text = f"{_short(f'{interval.mean:+.3f}')} [{low},{high}]"
    return Text(text, style="bold" if interval.low > 0 or interval.high < 0 else "dim")


def _short(number: str) -> str:
    """``+.123`` for ``+0.123``: columns are narrow."""
    return re.sub(r"^([+-]?)0\.", r"\1.", number)

"""What a finished compile tells: its tables, what supports them, and what it took."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from calib_cluster.compile_fit import Fitted
from calib_cluster.compile_job import NOTHING, CollectCost
from calib_cluster.progress import clock
from calib_cluster.summary import write_json
from kvpolicy.evidence import calibratable
from kvpolicy.mix_view import alike, mixtures, retrieving
from kvpolicy.render import make_console
from kvpolicy.retention import SOURCES
from kvpolicy.retention_evidence import CellEvidence, Support, support


class CompileCost(msgspec.Struct, frozen=True):
    """What a compile is based on and took. Seconds and bytes are of this process and its workers:
    a resumed run counts what was left. ``records_per_cpu_second`` and ``peak_bytes`` are None where
    nothing was left to evaluate."""

    prompts: int
    tokens: int
    budgets: tuple[int, ...]
    evaluations: int
    distinct_sets: int
    records: int
    workers: int
    wall_seconds: float
    fit_seconds: float
    collect_seconds: float
    evaluated_now: int
    records_now: int
    cpu_seconds: float
    busy_seconds: float
    records_per_cpu_second: float | None
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    restarts: int
    rounds: int
    settled: bool
    residual: float
    head_support: Support
    gate_support: Support | None


def cost(
    fitted: Fitted, workers: int, wall: float, fit_seconds: float, took: CollectCost = NOTHING
) -> CompileCost:
    """The cost record of a run that took ``wall`` seconds in all, ``fit_seconds`` of them for the
    fit."""
    cpu = sum(usage.cpu_seconds for usage in took.usage)
    heads, gate = supports(fitted)
    counts, compiled = fitted.counts, fitted.compiled
    return CompileCost(
        prompts=counts.prompts,
        tokens=counts.tokens,
        budgets=fitted.budgets,
        evaluations=counts.evaluations,
        distinct_sets=counts.distinct_sets,
        records=counts.records,
        workers=workers,
        wall_seconds=wall,
        fit_seconds=fit_seconds,
        collect_seconds=took.seconds,
        evaluated_now=took.evaluations,
        records_now=took.records,
        cpu_seconds=cpu,
        busy_seconds=sum(usage.busy_seconds for usage in took.usage),
        records_per_cpu_second=took.records / cpu if cpu else None,
        peak_bytes=max((usage.peak_bytes for usage in took.usage), default=None),
        predicted_peak_bytes=took.estimate.total if took.estimate else None,
        restarts=took.restarts,
        rounds=compiled.rounds,
        settled=compiled.settled,
        residual=compiled.residual,
        head_support=heads,
        gate_support=gate,
    )


def supports(fitted: Fitted) -> tuple[Support, Support | None]:
    """Support of the head table and of the gate, over the cells that a freeze can read."""
    heads, evidence = calibratable(fitted.index.geometry), fitted.evidence
    return support(evidence.heads, heads), _gate_support(evidence.gate, heads.any(axis=1))


def _gate_support(cells: CellEvidence | None, rows: np.ndarray) -> Support | None:
    if cells is None:
        return None
    return support(cells, np.broadcast_to(rows[:, None, None], cells.records.shape))


def write_compile_summary(path: Path, found: CompileCost) -> None:
    """Write ``found`` as JSON, whole or not at all. Raises CalibrationError."""
    write_json(path, found)


def print_compile_summary(
    fitted: Fitted, found: CompileCost, console: Console | None = None
) -> None:
    """Tables of what was learned, and lines on what it took."""
    console = console or make_console()
    console.print(tables_view(fitted))
    if fitted.compiled.tables.mix is not None:
        console.print(mixtures_view(fitted))
        console.print(mix_line(fitted))
    settled = "settled" if found.settled else "NOT settled"
    console.print(
        f"{found.evaluations} evaluations of {found.prompts} prompts, {found.distinct_sets} "
        f"distinct kept sets, {found.records} records; tables {settled} after {found.rounds} "
        f"round(s), residual {found.residual:.1e}"
    )
    line = f"took {clock(found.wall_seconds)} with {found.workers} worker(s)"
    if found.records_per_cpu_second is not None:
        line += (
            f": {found.cpu_seconds:.0f} CPU seconds for {found.evaluated_now} evaluations, "
            f"{found.records_per_cpu_second:.0f} records per CPU second, peak "
            f"{found.peak_bytes / 1e9:.2f} GB a worker (predicted "
            f"{found.predicted_peak_bytes / 1e9:.2f} GB), {found.restarts} replaced"
        )
    console.print(f"{line}; fit {clock(found.fit_seconds)}")


def tables_view(fitted: Fitted) -> Table:
    """One row for the head table and one for each budget of the gate; of a mix one for the shares
    at each budget, or at all that have the same."""
    table = Table(title="compiled tables", title_justify="left")
    table.add_column("table")
    columns = (
        "cells", "empty", "records a cell", "of the choice", "confidence", "least", "quartiles",
        "most", "values",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right")
    tables, evidence = fitted.compiled.tables, fitted.evidence
    heads = calibratable(fitted.index.geometry)
    if tables.mix is not None:
        for group in alike(tables):
            shares = _row(tables.mix.shares[group[0]], evidence.heads, heads)
            table.add_row(f"shares, B={_budgets(fitted, group)}", *shares)
        return table
    table.add_row("head weights", *_row(tables.head_weights, evidence.heads, heads))
    if evidence.gate is not None:
        rows = np.broadcast_to(heads.any(axis=1)[:, None, None], tables.gate.shape[1:])
        for i, budget in enumerate(tables.budgets):
            cells = CellEvidence(
                evidence.gate.records[i], evidence.gate.support[i],
                evidence.gate.confidence[i], evidence.gate.empty[i],
            )  # fmt: skip
            table.add_row(f"thresholds, B={budget}", *_row(tables.gate[i], cells, rows))
    return table


def mixtures_view(fitted: Fitted) -> Table:
    """How many heads use each mixture, at each budget or at all that have the same."""
    tables = fitted.compiled.tables
    heads = calibratable(fitted.index.geometry)
    table = Table(title="mixtures", title_justify="left")
    for name in ("budget", "heads", *SOURCES):
        table.add_column(name, justify="right")
    for group in alike(tables):
        for parts, count in mixtures(tables.mix.quotas[group[0]][heads]):
            quotas = (f"{part:.0%}" for part in parts)
            table.add_row(_budgets(fitted, group), str(count), *quotas)
    return table


def mix_line(fitted: Fitted) -> str:
    """What more room is worth, and how many query heads retrieve."""
    geometry, worth = fitted.index.geometry, fitted.evidence.worth
    some, total = retrieving(fitted.compiled.tables.mix, geometry)
    line = f"{some} of {total} query heads retrieve"
    if worth is None:
        return line
    least, middle, most = np.quantile(worth[calibratable(geometry)], [0, 0.5, 1])
    return (
        f"{line}; a doubled share is worth {least:.2g} / {middle:.2g} / {most:.2g} of a standard "
        "deviation of rewards (least / median / most)"
    )


def _budgets(fitted: Fitted, group: tuple[int, ...]) -> str:
    return " ".join(str(fitted.compiled.tables.budgets[i]) for i in group)


def _row(values: np.ndarray, cells: CellEvidence, read: np.ndarray) -> list[str]:
    """Support (medians over cells with records), and how the values of those are spread."""
    found = support(cells, read)
    chosen = values[read & ~cells.empty]
    if not chosen.size:
        return [str(found.cells), str(found.empty), *["-"] * 7]
    least, low, middle, high, most = np.quantile(chosen, [0, 0.25, 0.5, 0.75, 1])
    return [
        str(found.cells),
        str(found.empty),
        f"{found.records:g}",
        f"{found.chosen:g}",
        f"{found.confidence:.2f}",
        f"{least:.4g}",
        f"{low:.4g} / {middle:.4g} / {high:.4g}",
        f"{most:.4g}",
        str(len(Counter(chosen.tolist()))),
    ]

"""What a finished run tells: its points, and what it took."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from calib_cluster.errors import CalibrationError
from calib_cluster.job import JobOutcome, JobPlan
from calib_cluster.progress import clock
from calib_cluster.seqcalib import point_name
from kvpolicy.render import make_console
from kvpolicy.residency import residency
from kvpolicy.windows import FULL


class RunCost(msgspec.Struct, frozen=True):
    """What a run took, and the sizes it depends on. Seconds and bytes; ``busy_seconds`` is wall
    clock inside workers' calls, ``peak_bytes`` the largest worker's."""

    prompts: int
    length: int
    codebook: int
    taus: int
    layers: int
    workers: int
    wall_seconds: float
    cpu_seconds: float
    busy_seconds: float
    peak_bytes: int
    predicted_peak_bytes: int
    restarts: int


def cost(outcome: JobOutcome, plan: JobPlan) -> RunCost:
    """The cost record of a run."""
    return RunCost(
        prompts=len(plan.prompts),
        length=plan.length,
        codebook=len(plan.settings.codebook),
        taus=len(plan.settings.taus),
        layers=len(plan.geometry.layers),
        workers=plan.workers,
        wall_seconds=outcome.seconds,
        cpu_seconds=sum(usage.cpu_seconds for usage in outcome.usage),
        busy_seconds=sum(usage.busy_seconds for usage in outcome.usage),
        peak_bytes=max(usage.peak_bytes for usage in outcome.usage),
        predicted_peak_bytes=outcome.estimate.total,
        restarts=outcome.restarts,
    )


def write_summary(path: Path, outcome: JobOutcome, plan: JobPlan) -> None:
    """Write ``cost`` as JSON, whole or not at all. Raises CalibrationError."""
    write_json(path, cost(outcome, plan))


def write_json(path: Path, record: msgspec.Struct) -> None:
    """Write what ``--summary`` asks for, whole or not at all. Raises CalibrationError."""
    data = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CalibrationError(f"--summary {path}: {error.strerror}") from error


def print_summary(outcome: JobOutcome, plan: JobPlan, console: Console | None = None) -> None:
    """Tables of points and cost."""
    console = console or make_console()
    console.print(points_table(outcome, plan))
    took = cost(outcome, plan)
    console.print(
        f"took {clock(took.wall_seconds)} with {took.workers} worker(s): {took.cpu_seconds:.0f} "
        f"CPU seconds, peak {took.peak_bytes / 1e9:.2f} GB a worker "
        f"(predicted {took.predicted_peak_bytes / 1e9:.2f} GB), {took.restarts} replaced"
    )


def points_table(outcome: JobOutcome, plan: JobPlan) -> Table:
    """One row per tau: how many heads have which window, kept shares, fidelity, loss."""
    seqcalib, held_out = outcome.seqcalib, outcome.held_out
    longest = plan.geometry.max_context
    contexts = sorted({min(c, longest) for c in (plan.length, 8192, 32768)})
    table = Table(title="points", title_justify="left")
    for name in ("point", *(f"kept at {c}" for c in contexts), "mean cosine"):
        table.add_column(name, justify="right")
    for size in (*seqcalib.settings.codebook, "full"):
        table.add_column(str(size), justify="right")
    if held_out:
        table.add_column("held-out loss", justify="right")
    for tau in seqcalib.settings.taus:
        policy = seqcalib.policy(tau)
        chosen = [w for row in seqcalib.chosen_rows(tau) for w in row]
        kept = [f"{residency(policy, plan.geometry, c):.1%}" for c in contexts]
        counts = [str(chosen.count(w)) for w in (*seqcalib.settings.codebook, FULL)]
        row = [point_name(tau), *kept, f"{seqcalib.fidelity(tau):.4f}", *counts]
        if held_out:
            row.append(f"{held_out.nll[point_name(tau)] - held_out.nll_full:+.4f}")
        table.add_row(*row)
    return table

"""Tables of an artifact's points: what was calibrated, how well, and what a budget picks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvpolicy.artifact import Artifact
from kvpolicy.evidence import (
    EVIDENCE_FILE,
    HELD_OUT_FILE,
    REPORT_FILE,
    Evidence,
    HeldOut,
    margin,
    read_evidence,
    read_held_out,
)
from kvpolicy.manifest import CalibrationRecord, Manifest
from kvpolicy.residency import residency
from kvpolicy.select import Selection

SHOWN_CONTEXTS = (2048, 8192, 32768)
_DIGEST = re.compile(r"[0-9a-f]{40,}")


def short(text: str) -> str:
    """``text``, cut to 12 digits if it is a hash."""
    return text[:12] if _DIGEST.fullmatch(text) else text


def number(value: float | None, digits: int = 4) -> str:
    """``value`` with that many decimals, ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def tau_text(tau: float | None) -> str:
    """A tau as people write it: ``0.995``, or ``-``."""
    return "-" if tau is None else f"{tau:g}"


def tau_range(manifest: Manifest) -> str:
    """``0.95-0.999``, one tau, or ``-``."""
    taus = sorted(point.tau for point in manifest.points if point.tau is not None)
    if not taus:
        return "-"
    return f"{taus[0]:g}" if taus[0] == taus[-1] else f"{taus[0]:g}-{taus[-1]:g}"


def calibration_text(record: CalibrationRecord, files: Sequence[str]) -> Text:
    """How a policy was calibrated, and what was kept of it; ``files`` are the artifact's."""
    lines = calibration_lines(record, "calibrated")
    if REPORT_FILE in files:
        lines.append(f"  report: {REPORT_FILE} in the policy's folder (open it in a browser)")
    return Text("\n".join(lines))


def calibration_lines(record: CalibrationRecord, verb: str) -> list[str]:
    """Method, corpora and settings of a calibration; ``verb`` says what it did."""
    lines = [
        f"{verb} by {record.method}: {record.prompts} prompts, {record.tokens} tokens, "
        f"seed {record.seed}, code {short(record.code_version)}"
    ]
    lines += [f"  corpus {name} ({short(digest)})" for name, digest in record.corpora.items()]
    settings = [f"{name}={value}" for name, value in record.hyperparameters.items()]
    if settings:
        lines.append(f"  settings: {', '.join(settings)}")
    return lines


def points_table(artifact: Artifact) -> Table:
    """Every point: tau, fidelity, residency, and where the files are there, margins and losses.

    Raises:
        PolicyError: ``evidence.safetensors`` or ``evaluation.json`` is malformed.
    """
    evidence, held_out = read_evidence(artifact.path), read_held_out(artifact.path)
    longest = artifact.geometry.max_context
    contexts = [*(c for c in SHOWN_CONTEXTS if c < longest), longest]
    table = Table(title="points (residency of global layers at a context)", title_justify="left")
    table.add_column("point", overflow="fold")
    for name in ("tau", "fidelity", *(f"at {context}" for context in contexts)):
        table.add_column(name, justify="right")
    if evidence is not None:
        table.add_column("least / mean cosine over tau", justify="right")
    if held_out is not None:
        table.add_column("held-out NLL (- full)", justify="right")
    for point in artifact.manifest.points:
        mark = " (default)" if point.name == artifact.manifest.default_point else ""
        policy = artifact.policy(point.name)
        shares = [f"{residency(policy, artifact.geometry, c):.2%}" for c in contexts]
        cells = [point.name + mark, tau_text(point.tau), number(point.fidelity), *shares]
        if evidence is not None:
            cells.append(_margin_text(evidence, artifact, point.name))
        if held_out is not None:
            cells.append(_loss_text(held_out, point.name))
        table.add_row(*cells)
    if held_out is not None:
        table.caption = _caption(held_out)
        table.caption_justify = "left"
    return table


def checked_text(artifact: Artifact) -> str:
    """Read the optional files; say what they hold, after commas. Raises PolicyError."""
    evidence, held_out = read_evidence(artifact.path), read_held_out(artifact.path)
    parts = []
    if evidence is not None:
        for point in artifact.manifest.points:
            margin(evidence, artifact, point.name)
        count = len(evidence.codebook)
        parts.append(f"{EVIDENCE_FILE} has cosines of {count} windows at every point")
    if held_out is not None:
        parts.append(f"{HELD_OUT_FILE} has {len(held_out.nll)} points' losses")
    return "".join(f", {part}" for part in parts)


def selection_view(selection: Selection) -> Group:
    """Every point with its residency at the budget's context, and which one was chosen."""
    table = Table()
    table.add_column("point", overflow="fold")
    for name in ("tau", "fidelity", "residency"):
        table.add_column(name, justify="right")
    for name in ("fits", "chosen"):
        table.add_column(name, justify="center")
    for row in selection.candidates:
        chosen = "<--" if row.point == selection.point else ""
        fits = "yes" if row.fits else "no"
        share = f"{row.residency:.4%}"
        table.add_row(row.point, tau_text(row.tau), number(row.fidelity), share, fits, chosen)
    tau = "" if selection.tau is None else f" (tau {selection.tau:g})"
    limit = f"residency <= {selection.budget:g} at {selection.context} tokens"
    return Group(
        Text(f"points of {selection.policy_id} for {limit}"),
        table,
        Text(f"chosen: {selection.point}{tau}, residency {selection.residency:.2%}"),
    )


def _margin_text(evidence: Evidence, artifact: Artifact, point: str) -> str:
    found = margin(evidence, artifact, point)
    return "-" if found is None else f"{found.least:+.4f} / {found.mean:+.4f}"


def _loss_text(held_out: HeldOut, point: str) -> str:
    loss = held_out.nll.get(point)
    return "-" if loss is None else f"{loss:.4f} ({loss - held_out.nll_full:+.4f})"


def _caption(held_out: HeldOut) -> str:
    corpora = ", ".join(held_out.corpora)
    return (
        f"held-out: {held_out.prompts} prompts, {held_out.tokens} tokens of {corpora}; "
        f"full {held_out.nll_full:.4f} nats per token"
    )

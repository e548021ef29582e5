"""The retention part of a policy, for a terminal."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from kvpolicy.artifact import Artifact
from kvpolicy.evidence import REPORT_FILE, calibratable
from kvpolicy.manifest import RetentionRecord
from kvpolicy.mix_view import RETRIEVES, alike, keep_most, mixture_text, mixtures, retrieving
from kvpolicy.render_points import calibration_lines
from kvpolicy.retention.tables import RetentionTables
from kvpolicy.retention.units import retention_units
from kvpolicy.retention_evidence import (
    RETENTION_EVIDENCE_FILE,
    CellEvidence,
    RetentionEvidence,
    read_retention_evidence,
    support,
)
from kvpolicy.transfer import TransferRecord
from kvpolicy.windows import WindowPolicy

_MOST_HEADS, _MOST_MIXTURES = 8, 8


def summary(artifact: Artifact) -> str:
    """Rule, options, budgets, bins and head weights (of a mix: shares and mixtures) of its
    retention part, in one line."""
    tables = artifact.retention
    values, name = tables.head_weights[_heads(artifact)], "head weights"
    if tables.mix is not None:
        values, name = tables.mix.shares[:, _heads(artifact)], "shares"
    low, mean, high = spread(values)
    parts = [
        f"rule {tables.rule.name} ({tables.rule.options})", gate_text(tables),
        f"{name} {low}/{mean}/{high} (min/mean/max)", *_mix_counts(artifact),
        transfer_text(artifact),
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _mix_counts(artifact: Artifact) -> list[str]:
    """How many mixtures there are and how many query heads retrieve, if it is a mix."""
    mix = artifact.retention.mix
    if mix is None:
        return []
    used = len(mixtures(mix.quotas[:, _heads(artifact)].reshape(-1, mix.quotas.shape[-1])))
    some, total = retrieving(mix, artifact.geometry)
    return [f"{used} mixture{'s' * (used != 1)}", f"{some} of {total} query heads retrieve"]


def transfer_text(artifact: Artifact) -> str:
    """Where its tables come from, if not from its own model; else empty."""
    retention = artifact.manifest.retention
    if retention is None or retention.transferred is None:
        return ""
    return f"{retention.transferred.text}; not measured on this model"


def _compiled_lines(record: RetentionRecord) -> list[str]:
    if record.calibration is None:
        return ["tables not compiled"]
    model = "" if record.transferred is None else f" for {record.transferred.model}"
    return calibration_lines(record.calibration, f"tables compiled{model}")


def _support_lines(evidence: RetentionEvidence, heads: np.ndarray, mixes: bool) -> list[str]:
    """What supports each table, over the cells that a freeze can read (``heads``)."""
    name = "each head's best share" if mixes else "head weights"
    lines = [_support_line(name, evidence.heads, heads)]
    if evidence.worth is not None:
        spreads = " / ".join(spread(evidence.worth[heads]))
        lines.append(
            f"a doubled share adds to the standardised reward, min / mean / max: {spreads}"
        )
    if evidence.gate is not None:
        rows = heads.any(axis=1)[:, None, None]
        read = np.broadcast_to(rows, evidence.gate.records.shape)
        some = evidence.cell_prompts[evidence.cell_prompts > 0]
        lines += [
            _support_line("thresholds", evidence.gate, read),
            f"risk cells with calibration prompts: {some.size} of {evidence.cell_prompts.size}, "
            f"{some.min()} to {some.max()} prompts each",
        ]
    return lines


def _support_line(name: str, cells: CellEvidence, read: np.ndarray) -> str:
    found = support(cells, read)
    return (
        f"support of {name}: {found.empty} of {found.cells} cells without records; medians of the "
        f"others: {found.records:g} records, {found.chosen:g} of the choice, confidence "
        f"{found.confidence:.2f}"
    )


def retention_checked_text(artifact: Artifact) -> str:
    """Read the evidence of its tables; say so, after a comma. Raises PolicyError."""
    if artifact.retention is None or read_retention_evidence(artifact) is None:
        return ""
    return f", {RETENTION_EVIDENCE_FILE} has the support of every cell"


def _mapping_lines(record: TransferRecord) -> list[str]:
    """Which layer and heads of the source each layer's numbers are."""
    layers = zip(record.target_layers, record.source_layers, strict=True)
    heads = sorted(set(record.source_heads))
    return [
        "layers (ours<-theirs): " + " ".join(f"{ours}<-{theirs}" for ours, theirs in layers),
        "their kv heads, in our order: " + " or ".join(",".join(map(str, h)) for h in heads),
    ]


def _heads(artifact: Artifact) -> np.ndarray:
    """bool [attention layers, max kv heads]: cells that some freeze can read, or else every one."""
    mask = calibratable(artifact.geometry)
    return mask if mask.any() else np.ones_like(mask)


def gate_text(tables: RetentionTables) -> str:
    """``budgets 256 512, 20 x 4 bins``, or ``no gate`` after a mix's budgets."""
    budgets = f"budgets {' '.join(map(str, tables.budgets))}, " if tables.budgets else ""
    if tables.rule.gate == "off":
        return f"{budgets}no gate"
    _, _, entropy, perplexity = tables.gate.shape
    return f"{budgets}{entropy} x {perplexity} bins"


def spread(values: np.ndarray) -> tuple[str, str, str]:
    """Least, mean and greatest of ``values``, to four digits."""
    found = values.min(), values.mean(dtype=np.float64), values.max()
    return tuple(f"{float(value):.4g}" for value in found)


def _mix_lines(artifact: Artifact, heads: np.ndarray) -> list[str]:
    """Shares and mixtures of each budget (once where budgets have the same), and who retrieves."""
    tables, lines = artifact.retention, []
    for group in alike(tables):
        shares, quotas = tables.mix.shares[group[0]], tables.mix.quotas[group[0]]
        budgets = " ".join(str(tables.budgets[i]) for i in group)
        lines += [
            f"at budget{'s' * (len(group) > 1)} {budgets}, where share 1 is the budget itself:",
            "  shares min / mean / max: " + " / ".join(spread(shares[heads])),
            "  heads that keep most (layer/head share): " + _most_text(artifact, shares, heads),
            *(f"  {line}" for line in _mixture_lines(quotas[heads])),
        ]
    some, total = retrieving(tables.mix, artifact.geometry)
    lines.append(f"retrieval source: {some} of {total} query heads weigh at least {RETRIEVES:g} of "
                 "the highest")  # fmt: skip
    return lines


def _most_text(artifact: Artifact, shares: np.ndarray, heads: np.ndarray) -> str:
    layers = artifact.geometry.attention_layers
    places = keep_most(shares, heads, _MOST_HEADS)
    return ", ".join(f"{layers[row].layer_id}/{head} {shares[row, head]:.3g}"
                     for row, head in places)  # fmt: skip


def _mixture_lines(quotas: np.ndarray) -> list[str]:
    found = mixtures(quotas)
    lines = [f"{count} head{'s' * (count != 1)}: {mixture_text(parts)}" for parts, count in found]
    shown, more = lines[:_MOST_MIXTURES], len(lines) - _MOST_MIXTURES
    return [*shown, f"and {more} more mixture{'s' * (more != 1)}"] if more > 0 else shown


def retention_text(artifact: Artifact, policy: WindowPolicy) -> Text:
    """What ``show`` prints of an artifact that has retention tables; ``policy`` is the point's."""
    tables, record = artifact.retention, artifact.manifest.retention
    units = len(retention_units(policy)[0])
    lines = [
        f"retention rule {tables.rule.name}: {tables.rule.options}",
        f"  freezes the {units} of {artifact.geometry.num_units} units that have no window",
    ]
    heads = _heads(artifact)
    if tables.mix is None:
        weights = spread(tables.head_weights[heads])
        lines.append("  head weights min / mean / max: " + " / ".join(weights))
    else:
        lines += [f"  {line}" for line in _mix_lines(artifact, heads)]
    if tables.rule.gate == "table":
        thresholds = spread(tables.gate[:, heads.any(axis=1)])
        lines.append(f"  gate: {gate_text(tables)} (entropy x perplexity)")
        lines.append("  thresholds min / mean / max: " + " / ".join(thresholds))
    if record.transferred is not None:
        lines.append(f"  {transfer_text(artifact)}")
        lines += [f"    {line}" for line in _mapping_lines(record.transferred)]
    lines += [f"  {line}" for line in _compiled_lines(record)]
    if (evidence := read_retention_evidence(artifact)) is not None:
        lines += [f"  {line}" for line in _support_lines(evidence, heads, tables.rule.mixes)]
    if artifact.manifest.calibration is None and REPORT_FILE in artifact.manifest.files:
        lines.append(f"  report: {REPORT_FILE} in the policy's folder (open it in a browser)")
    return Text("\n".join(lines))

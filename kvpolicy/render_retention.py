"""The retention part of a policy, for a terminal."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from kvpolicy.artifact import Artifact
from kvpolicy.evidence import calibratable
from kvpolicy.render_points import calibration_lines
from kvpolicy.retention.tables import RetentionTables
from kvpolicy.retention.units import retention_units
from kvpolicy.windows import WindowPolicy


def summary(artifact: Artifact) -> str:
    """Rule, options, budgets, bins and head weights of its retention part, in one line."""
    tables = artifact.retention
    low, mean, high = spread(tables.head_weights[_heads(artifact)])
    return (
        f"rule {tables.rule.name} ({tables.rule.options}), {gate_text(tables)}, "
        f"head weights {low}/{mean}/{high} (min/mean/max)"
    )


def _heads(artifact: Artifact) -> np.ndarray:
    """bool [attention layers, max kv heads]: cells that some freeze can read, or else every one."""
    mask = calibratable(artifact.geometry)
    return mask if mask.any() else np.ones_like(mask)


def gate_text(tables: RetentionTables) -> str:
    """``budgets 256 512, 20 x 4 bins``, or ``no gate``."""
    if tables.rule.gate == "off":
        return "no gate"
    _, _, entropy, perplexity = tables.gate.shape
    return f"budgets {' '.join(map(str, tables.budgets))}, {entropy} x {perplexity} bins"


def spread(values: np.ndarray) -> tuple[str, str, str]:
    """Least, mean and greatest of ``values``, to four digits."""
    found = values.min(), values.mean(dtype=np.float64), values.max()
    return tuple(f"{float(value):.4g}" for value in found)


def retention_text(artifact: Artifact, policy: WindowPolicy) -> Text:
    """What ``show`` prints of an artifact that has retention tables; ``policy`` is the point's."""
    tables, record = artifact.retention, artifact.manifest.retention
    units = len(retention_units(policy)[0])
    lines = [
        f"retention rule {tables.rule.name}: {tables.rule.options}",
        f"  freezes the {units} of {artifact.geometry.num_units} units that have no window",
    ]
    heads = _heads(artifact)
    weights = spread(tables.head_weights[heads])
    lines.append("  head weights min / mean / max: " + " / ".join(weights))
    if tables.rule.gate == "table":
        thresholds = spread(tables.gate[:, heads.any(axis=1)])
        lines.append(f"  gate: {gate_text(tables)} (entropy x perplexity)")
        lines.append("  thresholds min / mean / max: " + " / ".join(thresholds))
    if record.calibration is None:
        lines.append("  tables not compiled")
    else:
        lines += [f"  {line}" for line in calibration_lines(record.calibration, "tables compiled")]
    return Text("\n".join(lines))

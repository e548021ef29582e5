"""Tables of policies and plans for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpolicy.artifact import RESIDENCY_CONTEXTS, Artifact
from kvpolicy.geometry import LayerKind, ModelGeometry
from kvpolicy.manifest import Manifest
from kvpolicy.plan import Plan, Prediction
from kvpolicy.render_points import calibration_text, points_table, tau_range
from kvpolicy.render_retention import retention_text, summary
from kvpolicy.residency import page_residency, residency
from kvpolicy.windows import FULL, WindowPolicy

PIPE_WIDTH = 120


def make_console() -> Console:
    """Console on stdout; a fixed width when piped, so that tables are not cut."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def human_bytes(count: int) -> str:
    """``1.50 GB`` (decimal units)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def window_text(window: int) -> str:
    """``full`` or the number of tokens."""
    return "full" if window == FULL else str(window)


def levels_table(policy: WindowPolicy) -> Table:
    """Levels: window, sinks, units and their share."""
    table = Table(title="levels (units that share a window)", title_justify="left")
    for column in ("level", "window", "sinks", "units", "share of units"):
        table.add_column(column, justify="right")
    total = policy.geometry.num_units
    for level in policy.levels():
        count = len(level.units)
        table.add_row(
            str(level.index),
            window_text(level.window),
            str(level.sinks),
            str(count),
            f"{count / total:.1%}",
        )
    return table


def matrix_text(policy: WindowPolicy) -> Text:
    """Window of every kv head, one line per run of attention layers with equal windows."""
    layers = policy.geometry.attention_layers
    lines = ["windows by layer and kv head (N = native sliding window)"]
    keys = [
        (layer.kind, tuple(window_text(w) for w in row[: layer.num_kv_heads].tolist()))
        for layer, row in zip(layers, policy.windows, strict=True)
    ]
    start = 0
    for i, key in enumerate(keys):
        if i + 1 < len(keys) and keys[i + 1] == key:
            continue
        ids = [layer.layer_id for layer in layers[start : i + 1]]
        mark = " N" if key[0] is LayerKind.NATIVE else "  "
        lines.append(f"  {_ranges(ids):>24}{mark}  {_heads(key[1])}")
        start = i + 1
    return Text("\n".join(lines))


def _ranges(ids: Sequence[int]) -> str:
    """``layer 3`` / ``layers 0-29`` / ``layers 3-63 step 4``."""
    if len(ids) == 1:
        return f"layer {ids[0]}"
    steps = {b - a for a, b in pairwise(ids)}
    if len(steps) != 1:
        return f"{len(ids)} layers {ids[0]}..{ids[-1]}"
    step = steps.pop()
    return f"layers {ids[0]}-{ids[-1]}" + ("" if step == 1 else f" step {step}")


def _heads(windows: Sequence[str]) -> str:
    if len(set(windows)) == 1:
        return f"{windows[0]} x {len(windows)} heads" if len(windows) > 1 else windows[0]
    return " ".join(f"{w:>6}" for w in windows)


def residency_table(policy: WindowPolicy, page_size: int = 16) -> Table:
    """Kept share of the global units' tokens at several contexts."""
    geom = policy.geometry
    table = Table(title="residency of global layers", title_justify="left")
    for column in ("context", "tokens kept", f"pages held (P={page_size})"):
        table.add_column(column, justify="right")
    contexts = [c for c in RESIDENCY_CONTEXTS if c < geom.max_context]
    for context in [*contexts, geom.max_context]:
        exact = residency(policy, geom, context)
        paged = page_residency(policy, geom, context, page_size)
        table.add_row(str(context), f"{exact:.2%}", f"{paged:.2%}")
    return table


def geometry_line(geom: ModelGeometry) -> str:
    """One line on a model's layers and units."""
    counts = [
        f"{sum(layer.kind is kind for layer in geom.layers)} {kind.value}"
        for kind in LayerKind
        if any(layer.kind is kind for layer in geom.layers)
    ]
    return (
        f"{geom.architecture}: {len(geom.layers)} layers ({', '.join(counts)}), "
        f"{geom.num_units} kv units, {geom.bytes_per_token()} KV bytes per token dense, "
        f"max context {geom.max_context}"
    )


def _origin(manifest: Manifest) -> str:
    """How windows and retention tables were made."""
    compiled = manifest.retention and manifest.retention.calibration
    parts = [part.method for part in (manifest.calibration, compiled) if part]
    return " and ".join(parts) or "not calibrated"


def artifact_view(artifact: Artifact, point: str | None) -> Group:
    """Everything ``show`` prints about one artifact."""
    manifest = artifact.manifest
    policy = artifact.policy(point)
    names = ", ".join(
        f"{p.name} (default)" if p.name == manifest.default_point else p.name
        for p in manifest.points
    )
    origin = _origin(manifest)
    head = (
        f"policy {artifact.policy_id} for {manifest.model.name}, {origin}\n"
        f"{geometry_line(artifact.geometry)}\n"
        f"points: {names}; windows shown: {point or manifest.default_point}"
    )
    parts: list[RenderableType] = [Text(head)]
    if manifest.calibration is not None:
        parts.append(calibration_text(manifest.calibration, tuple(manifest.files)))
    if manifest.calibration is not None or len(manifest.points) > 1:
        parts.append(points_table(artifact))
    if artifact.retention is not None:
        parts.append(retention_text(artifact, policy))
    parts += [
        levels_table(policy),
        matrix_text(policy),
        residency_table(policy),
    ]
    return Group(*parts)


def artifacts_view(artifacts: Sequence[Artifact]) -> Group:
    """One row an artifact, then one line for each that has retention tables."""
    lines = [
        Text(f"retention of {artifact.policy_id}: {summary(artifact)}")
        for artifact in artifacts
        if artifact.retention is not None
    ]
    return Group(_artifacts_table(artifacts), *lines)


def _artifacts_table(artifacts: Sequence[Artifact]) -> Table:
    """What each artifact is, for which model, and how it was made."""
    table = Table(title="policies", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in ("model", "made by", "tau", "points", "retention", "folder"):
        table.add_column(column, overflow="fold")
    for artifact in artifacts:
        manifest = artifact.manifest
        method = _origin(manifest)
        points = f"{len(manifest.points)}, default {manifest.default_point}"
        rule = "-" if manifest.retention is None else manifest.retention.rule.name
        cells = (artifact.policy_id, manifest.model.name, method, tau_range(manifest), points)
        table.add_row(*cells, rule, str(artifact.path))
    return table


def plan_view(plan: Plan, geom: ModelGeometry) -> Group:
    """Budget lines and the dense / native / policy comparison."""
    mark = " (estimated from config.json)" if plan.weights_estimated else ""
    head = (
        f"{geometry_line(geom)}\n"
        f"memory {human_bytes(plan.memory_bytes)} = weights {human_bytes(plan.weight_bytes)}{mark}"
        f" + overhead {human_bytes(plan.overhead_bytes)}"
        f" + KV budget {human_bytes(plan.kv_budget_bytes)}\n"
        f"recurrent state: {human_bytes(plan.state_bytes_per_request)} per request, "
        "charged to the KV budget in every column"
    )
    if plan.state_bytes_per_request:
        head += "; SGLang keeps more of them for snapshots, as its start-up table says"
    title = f"at {plan.context} tokens a request, page {plan.page_size}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    same = plan.native.bytes_per_request == plan.dense.bytes_per_request
    columns = [plan.dense, plan.policy] if same else [plan.dense, plan.native, plan.policy]
    for title in _titles(columns, plan):
        table.add_column(title, justify="right")
    table.add_column("policy / dense", justify="right")
    for row in _plan_rows(columns, plan):
        table.add_row(*row)
    return Group(Text(head), table)


def _titles(columns: Sequence[Prediction], plan: Plan) -> list[str]:
    names = {id(plan.dense): "dense (stock)", id(plan.native): "native windows"}
    return [names.get(id(column), column.name) for column in columns]


def _plan_rows(columns: Sequence[Prediction], plan: Plan) -> list[list[str]]:
    counted = [
        ("KV bytes per request", "bytes_per_request", human_bytes),
        ("largest batch", "max_batch", str),
        ("longest context, batch 1", "max_context", _context_text),
        (f"  capped at the model's {plan.model_max_context}", "usable_context", str),
    ]
    shares = [("residency, tokens", "residency"), ("residency, pages", "page_residency")]
    rows = []
    for label, field, text in counted:
        cells = [text(getattr(column, field)) for column in columns]
        ratio = _ratio(getattr(plan.policy, field), getattr(plan.dense, field))
        rows.append([label, *cells, ratio])
    if plan.state_bytes_per_request:
        state = human_bytes(plan.state_bytes_per_request)
        rows.insert(1, ["recurrent state per request", *([state] * len(columns)), "1.000"])
    for label, field in shares:
        rows.append([label, *(f"{getattr(column, field):.2%}" for column in columns), ""])
    return rows


def _context_text(tokens: int | None) -> str:
    return "unlimited" if tokens is None else str(tokens)


def _ratio(a: int | None, b: int | None) -> str:
    return f"{a / b:.3f}" if a is not None and b else "-"

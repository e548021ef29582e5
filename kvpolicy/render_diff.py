"""Tables of a comparison of two points."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpolicy.diff import Change, Comparison
from kvpolicy.render import window_text
from kvpolicy.render_points import short

_MOST_SHARES = 3


def diff_view(found: Comparison) -> RenderableType:
    """Everything ``diff`` prints; one line if nothing differs."""
    a, b = _labels(found)
    if found.identical:
        return Text(f"identical: {a} and {b} have the same {found.units} windows and origin")
    head = (
        f"A = {a}\nB = {b}\n{_count_line(found)}\n"
        f"Spearman correlation of the windows of global units: {_spearman_text(found.spearman)}"
    )
    parts: list[RenderableType] = [Text(head), _residency_table(found)]
    if found.changes:
        parts.append(_changes_table(found))
    if found.mix:
        parts.append(_mix_table(found))
    if found.manifest:
        parts.append(_manifest_table(found))
    return Group(*parts)


def _labels(found: Comparison) -> tuple[str, str]:
    return f"{found.a} point {found.point_a}", f"{found.b} point {found.point_b}"


def _count_line(found: Comparison) -> str:
    wider = sum(change.window_b > change.window_a for change in found.changes)
    count = len(found.changes)
    if not count:
        return f"all {found.units} units have the same window"
    less = count - wider
    return f"{count} of {found.units} units differ: B keeps more in {wider}, less in {less}"


def _spearman_text(value: float | None) -> str:
    return "undefined, one side has a single window" if value is None else f"{value:.4f}"


def _residency_table(found: Comparison) -> Table:
    table = Table(title="residency of global layers", title_justify="left")
    for column in ("context", "A", "B", "B - A"):
        table.add_column(column, justify="right")
    for context, (a, b) in found.residency.items():
        table.add_row(str(context), f"{a:.2%}", f"{b:.2%}", f"{100 * (b - a):+.2f} points")
    return table


def _changes_table(found: Comparison) -> Table:
    table = Table(title="windows that differ, A -> B", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("kv head: windows", overflow="fold")
    layers: dict[int, list[Change]] = {}
    for change in found.changes:
        layers.setdefault(change.layer_id, []).append(change)
    for layer_id, changes in layers.items():
        table.add_row(str(layer_id), ", ".join(map(_change_text, changes)))
    return table


def _change_text(change: Change) -> str:
    return f"{change.head}: {window_text(change.window_a)} -> {window_text(change.window_b)}"


def _mix_table(found: Comparison) -> Table:
    title = "shares and mixtures of kv heads, by the tables that serve each budget"
    table = Table(title=title, title_justify="left")
    columns = (
        "budget", "other share", "Spearman of shares", "largest changes (layer/head)",
        "other mixture", "retrieving query heads",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for change in found.mix:
        rank = "-" if change.spearman is None else f"{change.spearman:.4f}"
        most = ", ".join(
            f"{share.layer_id}/{share.head} {share.a:.3g} -> {share.b:.3g}"
            for share in change.shares[:_MOST_SHARES]
        )
        table.add_row(
            str(change.budget), f"{len(change.shares)} of {change.heads}", rank, most or "-",
            f"{change.mixtures} of {change.heads}", "{} -> {}".format(*change.retrieving),
        )  # fmt: skip
    return table


def _manifest_table(found: Comparison) -> Table:
    table = Table(title="origin", title_justify="left")
    for column in ("", "A", "B"):
        table.add_column(column, overflow="fold")
    for entry in found.manifest:
        table.add_row(entry.field, *("-" if v is None else short(v) for v in (entry.a, entry.b)))
    return table

"""Windows by layer and kv head, and how many units each point gives each window."""

from __future__ import annotations

from collections import Counter
from xml.etree.ElementTree import Element

from calib_cluster.report.data import ReportInput
from calib_cluster.report.parts import layer_map, only
from kvpolicy.geometry import LayerGeometry, LayerKind
from kvpolicy.report import words
from kvpolicy.report.markup import node
from kvpolicy.report.parts import scroll_table
from kvpolicy.windows import FULL

# least share of a bar that has room for its count, on a desktop and on a phone
_ROOM = 0.025
_ROOM_ON_PHONE = 0.1


def window_maps(data: ReportInput) -> list[Element]:
    """One block for each point: the legend with counts, then the map."""
    return [
        only(index, point.name, _legend(data, index), _map(data, index))
        for index, point in enumerate(data.points)
    ]


def share_bars(data: ReportInput) -> Element:
    """One bar a point: units by window, from the smallest window to full."""
    rows = [
        [node("th", point.name, scope="row"), node("td", _bar(data, index), cls="wide")]
        for index, point in enumerate(data.points)
    ]
    return scroll_table([], [node("tr", row, cls=f"p{i}") for i, row in enumerate(rows)], "bars")


def scale(data: ReportInput) -> Element:
    """The colours of all windows, in order."""
    items = [node("li", node("b", words.window(w), cls=f"l{i}")) for i, w in enumerate(data.levels)]
    return node("ul", items, cls="legend", aria_label="colours of windows")


def _bar(data: ReportInput, index: int) -> Element:
    counts = Counter(data.chosen(index))
    levels = enumerate(data.levels)
    parts = [_segment(data, i, w, counts[w]) for i, w in levels if counts[w]]
    return node("div", parts, cls="bar")


def _segment(data: ReportInput, order: int, window: int, count: int) -> Element:
    part = count / data.num_global_units
    slim = " slim" if part < _ROOM_ON_PHONE else ""
    return node(
        "span", str(count) if part > _ROOM else None,
        cls=f"l{order}{slim}", style=f"flex:{count}",
        title=f"{words.window(window)}: {words.plural(count, 'unit')}",
    )  # fmt: skip


def _legend(data: ReportInput, index: int) -> Element:
    counts = Counter(data.chosen(index))
    items = [
        node("li", node("b", words.window(level), cls=f"l{i}"), f" {counts[level]}")
        for i, level in enumerate(data.levels)
    ]
    if data.native_windows:
        count = data.geometry.num_units - data.num_global_units
        sizes = " ".join(words.window(w) for w in data.native_windows)
        items.append(node("li", node("b", sizes, cls="native"), f" {count} native, not calibrated"))
    return node("ul", items, cls="legend", aria_label="windows and number of units")


def _map(data: ReportInput, index: int) -> Element:
    layers = data.geometry.attention_layers
    return layer_map(layers, lambda row, head: _cell(data, index, row, layers[row], head))


def _cell(data: ReportInput, index: int, row: int, layer: LayerGeometry, head: int) -> Element:
    window = int(data.points[index].policy.windows[row, head])
    place = f"layer {layer.layer_id}, kv head {head}"
    if layer.kind is LayerKind.NATIVE:
        return node("b", words.window(window), cls="native", title=f"{place}: native window")
    title = place + _cosine_text(data, index, row, head, window)
    return node("b", words.window(window), cls=f"l{data.levels.index(window)}", title=title)


def _cosine_text(data: ReportInput, index: int, row: int, head: int, window: int) -> str:
    if window == FULL or window not in data.evidence.codebook:
        return ""
    column = data.evidence.codebook.index(window)
    return f": cosine {words.cosine(float(data.evidence.mean_cosine[index, row, head, column]))}"

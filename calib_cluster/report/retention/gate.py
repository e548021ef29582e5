"""The gate of each budget: thresholds by risk cell, and by layer and risk cell."""

from __future__ import annotations

from xml.etree.ElementTree import Element

import numpy as np

from calib_cluster.report.parts import only
from calib_cluster.report.retention.data import RetentionReportInput
from calib_cluster.report.retention.heads import percent, sureness
from calib_cluster.report.retention.risk import cell_table, labels
from calib_cluster.report.retention.scale import Scale, bars, short
from kvpolicy.report import words
from kvpolicy.report.markup import node
from kvpolicy.report.parts import figure

MEANING = (
    "A token must score at least its layer's threshold to be kept, even when the budget has room "
    "(the last token and the rule's floor stay in any case): a high threshold keeps fewer tokens, "
    "a low one leaves the decision to the budget. It depends on the prompt's risk cell, and on the "
    "compiled budget nearest to the one in force."
)
_ALL_NUMBERED = 10
MAP_MEANING = (
    "One panel for each perplexity bin, one row for each layer, one column for each entropy bin. "
    "Rest the pointer on a cell for its threshold, how many of the cell's records chose it, and "
    "the confidence that it is the best."
)


def cell_blocks(data: RetentionReportInput) -> list[Element]:
    """For each budget: mean thresholds and records by risk cell, and their distributions."""
    return [
        only(index, f"budget {name}", _cells(data, index), _distributions(data, index))
        for index, name in enumerate(data.budgets)
    ]


def map_blocks(data: RetentionReportInput) -> list[Element]:
    """For each budget: the key, and the panels."""
    scale = scale_of(data)
    return [
        only(index, f"budget {name}", _key(data, scale, index), _panels(data, scale, index))
        for index, name in enumerate(data.budgets)
    ]


def scale_of(data: RetentionReportInput) -> Scale:
    """One scale for all budgets, so that they compare."""
    return Scale.of(data.tables.gate[:, list(data.rows)])


def _cells(data: RetentionReportInput, index: int) -> Element:
    means = data.thresholds(index).mean(axis=0, dtype=np.float64)
    records = np.median(data.of_gate("records", index), axis=0)
    empty = data.of_gate("empty", index).all(axis=0)
    scale, counts = scale_of(data), Scale(0.0, float(max(records.max(), 1)))

    def threshold(e: int, p: int) -> Element:
        cls = "none" if empty[e, p] else scale.level(means[e, p])
        return node("td", f"{means[e, p]:.3f}", cls=cls)

    def support(e: int, p: int) -> Element:
        cls = "none" if empty[e, p] else counts.level(records[e, p])
        return node("td", f"{records[e, p]:,.0f}", cls=cls)

    return node(
        "div",
        node("div", cell_table(data, threshold, "mean threshold over layers")),
        node("div", cell_table(data, support, "records a layer (median)")),
        cls="pair",
    )


def _distributions(data: RetentionReportInput, index: int) -> list[Element]:
    known = ~data.of_gate("empty", index)
    values = data.thresholds(index)[known]
    bare = int((~known).sum())
    note = (
        f"{bare:,} of {words.plural(known.size, 'threshold')} had no record and are the lowest of "
        "the grid (hatched): nothing is known about them."
    )
    notes = [node("p", note)] if bare else []
    if not values.size:
        return notes
    chart = bars(values, "threshold", "thresholds", f"p{index}", "distribution of thresholds")
    caption = (
        f"The {words.plural(values.size, 'threshold')} with records, one for each layer and risk "
        f"cell: median {short(np.median(values))}."
    )
    sure = sureness(
        data.of_gate("confidence", index)[known], "threshold", f"p{index}",
        "confidence of thresholds",
    )  # fmt: skip
    return [*notes, node("div", figure(chart, caption), sure, cls="pair")]


def _key(data: RetentionReportInput, scale: Scale, index: int) -> Element:
    empty = data.of_gate("empty", index)
    untried = (data.of_gate("support", index) == 0) & ~empty
    marks = []
    if empty.any():
        marks.append(node("span", node("b", cls="none"), " no record"))
    if untried.any():
        text = " records, but none of this threshold"
        marks.append(node("span", node("b", cls="untried"), text))
    return scale.key("threshold", *marks)


def _panels(data: RetentionReportInput, scale: Scale, index: int) -> Element:
    names = labels(data.tables.perplexity_edges)
    panels = [
        node("div", node("h4", f"perplexity {name}"), _panel(data, scale, index, p))
        for p, name in enumerate(names)
    ]
    return node("div", panels, cls="gates")


def _panel(data: RetentionReportInput, scale: Scale, index: int, p: int) -> Element:
    columns = [node("span", _column_name(e, data.bins[0])) for e in range(data.bins[0])]
    head = node("div", node("i"), columns)
    gate, kinds = data.thresholds(index), ("support", "records", "confidence", "empty")
    found = [data.of_gate(kind, index)[:, :, p] for kind in kinds]
    rows = [
        node("div", node("i", layer.layer_id),
             [_cell(scale, gate[at, e, p], *(x[at, e] for x in found))
              for e in range(data.bins[0])])
        for at, layer in enumerate(data.layers)
    ]  # fmt: skip
    label = f"thresholds by layer (rows) and entropy bin (columns), perplexity bin {p + 1}"
    return node("div", head, rows, cls="gate", role="img", aria_label=label)


def _column_name(index: int, count: int) -> str | None:
    """Its number from 1, or nothing where numbers would touch."""
    shown = count <= _ALL_NUMBERED or index == 0 or (index + 1) % 5 == 0
    return str(index + 1) if shown else None


def _cell(
    scale: Scale, threshold: float, support: int, records: int, confidence: float, empty: bool
) -> Element:
    if empty:
        return node("b", cls="none", title=f"{short(threshold)}: no record")
    title = f"{short(threshold)}: {support} of {records}, {percent(confidence)}"
    untried = "" if support else " untried"
    return node("b", cls=scale.level(threshold) + untried, title=title)

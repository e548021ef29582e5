"""The head table: how weights are distributed, which heads stand out, and all of them."""

from __future__ import annotations

from xml.etree.ElementTree import Element

import numpy as np

from calib_cluster.report.parts import layer_map
from calib_cluster.report.retention.data import SURE, RetentionReportInput
from calib_cluster.report.retention.scale import Scale, bars, short
from kvpolicy.report import words
from kvpolicy.report.charts import Axis, histogram
from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import figure, header, row, scroll_table

EXTREMES = 5


def meaning(data: RetentionReportInput) -> str:
    """What a weight does under this rule."""
    text = "A head's weight multiplies the scores of its tokens; 1 leaves them as they are. "
    if data.tables.rule.share == "layer":
        return text + (
            "The heads of a layer keep one common set, picked by the highest weighted score of any "
            "of them: a heavier head has more say in it."
        )
    if data.tables.rule.share != "head":
        return text
    if data.has_gate:
        return text + (
            "Every head keeps its own set, so a weight only moves its tokens past the threshold or "
            "below it."
        )
    return text + (
        "Every head keeps its own best tokens and there is no threshold, so under this rule a "
        "weight changes nothing that is kept."
    )


def distribution(data: RetentionReportInput) -> Element:
    """Histogram of all weights beside the lightest and the heaviest heads."""
    weights = data.weights()
    count = words.plural(weights.size, "head")
    chart = bars(weights, "head weight", "heads", "", "distribution of head weights")
    caption = (
        f"Weights of the {count}: {short(weights.min())} to {short(weights.max())}, median "
        f"{short(np.median(weights))}, mean {short(weights.mean(dtype=np.float64))}."
    )
    sure = sureness(data.of_heads("confidence"), "head", "", "confidence of head weights")
    notes = [node("p", text) for text in _notes(data)]
    left = node("div", figure(chart, caption), notes, sure)
    return node("div", left, node("div", _extremes(data)), cls="pair lean")


def weight_map(data: RetentionReportInput) -> list[Element]:
    """The key and every head's weight."""
    scale, layers = Scale.of(data.weights()), data.layers
    cells = layer_map(layers, lambda place, head: _cell(data, scale, place, head))
    empty = bool(data.of_heads("empty").any())
    marks = [node("span", node("b", "0.8", cls="none"), " no record")] if empty else []
    return [scale.key("weight", *marks), cells]


def sureness(values: np.ndarray, noun: str, cls: str, description: str) -> Element:
    """Histogram of confidences, 0 to 1, and how many are sure."""
    ticks = [(part / 4, f"{part * 25}%") for part in range(5)]
    axis = Axis(0.0, 1.0, ticks, "confidence that the chosen value is the best")
    chart = histogram(values, axis, f"{noun}s", cls, description, 20)
    sure = int((values >= SURE).sum())
    caption = (
        f"{sure:,} of {words.plural(values.size, noun)} "
        f"{'is' if sure == 1 else 'are'} at least {SURE:.0%} sure. 50% is a toss-up, 0 a value "
        "that no record supports."
    )
    return figure(chart, caption)


def _notes(data: RetentionReportInput) -> list[str]:
    empty = int(data.of_heads("empty").sum())
    if not empty:
        return []
    return [
        f"{words.plural(empty, 'head')} had no record and took the largest weight of the grid: "
        "nothing is known about them."
    ]


def _extremes(data: RetentionReportInput) -> list[Element]:
    weights = data.weights()
    places = np.argwhere(data.heads)
    order = np.argsort(weights, kind="stable")
    count = min(EXTREMES, len(order) // 2)
    parts = [node("h4", "The heads that stand out")]
    head = header("layer/head", "weight", "drawn", "records", "confidence")
    chosen = [*order[: -count - 1 : -1], *order[:count][::-1]] if count else order
    rows = [_extreme(data, *places[i].tolist()) for i in chosen]
    text = "The heaviest, then the lightest: the records that drew that weight, of all they had."
    return [*parts, node("p", text), scroll_table([head], rows, "compact")]


def _extreme(data: RetentionReportInput, at: int, head: int) -> Element:
    layer = data.geometry.attention_layers[at].layer_id
    records, support, sure = _support(data, at, head)
    weight = short(data.tables.head_weights[at, head])
    return row(f"{layer} / {head}", weight, f"{support:,}", f"{records:,}", sure)


def _support(data: RetentionReportInput, at: int, head: int) -> tuple[int, int, str]:
    found = data.evidence.heads
    support = int(found.support[at, head])
    sure = percent(found.confidence[at, head]) if support else words.NOTHING
    return int(found.records[at, head]), support, sure


def percent(value: float) -> str:
    """Whole per cent, never rounded to certainty."""
    if 0.995 <= value < 1:
        return ">99%"
    return f"{float(value):.0%}"


def _cell(data: RetentionReportInput, scale: Scale, place: int, head: int) -> Element:
    at = data.rows[place]
    weight = data.tables.head_weights[at, head]
    records, support, sure = _support(data, at, head)
    name = f"layer {data.layers[place].layer_id}, kv head {head}"
    none = bool(data.evidence.heads.empty[at, head])
    said = "no record" if none else f"{support:,} of {records:,} records, {sure} sure"
    text: Child = short(weight)
    cls = "none" if none else scale.level(weight)
    return node("b", text, cls=cls, title=f"{name}: weight {text}, {said}")

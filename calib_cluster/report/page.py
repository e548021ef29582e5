"""The whole page: sections in reading order, styles, and the choice between points."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from calib_cluster.report.data import ReportInput
from calib_cluster.report.heatmap import scale, share_bars, window_maps
from calib_cluster.report.margins import margin_blocks, margin_table
from calib_cluster.report.markup import node, to_bytes
from calib_cluster.report.parts import section
from calib_cluster.report.points import headline, points_meaning, points_table, residency_charts
from calib_cluster.report.provenance import evidence_table, provenance
from calib_cluster.report.style import stylesheet

# nothing may be fetched, whatever a name in the data looks like
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_report(data: ReportInput) -> bytes:
    """The report as one HTML file in UTF-8.

    It needs no network and no script, and the same input gives the same bytes.
    """
    return to_bytes(node("html", _head(data), _body(data), lang="en"))


def _head(data: ReportInput) -> Element:
    return node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("meta", http_equiv="Content-Security-Policy", content=_CONTENT_POLICY),
        node("link", rel="icon", href="data:,"),
        node("title", f"{data.model_name}: windows of {data.policy_name}"),
        node("style", stylesheet(len(data.points), len(data.levels))),
    )


def _body(data: ReportInput) -> Element:
    return node(
        "body",
        headline(data),
        section("Points", points_meaning(data), points_table(data)),
        _residency(data),
        _shares(data),
        _picker(data),
        _windows(data),
        _margins(data),
        _evidence(data),
        _provenance(data),
    )


def _picker(data: ReportInput) -> Element:
    """One radio button a point; the styles show the parts of the one that is on."""
    choices = []
    for index, point in enumerate(data.points):
        on = {"checked": ""} if index == data.default_index else {}
        button = node("input", type="radio", name="point", id=f"pick{index}", **on)
        key = node("span", cls="key")
        choices.append(node("label", button, key, node("span", point.name), cls=f"p{index}"))
    return node("nav", node("span", "Point"), choices, aria_label="point shown")


def _residency(data: ReportInput) -> Element:
    return section(
        "Residency",
        "How much of the global layers' KV cache each point keeps, exactly as its windows give it.",
        residency_charts(data),
    )


def _shares(data: ReportInput) -> Element:
    return section(
        "Windows chosen",
        "Each bar is all units of a point, from the smallest window (left) to full (right); the "
        "numbers on it count units.",
        scale(data),
        share_bars(data),
    )


def _windows(data: ReportInput) -> Element:
    return section(
        "Windows by layer and kv head",
        "One column for each attention layer, numbered on top, in execution order; one row for "
        "each kv head. The number is the window in tokens, and colours run from the smallest "
        "window to full as in the key, which also counts the units of each.",
        window_maps(data),
    )


def _margins(data: ReportInput) -> Element:
    return section(
        "Margins",
        "A unit's margin is its mean cosine at the chosen window minus tau. Room is the largest "
        "margin possible, 1 - tau. A unit gets the smallest window that reaches tau, so the next "
        "smaller one always falls short.",
        margin_table(data),
        margin_blocks(data),
    )


def _evidence(data: ReportInput) -> Element:
    return section(
        "Evidence",
        "A window is tested only by queries with more history than it holds. These are the query "
        "positions behind each mean cosine, over all prompts, for each query head: the fewer, the "
        "weaker the evidence. A window that was not tested is never chosen.",
        evidence_table(data),
    )


def _provenance(data: ReportInput) -> Element:
    return section("Provenance", "What this policy was made from.", provenance(data))

"""The whole page: sections in reading order, styles, and the choice between points."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from calib_cluster.report.data import ReportInput
from calib_cluster.report.heatmap import scale, share_bars, window_maps
from calib_cluster.report.margins import margin_blocks, margin_table
from calib_cluster.report.parts import picker
from calib_cluster.report.points import headline, points_meaning, points_table, residency_charts
from calib_cluster.report.provenance import evidence_table, provenance
from calib_cluster.report.style import stylesheet
from kvpolicy.report.markup import to_bytes
from kvpolicy.report.parts import document, section


def render_report(data: ReportInput) -> bytes:
    """The report as one HTML file in UTF-8.

    It needs no network and no script, and the same input gives the same bytes.
    """
    title = f"{data.model_name}: windows of {data.policy_name}"
    styles = stylesheet(len(data.points), len(data.levels))
    return to_bytes(document(title, styles, *_body(data)))


def _body(data: ReportInput) -> list[Element]:
    names = [point.name for point in data.points]
    return [
        headline(data),
        section("Points", points_meaning(data), points_table(data)),
        _residency(data),
        _shares(data),
        picker("Point", names, data.default_index, "point shown"),
        _windows(data),
        _margins(data),
        _evidence(data),
        _provenance(data),
    ]


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

"""Pieces that several sections use."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from calib_cluster.report.markup import Child, node


def section(title: str, meaning: Child, *parts: Child) -> Element:
    """A section: its title, what it means in a sentence or two, then its figures."""
    return node("section", node("h2", title), node("p", meaning, cls="meaning"), *parts)


def only(index: int, name: str, *parts: Child) -> Element:
    """A block shown while point ``index`` is picked (always, if the browser cannot pick)."""
    return node("div", node("h3", name, cls="point"), *parts, cls=f"only p{index}")


def scroll_table(head: Sequence[Element], rows: Sequence[Element], cls: str = "") -> Element:
    """A table that scrolls inside its own box when it is wider than the page."""
    parts = [node("thead", head)] if head else []
    table = node("table", parts, node("tbody", rows))
    return node("div", table, cls=f"scroll {cls}".strip())


def header(*cells: str) -> Element:
    """A header row."""
    return node("tr", [node("th", cell, scope="col") for cell in cells])


def row(first: Child, *cells: Child, cls: str = "") -> Element:
    """A row whose first cell names it."""
    extra = {"cls": cls} if cls else {}
    return node("tr", node("th", first, scope="row"), [node("td", c) for c in cells], **extra)


def figure(chart: Element, caption: Child) -> Element:
    """A chart and the sentence that says what it shows."""
    return node("figure", chart, node("figcaption", caption))

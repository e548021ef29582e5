"""Pieces that every page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from kvpolicy.report.markup import Child, node

# nothing may be fetched, whatever a name in the data looks like
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, styles: str, *parts: Child) -> Element:
    """A whole page, its styles inside it."""
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("meta", http_equiv="Content-Security-Policy", content=_CONTENT_POLICY),
        node("link", rel="icon", href="data:,"),
        node("title", title),
        node("style", styles),
    )
    return node("html", head, node("body", *parts), lang="en")


def section(title: str, meaning: Child, *parts: Child) -> Element:
    """A section: its title, what it means in a sentence or two, then its figures."""
    return node("section", node("h2", title), node("p", meaning, cls="meaning"), *parts)


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


def definitions(facts: Sequence[tuple[str, Child]]) -> Element:
    """Names and what they are."""
    rows = [node("div", node("dt", name), node("dd", value)) for name, value in facts]
    return node("dl", rows)

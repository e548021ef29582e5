"""Pieces that several sections use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from calib_cluster.report.markup import Child, node
from kvpolicy.geometry import LayerGeometry

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


def picker(title: str, names: Sequence[str], chosen: int, label: str) -> Element:
    """One radio button a name; the styles show the parts (``only``) of the one that is on."""
    choices = []
    for index, name in enumerate(names):
        on = {"checked": ""} if index == chosen else {}
        button = node("input", type="radio", name="point", id=f"pick{index}", **on)
        key = node("span", cls="key")
        choices.append(node("label", button, key, node("span", name), cls=f"p{index}"))
    return node("nav", node("span", title), choices, aria_label=label)


def layer_map(
    layers: Sequence[LayerGeometry], cell: Callable[[int, int], Element], queries: bool = False
) -> Element:
    """A column for each layer with its id on top, a cell for each kv head (or query head).

    ``cell(place, head)`` of the layer at that place in ``layers``.
    """

    def count(layer: LayerGeometry) -> int:
        return layer.num_q_heads if queries else layer.num_kv_heads

    strips = [
        node(
            "div", node("i", layer.layer_id), [cell(row, h) for h in range(count(layer))],
            role="listitem",
        )
        for row, layer in enumerate(layers)
    ]  # fmt: skip
    return node("div", node("div", strips, cls="map", role="list"), cls="box")


def section(title: str, meaning: Child, *parts: Child) -> Element:
    """A section: its title, what it means in a sentence or two, then its figures."""
    return node("section", node("h2", title), node("p", meaning, cls="meaning"), *parts)


def only(index: int, name: str, *parts: Child) -> Element:
    """A block shown while ``index`` is picked (always, if the browser cannot pick)."""
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


def definitions(facts: Sequence[tuple[str, Child]]) -> Element:
    """Names and what they are."""
    rows = [node("div", node("dt", name), node("dd", value)) for name, value in facts]
    return node("dl", rows)

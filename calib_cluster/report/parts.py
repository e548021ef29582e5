"""Pieces that several sections of a policy's report use, beyond those of every page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from kvpolicy.geometry import LayerGeometry
from kvpolicy.report.markup import Child, node


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


def only(index: int, name: str, *parts: Child) -> Element:
    """A block shown while ``index`` is picked (always, if the browser cannot pick)."""
    return node("div", node("h3", name, cls="point"), *parts, cls=f"only p{index}")

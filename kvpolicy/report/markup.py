"""Build HTML as a tree, so that text is always escaped and tags always close."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Child = Element | str | int | None | Iterable["Child"]

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def node(tag: str, *children: Child, **attributes: str | float) -> Element:
    """An element with text and elements inside.

    ``cls`` is the class; underscores in names become hyphens (``stroke_width``).
    """
    element = Element(tag)
    for name, value in attributes.items():
        key = "class" if name == "cls" else name.strip("_").replace("_", "-")
        element.set(key, _clean(value if isinstance(value, str) else number(value)))
    _append(element, children)
    return element


def number(value: float) -> str:
    """Shortest text of a coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def to_bytes(root: Element) -> bytes:
    """The document in UTF-8; characters that have no UTF-8 form become ``?``."""
    text = ElementTree.tostring(root, encoding="unicode", method="html")
    return b"<!DOCTYPE html>\n" + text.encode("utf-8", "replace") + b"\n"


def _append(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element):
            parent.append(child)
        elif isinstance(child, str | int):
            _append_text(parent, _clean(str(child)))
        else:
            _append(parent, child)


def _append_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def _clean(text: str) -> str:
    return _CONTROL.sub("�", text)

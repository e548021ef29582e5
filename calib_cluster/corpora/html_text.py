"""Manual pages in HTML as the plain text that a reader sees."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID_TAGS = "area br col hr img input link meta wbr"
BLOCK_TAGS = "address blockquote body dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table ul"
VOID = frozenset(VOID_TAGS.split())
BLOCKS = frozenset(BLOCK_TAGS.split())
HIDDEN_TAGS = frozenset({"head", "script", "style"})
HIDDEN_CLASSES = frozenset({"navheader", "navfooter", "toc", "list-of-tables"})
CELLS = frozenset({"td", "th"})


class _Reader(HTMLParser):
    """Collects visible text; blocks are set apart by blank lines, ``pre`` keeps its spaces."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0  # open tags since, and counting, the hidden one
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            if tag == "br" and not self._hidden:
                self.parts.append("\n")
            return
        classes = (dict(attrs).get("class") or "").split()
        if self._hidden or tag in HIDDEN_TAGS or HIDDEN_CLASSES.intersection(classes):
            self._hidden += 1
            return
        self._pre += tag == "pre"
        self._border(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if self._hidden:
            self._hidden -= 1
            return
        self._pre -= tag == "pre"
        self._border(tag)
        if tag == "tr":
            self.parts.append("\n")
        elif tag in CELLS:
            self.parts.append("  ")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if self.parts and self.parts[-1].endswith("\n"):
                data = data.lstrip(" ")
        if data:
            self.parts.append(data)

    def _border(self, tag: str) -> None:
        if tag in BLOCKS:
            self.parts.append("\n\n")


def html_text(html: str) -> str:
    """Visible text of a page: no navigation, no tables of contents, no runs of blank lines."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    text = "".join(reader.parts).replace("\xa0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()

"""The host's copy of what the prefix tree keeps: which logical page stands for which tokens.

SGLang keeps a node's slots on the device, and reading them back waits for the forward that is
running. Which page the tree keeps for some tokens follows from what was inserted and what was
freed, and the host sees both.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence

Place = tuple[Hashable, bytes]
"""What comes before a page (its predecessor's id, or a namespace) and the page's tokens."""


class HostTree:
    """Follows the inserts and frees of SGLang's radix tree, page by page.

    Args:
        page_size: tokens a page; what is shorter is not kept by the tree either.

    A *namespace* is what SGLang keeps apart though the tokens agree: ``extra_key``, ``cache_salt``.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.clear()

    def __len__(self) -> int:
        return len(self._place)

    def clear(self) -> None:
        """The tree was emptied."""
        self._page: dict[Place, int] = {}
        self._place: dict[int, Place] = {}

    def path(self, namespace: Hashable, tokens: array) -> list[int]:
        """Pages that the tree keeps for the longest known beginning of ``tokens``, in order."""
        pages: list[int] = []
        before = namespace
        for own in self._pieces(tokens):
            page = self._page.get((before, own))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def insert(self, namespace: Hashable, tokens: array, pages: Sequence[int]) -> list[int]:
        """The tree now keeps ``tokens``, which ``pages`` [tokens // page_size] were offered for.

        Returns:
            the pages that it keeps: where it had the same tokens already, those it had.
        """
        kept: list[int] = []
        before = namespace
        for own, offered in zip(self._pieces(tokens), pages, strict=True):
            place = (before, own)
            page = self._page.setdefault(place, offered)
            if page == offered:
                self._place[page] = place
            kept.append(page)
            before = page
        return kept

    def forget(self, pages: Sequence[int]) -> None:
        """These pages were freed; those that the tree did not keep are passed over."""
        for page in pages:
            place = self._place.pop(page, None)
            if place is not None:
                del self._page[place]

    def _pieces(self, tokens: array) -> Iterator[bytes]:
        """The tokens of every whole page."""
        size = self._page_size * tokens.itemsize
        raw = tokens.tobytes()
        return (raw[at : at + size] for at in range(0, len(raw) - size + 1, size))

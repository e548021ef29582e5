"""Which logical pages SGLang takes, keeps and frees, known on the host without asking the device.

SGLang keeps slots and its free list on the device. Reading them back waits for the forward that is
running, so under overlap scheduling every read costs a step its overlap. What the host cannot know
(pages that an eviction chose, or that an insert found twice) is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine_patches.counters import Counters
from engine_patches.free_list import HostFreeList
from engine_patches.host_tree import HostTree


class HostPagesError(RuntimeError):
    """The host's copy differs from the device's: a bug, never a user's fault."""


class HostPages:
    """The free list and the prefix tree's pages, and what is about to be freed.

    Args:
        page_size: tokens a page.
        num_pages: logical pages, 1 to ``num_pages``.
        sorted_later: as ``HostFreeList``.
        counters: ``page_reads`` counts what had to be read from the device.
        compare: whether to read what is known as well, and compare: on a CPU that waits for nobody.
    """

    def __init__(
        self, page_size: int, num_pages: int, sorted_later: bool, counters: Counters, compare: bool
    ) -> None:
        self._page_size = page_size
        self._counters, self._compare = counters, compare
        self.free = HostFreeList(num_pages, sorted_later)
        self.tree = HostTree(page_size)
        self._foreseen: list[list[int]] = []
        self._told: list[list[int] | None] = []

    # -- pages that are freed ------------------------------------------------------------------

    def foresee(self, segments: Sequence[list[int]]) -> None:
        """The next ``tell`` calls are of these pages, in this order."""
        self._foreseen = list(segments)

    def tell(self, count: int) -> None:
        """``count`` pages are on their way to ``freed``, by themselves or in a group."""
        known = self._foreseen.pop(0) if self._foreseen else None
        self._told.append(known if known is not None and len(known) == count else None)

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Inside, ``freed`` is of pages that nobody told of."""
        told, self._told = self._told, []
        try:
            yield
        finally:
            self._told = told

    def freed(self, page_ids: Sequence[torch.Tensor]) -> list[int]:
        """The pages, in order. Raises HostPagesError."""
        told, self._told = self._told, []
        known = None
        if told and all(part is not None for part in told):
            known = [page for part in told for page in part]
            if len(known) != (count := sum(ids.numel() for ids in page_ids)):
                raise HostPagesError(f"the host expected {len(known)} freed pages, not {count}")
        return self._known_or_read(known, lambda: torch.cat(tuple(page_ids)))

    def give(self, freed: Sequence[int]) -> None:
        """They are free now."""
        self.free.give([freed])
        self.tree.forget(freed)

    # -- pages of the prefix tree --------------------------------------------------------------

    def pages(
        self, namespace: Hashable, tokens: array, slots: Callable[[], torch.Tensor]
    ) -> list[int]:
        """Pages of ``tokens``, a path of the tree whose slots [tokens] are ``slots()``.

        Raises HostPagesError.
        """
        known = self.tree.path(namespace, tokens)
        if len(known) < len(tokens) // self._page_size:
            known = None
        return self._known_or_read(known, lambda: self._pages_of(slots()))

    def inserted(
        self, namespace: Hashable, tokens: array, own: Sequence[int], row: torch.Tensor
    ) -> list[int]:
        """The tree's pages for ``tokens``, just inserted with a request's ``own`` pages.

        ``row`` [tokens] are the request's slots, by now the tree's. Raises HostPagesError.
        """
        known = self.tree.insert(namespace, tokens, own)
        return self._known_or_read(known, lambda: self._pages_of(row))

    # -- internals -----------------------------------------------------------------------------

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots[:: self._page_size] // self._page_size

    def _known_or_read(self, known: list[int] | None, ask: Callable[[], torch.Tensor]) -> list[int]:
        if known is None:
            self._counters.page_reads += 1
            return ask().tolist()
        if known and self._compare and (found := ask().tolist()) != known:
            raise HostPagesError(f"the host has pages {known}, the device {found}")
        return known

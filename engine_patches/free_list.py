"""The host's copy of SGLang's list of free logical pages.

SGLang keeps that list on the device. Which pages an allocation took is decided by the list's order
alone, so a copy on the host knows it too, and a step never has to wait for the device to tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class HostFreeList:
    """Follows ``PagedTokenToKVPoolAllocator.free_pages`` and its staged pages.

    Args:
        num_pages: logical pages, 1 to ``num_pages``.
        sorted_later: whether freed pages wait, unsorted, until an allocation runs short (SGLang's
            ``need_sort``).
    """

    def __init__(self, num_pages: int, sorted_later: bool) -> None:
        self._sorted_later = sorted_later
        self.pages = np.arange(1, num_pages + 1, dtype=np.int64)
        self._staged: list[np.ndarray] = []

    def take(self, left: int) -> list[int]:
        """Pages that an allocation took from the front, now that ``left`` are left."""
        taken = self.pages[: len(self.pages) - left]
        self.pages = self.pages[len(taken) :]
        return taken.tolist()

    def give(self, parts: Sequence[Sequence[int]]) -> None:
        """Pages were freed, in this order."""
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        if self._sorted_later:
            self._staged += arrays
        else:
            self.pages = np.concatenate([*arrays, self.pages])

    def merge(self) -> None:
        """Staged pages were sorted in."""
        if self._staged:
            self.pages = np.sort(np.concatenate([self.pages, *self._staged]))
            self._staged = []

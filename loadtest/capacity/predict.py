"""What one server's memory takes, by ``kvpolicy``'s formulas: known before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpolicy.geometry import ModelGeometry
from kvpolicy.residency import ceil_div, frozen_pages, held_pages, peak_length, request_pages
from kvpolicy.windows import Level
from loadtest.capacity.boundary import boundary
from loadtest.servers import PAGE_SIZE

Kept = int | np.ndarray
"""Prompt tokens that stay once a prompt is frozen: of each freezing unit, or int64 [units]."""

INPUT_RESERVE = 7
"""Tokens below the longest request at which SGLang refuses a prompt (its scheduler's own slack)."""


@dataclass(frozen=True)
class Need:
    """Pages of one request.

    ``new`` must be free for it to be admitted; it holds ``peak`` at most, and ``decoding`` from its
    first token on. A prompt that is frozen takes more while it is read (all of it and the kept copy
    beside it) than after. Stock SGLang admits only with more than a page to spare.
    """

    new: int
    decoding: int
    peak: int


@dataclass(frozen=True)
class Store:
    """Where one server keeps K and V.

    Args:
        levels: of the served windows; all units without a window for stock SGLang.
        pages: that requests can hold together, each of one kv head.
        page_bytes: bytes of a page, K and V.
        kept: tokens that stay of a frozen prompt of the given length, None if all do.
        spare: tokens beyond a request's own that must be free when it is admitted.
    """

    levels: tuple[Level, ...]
    pages: int
    page_bytes: int
    kept: Callable[[int], Kept | None] | None = None
    spare: int = 0

    def need(self, prompt: int, output: int) -> Need:
        """Pages for a request of ``prompt`` and ``output`` tokens."""
        top = peak_length(prompt + output, PAGE_SIZE)
        kept = None if self.kept is None else self.kept(prompt)
        if kept is None:
            pages = request_pages(self.levels, top, PAGE_SIZE)
            new = request_pages(self.levels, prompt + output + self.spare, PAGE_SIZE)
            return Need(new if self.spare else pages, pages, pages)
        decoding = frozen_pages(
            self.levels, prompt, max(0, top - prompt), _budgets(kept), PAGE_SIZE
        )
        whole = max(self._whole(prompt, top, kept), decoding)
        return Need(whole, decoding, whole)

    def _whole(self, prompt: int, top: int, kept: Kept) -> int:
        """Pages while the prompt is read: all of it, and at the freeze the kept copy beside it."""
        longest = max(ceil_div(prompt, PAGE_SIZE), ceil_div(top, PAGE_SIZE) - prompt // PAGE_SIZE)
        full = sum(len(level.units) for level in self.levels if level.is_full)
        copy = np.broadcast_to(-(-np.asarray(kept) // PAGE_SIZE), full).sum()
        windowed = sum(
            len(level.units) * held_pages(level, top, PAGE_SIZE)
            for level in self.levels
            if not level.is_full
        )
        return windowed + full * longest + int(copy)

    def at_once(self, prompt: int, output: int) -> int:
        """Requests of this size that decode together: the last still had to fit as a new one."""
        need = self.need(prompt, output)
        if self.pages < need.new:
            return 0
        return 1 + (self.pages - need.new) // need.decoding

    def longest(self, output: int, limit: int) -> int:
        """Longest prompt, up to ``limit`` tokens, that is admitted alone; 0 if none is."""
        return boundary(lambda prompt: self.at_once(prompt, output) > 0, 0, max(0, limit), limit)

    def decoding_bytes(self, prompt: int, output: int) -> int:
        """Most bytes of K and V of one request while it decodes."""
        return self.need(prompt, output).decoding * self.page_bytes

    def peak_bytes(self, prompt: int, output: int) -> int:
        """Most bytes of K and V of one request in its life."""
        return self.need(prompt, output).peak * self.page_bytes


def _budgets(kept: Kept) -> int | list[int]:
    return kept if isinstance(kept, int) else [int(tokens) for tokens in kept]


def page_bytes(geometry: ModelGeometry) -> int:
    """Bytes of one page: K and V of ``PAGE_SIZE`` tokens of one kv head."""
    return geometry.bytes_per_token() * PAGE_SIZE // geometry.num_units


def dense_store(levels: tuple[Level, ...], geometry: ModelGeometry, tokens: int) -> Store:
    """Stock SGLang with room for ``tokens`` tokens."""
    pages = tokens // PAGE_SIZE * geometry.num_units
    return Store(levels, pages, page_bytes(geometry), spare=PAGE_SIZE + 1)

"""When a prefix-cache hit may be used: every level must still hold what its window reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_patches.ledger import PageLedger
from kvpolicy.windows import Level


def sink_pages(level: Level, page_size: int) -> int:
    """Leading pages that a windowed unit of ``level`` keeps for its sinks."""
    return 0 if level.is_full else -(-level.sinks // page_size)


def first_read_page(level: Level, length: int, page_size: int) -> int:
    """First page that the query at position ``length`` reads through its window."""
    return 0 if level.is_full else max(0, length - level.window + 1) // page_size


def longest_valid_hit(ledger: PageLedger, pages: Sequence[int], page_size: int) -> int:
    """Longest usable prefix of a cached path, in pages.

    Args:
        ledger: current ownership.
        pages: logical page ids of the matched path, in order; the match covers whole pages.
        page_size: tokens a page.

    Returns:
        The largest n <= len(pages) such that, at length n * page_size, every level has live pages
        for its sinks and for the window of the next query (design section 3); 0 if none.
    """
    count = len(pages)
    if not count:
        return 0
    path = np.asarray(pages, dtype=np.int64)
    ends = np.arange(1, count + 1)
    valid = np.ones(count, dtype=bool)
    for k, level in enumerate(ledger.levels):
        live = ledger.live[k, path]
        first = np.array([first_read_page(level, n * page_size, page_size) for n in ends])
        dead_upto = np.concatenate([[0], np.cumsum(~live)])
        valid &= dead_upto[ends] == dead_upto[np.minimum(first, ends)]
        sinks = np.minimum(sink_pages(level, page_size), ends)
        valid &= dead_upto[sinks] == 0
    hits = np.flatnonzero(valid)
    return int(ends[hits[-1]]) if len(hits) else 0

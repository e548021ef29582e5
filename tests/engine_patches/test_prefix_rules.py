"""When a prefix hit is valid: the array rule against one that looks at every token it reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.ledger import PageLedger
from engine_patches.prefix import first_read_page, longest_valid_hit, sink_pages
from kvpolicy.windows import FULL, Level

stable = settings(deadline=None, derandomize=True, database=None)
windows = st.sampled_from([1, 2, 4, 5, 15, 16, 17, 24, 33, 40, 64, FULL])
sinks = st.sampled_from([0, 1, 4, 16, 17])


def keys_read(level: Level, query: int) -> set[int]:
    return {t for t in range(query) if t < level.sinks or t > query - level.window}


def longest_hit_by_tokens(levels, live: np.ndarray, size: int) -> int:
    """Largest hit after which the next query finds every key; sink pages are kept whole."""
    for count in range(live.shape[1], 0, -1):
        if all(
            live[k, t // size]
            for k, level in enumerate(levels)
            for t in keys_read(level, count * size)
        ):
            return count
    return 0


@st.composite
def cases(draw):
    count = draw(st.integers(1, 3))
    levels = []
    for k in range(count):
        window = draw(windows)
        levels.append(Level(k, window, 0 if window == FULL else draw(sinks), (k,)))
    size, pages = draw(st.sampled_from([1, 4, 16])), draw(st.integers(0, 10))
    rarely_dead = st.lists(st.integers(0, 7).map(bool), min_size=pages, max_size=pages)
    live = np.array([draw(rarely_dead) for _ in range(count)], dtype=bool).reshape(count, pages)
    path = draw(st.permutations(range(1, pages + 1)))
    return levels, live, size, list(path)


@settings(stable, max_examples=1200)
@given(cases())
def test_longest_valid_hit(case):
    levels, live, size, path = case
    ledger = PageLedger(levels, num_pages=64, num_logical_pages=12)
    for k in range(len(levels)):
        ledger.bind(k, [page for page, alive in zip(path, live[k], strict=True) if alive])
    assert longest_valid_hit(ledger, path, size) == longest_hit_by_tokens(levels, live, size)


@settings(stable, max_examples=400)
@given(windows, sinks, st.integers(0, 130), st.sampled_from([1, 4, 16]))
def test_first_read_page_and_sink_pages(window, sinks, query, size):
    level = Level(0, window, 0 if window == FULL else sinks, (0,))
    in_window = {t // size for t in range(query + 1) if t > query - window}
    assert first_read_page(level, query, size) == min(in_window)
    assert sink_pages(level, size) == len({t // size for t in range(level.sinks)})


@pytest.mark.parametrize(
    ("window", "sinks", "dead", "hit"),
    [
        (16, 0, [], 4),
        (16, 0, [3], 3),  # the last page is read, the one before it is a page further than needed
        (16, 0, [0, 1, 2], 4),
        (17, 0, [2], 4),  # the next query at 64 reads 48..64
        (18, 0, [2], 2),
        (18, 0, [1, 2], 1),
        (1, 0, [0, 1, 2, 3], 4),  # a query that reads only itself needs no page
        (16, 4, [0], 0),
        (16, 17, [1], 1),
        (FULL, 0, [2], 2),
    ],
)
def test_hits_by_hand(window, sinks, dead, hit):
    ledger = PageLedger([Level(0, window, sinks, (0,))], num_pages=9, num_logical_pages=9)
    path = [5, 2, 7, 3]
    ledger.bind(0, [page for i, page in enumerate(path) if i not in dead])
    assert longest_valid_hit(ledger, path, 16) == hit


def test_nothing_cached_is_no_hit():
    ledger = PageLedger([Level(0, 16, 0, (0,))], num_pages=9, num_logical_pages=9)
    assert longest_valid_hit(ledger, [], 16) == 0
    assert longest_valid_hit(ledger, [1, 2], 16) == 0


def test_every_level_must_agree():
    levels = [Level(0, 16, 0, (0,)), Level(1, 32, 0, (1,))]
    ledger = PageLedger(levels, num_pages=9, num_logical_pages=9)
    ledger.bind(0, [1, 2, 4])
    ledger.bind(1, [1, 2, 3])
    assert longest_valid_hit(ledger, [1, 2, 3, 4], 16) == 2

"""Page and residency formulas against brute-force sets of tokens and pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import PolicyError
from kvpolicy.residency import (
    held_pages,
    page_residency,
    peak_bytes,
    peak_length,
    peak_pages,
    request_bytes,
    request_pages,
    residency,
    retained_tokens,
)
from kvpolicy.windows import FULL, Level, WindowPolicy

page_sizes = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def levels_of_a_policy(draw):
    """Up to four levels; sinks are common to windowed levels or 0, as policies make them."""
    sinks = draw(st.integers(0, 40))
    keys = draw(
        st.lists(
            st.tuples(st.integers(1, 90) | st.just(FULL), st.booleans()),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    counts = draw(st.lists(st.integers(1, 5), min_size=len(keys), max_size=len(keys)))
    return [
        Level(i, window, 0 if window == FULL or native else sinks, tuple(range(count)))
        for i, ((window, native), count) in enumerate(zip(keys, counts, strict=True))
    ]


def keys_read(level: Level, query: int) -> set[int]:
    """The attention rule, as a set of positions."""
    return {k for k in range(query + 1) if k < level.sinks or k > query - level.window}


def pages_by_tokens(level: Level, length: int, page: int, slack: int) -> set[int]:
    """Pages touched by the sinks and by the window plus its slack, token by token."""
    reach = FULL if level.window == FULL else level.window + slack * page
    tokens = {t for t in range(length) if t < level.sinks or t >= length - reach}
    return {t // page for t in tokens}


@settings(max_examples=600)
@given(levels_of_a_policy(), st.integers(0, 260), page_sizes, st.integers(0, 2))
def test_held_pages_equals_the_set_of_pages(levels, length, page, slack):
    for level in levels:
        expected = len(pages_by_tokens(level, length, page, slack))
        assert held_pages(level, length, page, slack) == expected
    total = sum(len(k.units) * len(pages_by_tokens(k, length, page, slack)) for k in levels)
    assert request_pages(levels, length, page, slack) == total


@settings(max_examples=300)
@given(levels_of_a_policy(), st.integers(1, 200), page_sizes, st.integers(0, 2))
def test_held_pages_contain_every_key_that_is_read(levels, length, page, slack):
    for level in levels:
        held = pages_by_tokens(level, length, page, slack)
        assert {k // page for k in keys_read(level, length - 1)} <= held
        next_reads = keys_read(level, length) - {length}  # the next token's own key is new
        assert {k // page for k in next_reads} <= held


@settings(max_examples=300)
@given(levels_of_a_policy(), st.integers(1, 220), st.integers(0, 60), page_sizes)
def test_peak_is_the_largest_over_every_length(levels, prompt, max_new, page):
    everything = [request_pages(levels, s, page) for s in range(1, prompt + max_new + 1)]
    assert peak_pages(levels, prompt, max_new, page) == max(everything)
    at = peak_length(prompt + max_new, page)
    assert everything[at - 1] == max(everything)


@settings(max_examples=300)
@given(
    levels_of_a_policy(), st.integers(1, 220), st.integers(0, 40), page_sizes, st.integers(1, 70)
)
def test_peak_of_a_chunked_run_is_the_largest_over_visited_lengths(
    levels, prompt, max_new, page, chunk
):
    visited = [*range(chunk, prompt, chunk), prompt, *range(prompt + 1, prompt + max_new + 1)]
    expected = max(request_pages(levels, s, page) for s in visited)
    peak = peak_pages(levels, prompt, max_new, page, chunk=chunk)
    assert peak == expected <= peak_pages(levels, prompt, max_new, page)


@settings(max_examples=300)
@given(levels_of_a_policy(), st.integers(1, 300))
def test_retained_tokens_equals_the_attention_rule(levels, context):
    for level in levels:
        assert retained_tokens(level, context) == len(keys_read(level, context - 1))


def test_held_pages_by_hand():
    level = Level(0, 100, 4, (0,))
    # w' = 116: at 117 tokens the window starts at token 1, still in page 0: no extra sink page
    assert held_pages(level, 117, 16) == 8
    # at 132 it starts at token 16: pages 1..8, and page 0 for the sinks
    assert held_pages(level, 132, 16) == 9
    # at 1000: window from token 884 = page 55, pages 55..62, and the sink page
    assert held_pages(level, 1000, 16) == 9
    assert held_pages(Level(0, FULL, 0, (0,)), 1000, 16) == 63
    assert held_pages(level, 0, 16) == 0


def test_sinks_of_several_pages_are_not_counted_twice():
    level = Level(0, 16, 40, (0,))  # three sink pages
    assert held_pages(level, 48, 16) == 3  # window and slack reach page 1: pages 0, 1, 2
    assert held_pages(level, 1600, 16) == 3 + 2


@pytest.mark.parametrize("length, page, slack", [(-1, 16, 1), (5, 0, 1), (5, 16, -1)])
def test_held_pages_refuses_impossible_arguments(length, page, slack):
    with pytest.raises(PolicyError, match="need length"):
        held_pages(Level(0, 8, 0, (0,)), length, page, slack)


@pytest.mark.parametrize("prompt, new, chunk", [(0, 1, None), (1, -1, None), (1, 1, 0)])
def test_peak_refuses_impossible_arguments(prompt, new, chunk):
    with pytest.raises(PolicyError, match="need prompt"):
        peak_pages([Level(0, 8, 0, (0,))], prompt, new, 16, chunk)


def test_bytes_follow_units_and_pages(geometry):
    geom = geometry("gemma3")
    levels = WindowPolicy.native(geom).levels()
    # 3 global units of 125 pages; 15 native ones of 512 + 16 tokens = pages 92..124
    pages = 3 * 125 + 15 * 33
    assert request_pages(levels, 2000) == pages
    assert request_bytes(levels, geom, 2000) == pages * 16 * (256 + 256) * 2
    assert peak_bytes(levels, geom, 2000) == request_bytes(levels, geom, 1985)


def test_residency_counts_global_units_only(geometry):
    geom = geometry("gemma3")
    assert residency(WindowPolicy.native(geom), geom, 8192) == 1.0
    assert residency(WindowPolicy.uniform(geom, 1020, 4), geom, 8192) == 1024 / 8192
    assert residency(WindowPolicy.uniform(geom, 1020, 4), geom, 1000) == 1.0
    assert residency(WindowPolicy.uniform(geom, 1020, 4), geom, 1022) == 1.0


def test_residency_of_a_mixed_policy_by_hand(geometry):
    geom = geometry("smollm2")
    windows = np.full((30, 3), FULL, dtype=np.int32)
    windows[:, 0] = 128
    windows[:, 1] = 512
    policy = WindowPolicy(geom, windows, 4)
    expected = (132 + 516 + 2048) / (3 * 2048)
    assert residency(policy, geom, 2048) == pytest.approx(expected, abs=1e-12)
    # pages: 128 + 16 = 9 pages + sink; 512 + 16 = 33 + sink; 128
    assert page_residency(policy, geom, 2048) == pytest.approx((10 + 34 + 128) / 384, abs=1e-12)


def test_residency_of_a_model_without_global_layers_is_one(geometry):
    geom = geometry("mistral")
    assert residency(WindowPolicy.native(geom), geom, 30000) == 1.0


def test_residency_refuses_an_empty_context(geometry):
    geom = geometry("smollm2")
    with pytest.raises(PolicyError, match="at least 1 token"):
        residency(WindowPolicy.full(geom), geom, 0)

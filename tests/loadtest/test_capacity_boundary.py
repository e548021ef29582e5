"""The search behind every largest batch and longest prompt."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.capacity.boundary import boundary


@st.composite
def searches(draw) -> tuple[int, int, int, int]:
    """(low, high, true boundary, guess); the guess may lie anywhere."""
    low = draw(st.integers(0, 50))
    high = low + draw(st.integers(0, 5000))
    return low, high, draw(st.integers(low, high)), draw(st.integers(-10, 6000))


@given(searches())
def test_it_finds_the_boundary_of_any_monotone_yes_within_its_bounds(search):
    low, high, true, guess = search
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= true

    assert boundary(fits, low, high, guess) == true
    assert len(asked) == len(set(asked)), "nothing is measured twice"
    assert all(low < n <= high for n in asked)
    off = abs(min(max(guess, low + 1), high) - true)
    assert len(asked) <= 2 * math.log2(off + 1) + 3


@pytest.mark.parametrize("true", [1, 9, 10])
def test_a_right_guess_costs_two_probes_at_most(true):
    asked: list[int] = []
    found = boundary(lambda n: bool(asked.append(n)) or n <= true, 0, 10, true)
    assert found == true and len(asked) <= 2


def test_an_empty_range_is_refused_and_a_single_one_asks_nothing():
    with pytest.raises(ValueError, match=r"nothing lies in 3\.\.2"):
        boundary(lambda n: True, 3, 2, 3)
    assert boundary(lambda n: pytest.fail("asked"), 4, 4, 9) == 4

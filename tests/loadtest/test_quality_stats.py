"""How far answers agree."""

from __future__ import annotations

from loadtest.quality_stats import agreement


def test_agreement_counts_tokens_before_the_first_other_one():
    assert agreement([[1, 2, 3], [1, 9, 3], [4, 5, 6]], [[1, 2, 3], [1, 2, 3], [7, 5, 6]]) == 4 / 9

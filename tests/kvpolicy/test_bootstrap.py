"""The bootstrap against full enumeration, theory and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from kvpolicy import bootstrap
from kvpolicy.bootstrap import paired_interval

OURS = [3.1, 2.9, 4.0, 3.3, 2.2]
THEIRS = [3.0, 3.0, 3.1, 3.2, 2.5]


def test_it_is_the_quantiles_of_all_possible_resamples():
    differences = np.subtract(OURS, THEIRS)
    draws = itertools.product(differences, repeat=len(differences))
    every = np.array([np.mean(draw) for draw in draws])
    got = paired_interval(OURS, THEIRS, resamples=200_000, seed=1)
    assert got.n == 5 and got.mean == pytest.approx(differences.mean())
    for bound, level in ((got.low, 0.025), (got.high, 0.975)):
        below, up_to = (every < bound - 1e-9).mean(), (every < bound + 1e-9).mean()
        assert below < level + 0.002 and up_to > level - 0.002


def test_it_is_scipys_percentile_bootstrap():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1.0, 0.5, 40), rng.normal(0.9, 0.5, 40)
    expected = scipy.stats.bootstrap(
        (ours, theirs), lambda a, b, axis: (a - b).mean(axis=axis), paired=True, vectorized=True,
        n_resamples=50_000, method="percentile", rng=1,
    ).confidence_interval  # fmt: skip
    got = paired_interval(ours, theirs, resamples=50_000, seed=2)
    assert [got.low, got.high] == pytest.approx([expected.low, expected.high], abs=0.01)


def test_it_has_the_width_of_the_normal_law_and_ignores_what_pairs_share():
    rng = np.random.default_rng(3)
    shared, noise = rng.normal(0, 100, 400), rng.normal(0.2, 0.1, 400)
    got = paired_interval(shared + noise, shared, resamples=20_000, seed=0)
    half = 1.96 * noise.std() / 20
    assert got.low == pytest.approx(noise.mean() - half, abs=0.1 * half)
    assert got.high == pytest.approx(noise.mean() + half, abs=0.1 * half)


def test_equal_differences_have_no_width_and_the_seed_decides():
    assert paired_interval([1, 1, 0], [0, 0, -1], 500, 0) == bootstrap.Interval(3, 1, 1, 1)
    first, again, other = (paired_interval(OURS, THEIRS, 500, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_blocks_of_resamples_do_not_change_the_law(monkeypatch):
    monkeypatch.setattr(bootstrap, "_BLOCK", 7 * len(OURS))
    means = bootstrap._resampled_means(np.array(OURS), 1000, np.random.default_rng(0))
    assert means.shape == (1000,) and abs(means.mean() - np.mean(OURS)) < 0.05


def test_no_pairs_and_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="no pairs"):
        paired_interval([], [], 100, 0)
    with pytest.raises(ValueError, match="shapes"):
        paired_interval([1.0, 2.0], [1.0, 2.0, 3.0], 100, 0)

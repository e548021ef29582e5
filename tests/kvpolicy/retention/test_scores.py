"""Ratio, pooling, alpha, utility, layer maximum, risks and bins against the literal equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.retention import (
    RetentionRule,
    alpha,
    bin_of,
    layer_max,
    pooled,
    semantic_risk,
    structural_risk,
    utility,
    value_ratio,
)
from tests.kvpolicy.retention import literal

SCOPES = ("global", "layer", "head")


def tensor(seed: int, units: int, length: int) -> torch.Tensor:
    """Heavy-tailed positive numbers, float32 [units, length]."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.lognormal(sigma=2, size=(units, length)).astype(np.float32))


SIZES = st.tuples(st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 17))


def close(mine: torch.Tensor, reference) -> None:
    assert mine.dtype == torch.float32
    np.testing.assert_allclose(mine.numpy(), np.asarray(reference), rtol=3e-5, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES)
def test_value_ratio(sizes):
    norms = tensor(*sizes)
    rho = value_ratio(norms)
    close(rho, literal.value_ratio(norms.numpy()))
    torch.testing.assert_close(rho.mean(1), torch.ones(len(norms)))


def test_value_ratio_of_zero_values_is_zero():
    assert (value_ratio(torch.zeros(2, 3)) == 0).all()


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, kernel=st.sampled_from((1, 3, 5, 9, 31)))
def test_pooling_averages_only_what_exists(sizes, kernel):
    mass = tensor(*sizes)
    close(pooled(mass, kernel), [literal.pooled(row, kernel) for row in mass.double().tolist()])


@settings(deadline=None, max_examples=60)
@given(
    sizes=SIZES,
    scope=st.sampled_from(SCOPES),
    kernel=st.sampled_from((1, 5)),
    observe=st.integers(1, 20),
    data=st.data(),
)
def test_alpha_and_utility(sizes, scope, kernel, observe, data):
    mass, norms = tensor(*sizes), tensor(sizes[0] + 1, *sizes[1:])
    units, length = mass.shape
    # neither contiguous nor starting at 0: Gemma's global layers are few among many
    layers = data.draw(st.lists(st.integers(3, 40), min_size=units, max_size=units))
    rule = RetentionRule("rule", observe=observe, alpha_scope=scope, pool=kernel)
    window = min(observe, length)
    found = alpha(mass, torch.tensor(layers), rule, window)
    reference = literal.alpha(mass.numpy(), layers, rule, window)
    assert found.shape == mass.shape
    close(found, reference)
    scores = utility(mass, norms, torch.tensor(layers), rule, window)
    close(scores, reference * literal.value_ratio(norms.numpy()))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("length", "observe"), [(5, 64), (64, 64), (200, 64)])
def test_alpha_has_mean_one_at_any_length(scope, length, observe):
    window = min(length, observe)
    mass = tensor(0, 4, length)
    mass *= window / mass.sum(1, keepdim=True)
    found = alpha(mass, torch.tensor([0, 0, 1, 2]), RetentionRule("r", alpha_scope=scope), window)
    torch.testing.assert_close(found.mean(1), torch.ones(4))


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, data=st.data())
def test_layer_max(sizes, data):
    scores = tensor(*sizes) - 1
    layers = data.draw(st.lists(st.integers(0, 30), min_size=len(scores), max_size=len(scores)))
    found = layer_max(scores, torch.tensor(layers))
    assert np.array_equal(found.numpy(), literal.layer_max(scores.numpy(), layers))


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, window=st.integers(1, 64))
def test_structural_risk(sizes, window):
    mass = tensor(*sizes)
    found = structural_risk(mass, window)
    assert found.shape == ()
    close(found, literal.structural_risk(mass.numpy()))
    assert -1e-6 <= float(found) <= 1 + 1e-6


def test_structural_risk_of_extremes():
    assert float(structural_risk(torch.ones(3, 50), 50)) == pytest.approx(1, abs=1e-6)
    spike = torch.zeros(3, 50)
    spike[:, 7] = 50
    assert float(structural_risk(spike, 50)) == 0
    assert float(structural_risk(torch.ones(3, 1), 1)) == 0
    assert math.isfinite(structural_risk(torch.zeros(3, 4), 4))


@settings(deadline=None, max_examples=30)
@given(nlls=st.lists(st.floats(0, 12, width=32), max_size=64))
def test_semantic_risk(nlls):
    total = torch.tensor(nlls, dtype=torch.float32).sum()
    expected = literal.semantic_risk(nlls)
    for count in (len(nlls), torch.tensor(len(nlls))):
        found = semantic_risk(total, count)
        assert found.shape == ()
        np.testing.assert_allclose(float(found), expected, rtol=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    edges=st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]), max_size=6).map(sorted),
    value=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0, 2.0]),
)
def test_bins_count_the_edges_at_or_below(edges, value):
    edges, value = np.array(edges, dtype=np.float32), np.float32(value)
    found = bin_of(torch.tensor(value), torch.from_numpy(edges))
    assert found.shape == () and found.dtype == torch.int64
    assert int(found) == literal.bin_of(float(value), edges)

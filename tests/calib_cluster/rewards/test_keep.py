"""Kept sets of draws are those of Algorithm 1; Psi by hand; the behaviours that draw."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ALL, PAPER_GRID, ActionGrid, Draws
from calib_cluster.rewards.behaviour import draw_generator, factorial, one_at_a_time, prompt_id
from calib_cluster.rewards.keep import keep
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.retention import (
    RULES,
    DeviceTables,
    RetentionRule,
    RetentionTables,
    retain,
)
from tests.calib_cluster.rewards.frozen import LENGTH, text
from tests.kvpolicy.retention import literal

TIGHT, LOOSE = 20, 80  # the budget decides, or the threshold does
RULE_SETS = {
    "paper": RULES["paper"],
    "head": RULES["head"],
    "layer scope": RetentionRule("layer", alpha_scope="layer", floor=5, keep_window=True, pool=3),
    "own sets": RetentionRule("own", alpha_scope="head", share="head"),
}


def tables_of(geometry, units: FreezingUnits, rule, weights, thresholds) -> RetentionTables:
    """Tables of one risk cell that say what one draw does."""
    layers, heads = len(geometry.attention_layers), geometry.max_kv_heads
    table = np.ones((layers, heads), np.float32)
    table[units.layers, units.heads] = weights
    budgets = () if rule.gate == "off" else (TIGHT,)
    gate = np.zeros((len(budgets), layers, 1, 1), np.float32)
    if budgets:
        gate[0, units.rows, 0, 0] = thresholds
    none = np.zeros(0, np.float32)
    return RetentionTables(rule, table, budgets, gate, none, none)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", RULE_SETS)
@pytest.mark.parametrize("budget", [TIGHT, LOOSE])
def test_a_draw_keeps_what_the_engine_would_with_such_tables(pair, family, name, budget, rng):
    model, rule = pair(family).model, RULE_SETS[name]
    units = model.units
    prompt, continuation = text(rng)
    prefill = model.prefill(prompt, continuation, rule.observe)
    draws = factorial(rng, 6, len(units), len(units.layer_ids), PAPER_GRID)
    found = keep(prefill, units, rule, budget, draws, PAPER_GRID)
    layers, heads = torch.from_numpy(units.layers), torch.from_numpy(units.heads)
    for n in range(6):
        weights = np.array(PAPER_GRID.weights, np.float32)[draws.weights[n]]
        thresholds = np.array(PAPER_GRID.thresholds, np.float32)[draws.thresholds[n]]
        tables = tables_of(model.geometry, units, rule, weights, thresholds)
        ready = DeviceTables.of(tables, layers, heads, "cpu")
        arguments = (ready, budget, prefill.nll_sum, prefill.nll_count)
        engine = retain(prefill.mass, prefill.value_norms, layers, heads, *arguments)
        torch.testing.assert_close(found.positions[n], engine.kept.positions)
        torch.testing.assert_close(found.counts[n], engine.kept.counts)
        paper = literal.retain(
            prefill.mass.numpy(), prefill.value_norms.numpy(), units.layers, units.heads, tables,
            budget, [0.0],
        )  # fmt: skip
        kept = [[p for p in row.tolist() if p >= 0] for row in found.positions[n]]
        assert kept == paper.kept


def crafted(scores: list[list[float]]) -> SimpleNamespace:
    """A prefill of two units whose utility is ``scores`` [2, T]: even mass, values of that norm."""
    norms = torch.tensor(scores)
    norms = norms / norms.mean(dim=1, keepdim=True)
    length = norms.shape[1]
    return SimpleNamespace(
        length=length, window=length, mass=torch.ones(2, length), value_norms=norms
    )


def two_units(layers: list[int]) -> FreezingUnits:
    heads = [0, 1] if layers[0] == layers[1] else [0, 0]
    return FreezingUnits(np.array(layers), np.array(heads), tuple(sorted(set(layers))))


def test_psi_by_hand_of_two_layers():
    """Utilities of mean 1: at threshold .9 layer 0 has 4 candidates of 6, layer 1 has 2."""
    prefill = crafted([[1.2, 1.2, 1.2, 1.2, 0.6, 0.6], [2.0, 0.8, 0.8, 0.8, 0.8, 0.8]])
    grid = ActionGrid(weights=(0.5, 1.0), thresholds=(0.0, 0.9))
    draws = Draws(
        np.array([[1, 1], [0, 1], [1, 1]], np.uint8), np.array([[1, 1], [1, 1], [0, 0]], np.uint8),
        np.full(3, ALL, np.int32),
    )  # fmt: skip
    units = two_units([0, 1])
    found = keep(prefill, units, RULES["paper"], 2, draws, grid)
    # the last token is always one: layer 0 has {0,1,2,3} and 5, layer 1 has {0} and 5; with weight
    # .5 layer 0 has its best token (the floor) and 5; at threshold 0 every token
    assert found.candidates.tolist() == [[5, 2], [2, 2], [6, 6]]
    assert found.psi(2, units).tolist() == [[3, 0], [0, 0], [4, 4]]
    assert found.counts.tolist() == [[2, 2]] * 3
    assert found.positions[0].tolist() == [[0, 5], [0, 5]]


def test_psi_of_a_layer_whose_units_keep_their_own_sets_is_their_mean():
    prefill = crafted([[1.2, 1.2, 1.2, 1.2, 0.6, 0.6], [2.0, 0.8, 0.8, 0.8, 0.8, 0.8]])
    grid = ActionGrid(weights=(1.0,), thresholds=(0.9,))
    draws = Draws(np.zeros((1, 2), np.uint8), np.zeros((1, 1), np.uint8), np.full(1, ALL, np.int32))
    shared, own = (RetentionRule(s, share=s) for s in ("layer", "head"))
    units = two_units([0, 0])
    assert keep(prefill, units, own, 1, draws, grid).psi(1, units).tolist() == [[(4 + 1) / 2]]
    # shared: the layer's best scores are 2, 1.2, 1.2, 1.2, .8, .8
    assert keep(prefill, units, shared, 1, draws, grid).psi(1, units).tolist() == [[4]]


@pytest.mark.parametrize("budget", [0, LENGTH, LENGTH + 1])
def test_budgets_that_freeze_nothing_are_refused(pair, budget, rng):
    model = pair("llama").model
    draws = factorial(rng, 1, len(model.units), 4, PAPER_GRID)
    prefill = model.prefill(*text(rng))
    with pytest.raises(
        CalibrationError, match=f"budget {budget} is not accepted .* 1..{LENGTH - 1}"
    ):
        keep(prefill, model.units, RULES["paper"], budget, draws, PAPER_GRID)


def test_a_prompt_observed_otherwise_is_refused(pair, rng):
    model = pair("llama").model
    draws = factorial(rng, 1, len(model.units), 4, PAPER_GRID)
    prefill = model.prefill(*text(rng), observe=8)
    with pytest.raises(CalibrationError, match="not observed through 64"):
        keep(prefill, model.units, RULES["paper"], 5, draws, PAPER_GRID)


def test_the_papers_actions():
    assert len(PAPER_GRID.weights) == 29 and len(PAPER_GRID.thresholds) == 21
    assert np.allclose(PAPER_GRID.weights, np.linspace(0.8, 1.5, 29))
    assert np.allclose(PAPER_GRID.thresholds, np.linspace(0.8, 1.0, 21))
    assert PAPER_GRID.nearest(1.0, 0.9) == (8, 10)


@pytest.mark.parametrize(
    "wrong",
    [{"weights": ()}, {"weights": (0.0, 1.0)}, {"thresholds": (0.9, 0.8)}, {"thresholds": (-1.0,)}],
)
def test_bad_grids_are_refused(wrong):
    with pytest.raises(CalibrationError, match="actions must ascend"):
        ActionGrid(**wrong)


def test_factorial_draws_everything_evenly(rng):
    draws = factorial(rng, 4000, 5, 3, PAPER_GRID)
    assert draws.weights.shape == (4000, 5) and draws.thresholds.shape == (4000, 3)
    assert (draws.varied == ALL).all()
    for column, actions in ((draws.weights[:, 2], 29), (draws.thresholds[:, 1], 21)):
        counts = np.bincount(column, minlength=actions)
        expected = 4000 / actions
        assert len(counts) == actions
        assert ((counts - expected) ** 2 / expected).sum() < 2.2 * actions  # chi-squared
    assert abs(np.corrcoef(draws.weights[:, 0], draws.weights[:, 1])[0, 1]) < 0.06


def test_one_at_a_time_moves_one_state_and_names_it(rng):
    base = np.array([3, 8, 8, 20]), np.array([0, 10])
    draws = one_at_a_time(rng, 3000, *base, PAPER_GRID)
    seen = np.zeros((6, 29), int)
    for weights, thresholds, varied in zip(
        draws.weights, draws.thresholds, draws.varied, strict=True
    ):
        actions, still = np.concatenate([weights, thresholds]), np.concatenate(base)
        seen[varied, actions[varied]] += 1
        actions[varied] = still[varied]
        np.testing.assert_array_equal(actions, still)
    assert (seen[:4] > 0).all() and (seen[4:, :21] > 0).all() and (seen[4:, 21:] == 0).all()
    assert abs(seen[:4].sum() / 3000 - 4 * 29 / (4 * 29 + 2 * 21)) < 0.03


def test_draws_follow_from_seed_prompt_and_budget():
    name = prompt_id([1, 2, 3], [4, 5])
    assert name != prompt_id([1, 2], [3, 4, 5]) and len(name) == 16

    def drawn(*key) -> bytes:
        return factorial(draw_generator(*key), 5, 8, 4, PAPER_GRID).weights.tobytes()

    assert drawn(0, name, 64) == drawn(0, name, 64)
    other = prompt_id([1, 2, 3], [4, 6])
    keys = [(0, name, 64), (1, name, 64), (0, other, 64), (0, name, 65), (0, name, 64, 1)]
    assert len({drawn(*key) for key in keys}) == len(keys)

"""Draws of a rule that mixes: what they keep, how they vary, and that their rewards are real."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import MIX_GRID, ActionGrid
from calib_cluster.rewards.behaviour import mixed
from calib_cluster.rewards.collect import Collector, Task
from calib_cluster.rewards.keep import keep
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.retention import RULES, DeviceTables, MixTables, RetentionTables, retain
from tests.calib_cluster.rewards.frozen import text

RULE = msgspec.structs.replace(RULES["mix"], observe=24, sinks=2, recent=4)
EVEN = MIX_GRID.shares.index(1.0)


def draws_of(units, rng, count=6, epsilon=0.6):
    base = np.full(len(units), EVEN), np.zeros(len(units), np.int64)
    return mixed(rng, count, len(units.layer_ids), *base, MIX_GRID, epsilon)


def tables_of(model, draws, n: int, weights: np.ndarray) -> RetentionTables:
    """Tables that say what draw ``n`` does."""
    geometry, units = model.geometry, model.units
    layers, heads = len(geometry.attention_layers), geometry.max_kv_heads
    shares = np.ones((1, layers, heads), np.float32)
    quotas = np.ones((1, layers, heads, 3), np.float32)
    shares[0, units.layers, units.heads] = np.array(MIX_GRID.shares)[draws.shares[n]]
    quotas[0, units.layers, units.heads] = np.array(MIX_GRID.quotas)[draws.mixtures[n]]
    group = weights.shape[1]
    queries = np.zeros((layers, heads * group), np.float32)
    for unit, (layer, head) in enumerate(zip(units.layers, units.heads, strict=True)):
        queries[layer, head * group : (head + 1) * group] = weights[unit]
    none = np.zeros(0, np.float32)
    return RetentionTables(
        RULE, np.ones((layers, heads), np.float32), (20,), np.zeros((0, layers, 1, 1), np.float32),
        none, none, MixTables(shares, quotas, queries),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("budget", [12, 40])
def test_a_draw_keeps_what_the_engine_would_with_such_tables(pair, family, budget, rng):
    model = pair(family).model
    units = model.units
    prompt, continuation = text(rng)
    prefill = model.prefill(prompt, continuation, RULE.observe, RULE.focus)
    weights = rng.random(prefill.squares.shape[:2]).astype(np.float32)
    draws = draws_of(units, rng)
    found = keep(prefill, units, RULE, budget, draws, MIX_GRID, torch.from_numpy(weights))
    assert (found.counts.sum(1) == len(units) * budget).all()
    assert not found.psi(budget, units).any()
    layers, heads = torch.from_numpy(units.layers), torch.from_numpy(units.heads)
    focus = prefill.focus(torch.from_numpy(weights))
    for n in range(len(draws)):
        ready = DeviceTables.of(tables_of(model, draws, n, weights), layers, heads, "cpu")
        arguments = (ready, budget, prefill.nll_sum, prefill.nll_count, focus)
        engine = retain(prefill.mass, prefill.value_norms, layers, heads, *arguments).kept
        width = engine.positions.shape[1]
        torch.testing.assert_close(found.positions[n][:, :width], engine.positions)
        assert (found.positions[n][:, width:] == -1).all()
        torch.testing.assert_close(found.counts[n], engine.counts)


def test_draws_stay_at_the_base_as_often_as_they_should(pair):
    units = pair("llama").model.units
    draws = draws_of(units, np.random.default_rng(0), count=4000, epsilon=0.4)
    for actions, base, size in (
        (draws.shares, EVEN, len(MIX_GRID.shares)), (draws.mixtures, 0, len(MIX_GRID.quotas)),
    ):  # fmt: skip
        counts = np.bincount(actions.ravel(), minlength=size) / actions.size
        wanted = np.full(size, 0.4 / size)
        wanted[base] += 0.6
        np.testing.assert_allclose(counts, wanted, atol=0.02)
    assert (draws_of(units, np.random.default_rng(0), epsilon=0.0).shares == EVEN).all()


def test_records_of_a_mix_count_scored_tokens_only(pair, rng):
    model = pair("llama").model
    prompt, continuation = text(rng)
    weights = tuple((1.0,) * 2 for _ in model.units.layers)
    header = Collector.header(model, RULE, MIX_GRID, "factorial", RiskGrid(), weights)
    collector = Collector(model, header, seed=3)
    task = Task(tuple(prompt), tuple(continuation), "made", scored=4)
    prefill = collector.prefill(task)
    records = collector.collect(task, prefill, 16, 5)
    sets = keep(
        prefill, model.units, RULE, 16, collector._draw(task, 16, 5, 0, (0, 0)), MIX_GRID,
        torch.tensor(weights),
    )  # fmt: skip
    losses, moved = model.continuation_scores(prefill, sets.positions)
    np.testing.assert_allclose(records["nll_compressed"], losses[:, 4:].mean(1), atol=1e-5)
    np.testing.assert_allclose(records["divergence"], moved[:, 4:].mean(1), atol=1e-5)
    assert (records["divergence"] > 0).all() and (records["scored"] == 4).all()
    assert records["nll_full"][0] == pytest.approx(float(prefill.losses[4:].mean()), abs=1e-6)
    assert records["shares"].std() > 0 and records["mixtures"].std() > 0


def test_divergence_is_that_of_the_predictions(pair, rng):
    """By hand from two sets of log-probabilities; keeping everything moves nothing."""
    model = pair("llama").model
    prompt, continuation = text(rng)
    prefill = model.prefill(prompt, continuation, RULE.observe)
    units, length = len(model.units), len(prompt)
    everything = torch.arange(length).expand(1, units, length)
    assert float(model.continuation_scores(prefill, everything)[1].abs().max()) < 1e-5
    few = torch.arange(length - 6, length).expand(1, units, 6)
    found = model.continuation_scores(prefill, few)[1][0, 1:]
    rows = [model.continuation_hidden(prefill, sets)[0][0] for sets in (everything, few)]
    full, less = (
        model._logits(list(continuation[:-1]), row[None]).double().log_softmax(-1) for row in rows
    )
    wanted = (full.exp() * (full - less)).sum(-1)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-3)


def test_a_mix_needs_its_focus_and_good_actions(pair, rng):
    model = pair("llama").model
    prefill = model.prefill(*text(rng), RULE.observe)
    with pytest.raises(CalibrationError, match="needs query weights and the prompt's focus"):
        keep(prefill, model.units, RULE, 16, draws_of(model.units, rng), MIX_GRID)
    for bad in (((1.0, 0.0),), ((0.0, 0.0, 0.0),), ((1.0, -1.0, 0.0),), ()):
        with pytest.raises(CalibrationError, match="mixtures must give window, focus, retrieval"):
            ActionGrid(quotas=bad)
    with pytest.raises(CalibrationError, match="share actions must ascend"):
        ActionGrid(shares=(1.0, 0.5))

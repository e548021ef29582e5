"""A head that carries the answer and one made of noise: what is compiled puts them in order.

The whole pipeline runs on a model made for it (``planted_model``): rewards of draws, tables, and
the freeze that serving would do with them. The control shuffles rewards between the draws of each
prompt: then there is no order to be found, so the order comes from the rewards alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from calib_cluster.compile import CompileSettings, compile_tables
from calib_cluster.rewards.actions import MIX_GRID, ActionGrid
from calib_cluster.rewards.collect import Collector
from calib_cluster.rewards.copies import query_weights
from calib_cluster.rewards.model import RewardModel
from calib_cluster.rewards.records import RewardRecords, concatenate
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RULES, DeviceTables, RetentionTables, retain
from tests.calib_cluster.planted_model import (
    ANSWER,
    CONTINUATION,
    GROUP,
    NOISE,
    SPAN,
    planted_task,
    save_planted,
)

BUDGET = 64
SEEDS = range(6)
PROMPTS, DRAWS = 4, 32
SHUFFLES = 16
GRIDS = {
    "paper": ActionGrid((0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (0.8, 0.9, 1.0)),
    "mix": MIX_GRID,
}
SETTINGS = CompileSettings(entropy_bins=1, perplexity_bins=1, even=0.35)


@dataclass(frozen=True)
class Planted:
    """The model, and the records that each rule's compile is made from, by seed."""

    model: RewardModel
    records: dict[str, list[RewardRecords]]

    def compiled(self, records: RewardRecords) -> RetentionTables:
        return compile_tables(records, self.model.geometry, (BUDGET,), SETTINGS).tables


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Planted:
    folder = save_planted(tmp_path_factory.mktemp("planted"))
    model = RewardModel(folder, read_geometry(folder))
    records = {rule: [collected(model, rule, seed) for seed in SEEDS] for rule in GRIDS}
    return Planted(model, records)


def collected(model: RewardModel, rule: str, seed: int) -> RewardRecords:
    """Records of prompts that no other seed has; of a mix with the measured query weights."""
    tasks = [planted_task(100 * seed + i) for i in range(PROMPTS)]
    weights = ()
    if RULES[rule].mixes:
        first, *rest = (model.copies(task.prompt, task.continuation) for task in tasks)
        weights = tuple(map(tuple, query_weights(sum(rest, first)).tolist()))
    header = Collector.header(model, RULES[rule], GRIDS[rule], "factorial", RiskGrid(), weights)
    collector = Collector(model, header, seed)
    return concatenate(
        [collector.collect(task, collector.prefill(task), BUDGET, DRAWS) for task in tasks]
    )


def shuffled(records: RewardRecords, seed: int) -> RewardRecords:
    """The same draws and the same rewards, but not each draw's own; prompt by prompt."""
    rng, order = np.random.default_rng(seed), np.arange(len(records))
    for prompt in np.unique(records["prompt"].astype(str)):
        rows = np.flatnonzero(records["prompt"] == prompt)
        order[rows] = rng.permutation(rows)
    rewards = {name: records[name][order] for name in ("nll_compressed", "divergence")}
    return RewardRecords(records.header, records.columns | rewards)


def gap(tables: RetentionTables) -> float:
    """How far the answer head is above the noise head: weights' difference, shares' doublings."""
    if tables.mix is None:
        weights = tables.head_weights[0].astype(np.float64)
        return float(weights[ANSWER] - weights[NOISE])
    shares = tables.mix.shares[0, 0].astype(np.float64)
    return float(np.log2(shares[ANSWER] / shares[NOISE]))


def swapped(tables: RetentionTables) -> RetentionTables:
    """The two heads' weights, or shares, given to each other; all else as it was."""
    if tables.mix is None:
        return replace(tables, head_weights=tables.head_weights[:, ::-1])
    return replace(tables, mix=replace(tables.mix, shares=tables.mix.shares[..., ::-1]))


def frozen(model: RewardModel, tables: RetentionTables, seed: int) -> tuple[float, float]:
    """Mean loss of the continuation, and the part of its span that the answer head still has,
    after the freeze that serving does with ``tables``; over prompts of no compile."""
    layers, heads = (torch.from_numpy(x) for x in (model.units.layers, model.units.heads))
    on_device, losses, held = DeviceTables.of(tables, layers, heads, "cpu"), [], []
    for i in range(3):
        task = planted_task(10_000 + 10 * seed + i)
        prefill = model.prefill(task.prompt, task.continuation, 64, 8)
        focus = None
        if tables.mix is not None:
            flat = torch.from_numpy(tables.mix.query_weights[0].copy())
            focus = prefill.focus(flat.unflatten(0, (-1, GROUP)))
        kept = retain(
            prefill.mass, prefill.value_norms, layers, heads, on_device, BUDGET, prefill.nll_sum,
            prefill.nll_count, focus,
        ).kept.positions  # fmt: skip
        losses.append(float(model.continuation_losses(prefill, kept[None]).mean()))
        own = kept[ANSWER]
        inside = (own >= SPAN) & (own < SPAN + CONTINUATION)
        held.append(float(inside.sum()) / CONTINUATION)
    return float(np.mean(losses)), float(np.mean(held))


def test_the_model_is_what_it_is_made_to_be(planted):
    """Whole, it predicts the continuation; the answer head alone is what that needs."""
    task, model = planted_task(1), planted.model
    prefill = model.prefill(task.prompt, task.continuation)
    assert prefill.losses.max() < 1e-3
    every = torch.arange(prefill.length)
    span = every[SPAN : SPAN + CONTINUATION]
    others = torch.cat([every[:SPAN], every[SPAN + CONTINUATION :]])

    def loss(answer: torch.Tensor, noise: torch.Tensor) -> float:
        kept = torch.full((1, 2, prefill.length), -1)
        kept[0, ANSWER, : len(answer)], kept[0, NOISE, : len(noise)] = answer, noise
        return float(model.continuation_losses(prefill, kept).mean())

    assert loss(span, others) < 0.1
    assert loss(others, every) > 5


def test_only_the_answer_heads_first_query_head_retrieves(planted):
    weights = np.array(planted.records["mix"][0].header.query_weights)
    assert weights[ANSWER, 0] == 1
    assert np.delete(weights.ravel(), ANSWER * GROUP).max() < 0.01


@pytest.mark.parametrize(("rule", "margin"), [("paper", 0.3), ("mix", 1.0)])
def test_the_answer_head_comes_out_above_the_noise_head(planted, rule, margin):
    """In every seed, by a margin; with shuffled rewards neither mostly nor on average."""
    records = planted.records[rule]
    gaps = np.array([gap(planted.compiled(part)) for part in records])
    assert (gaps > margin).all(), gaps
    control = np.array(
        [gap(planted.compiled(shuffled(part, i))) for part in records for i in range(SHUFFLES)]
    )
    assert (control > margin).mean() < 0.5, control
    assert abs(control.mean()) < gaps.min() / 2, control


@pytest.mark.parametrize("rule", GRIDS)
def test_rewards_the_other_way_round_turn_the_order_round(planted, rule):
    for part in planted.records[rule]:
        turned = {name: -part[name] for name in ("nll_compressed", "divergence")}
        records = RewardRecords(part.header, part.columns | turned)
        assert gap(planted.compiled(records)) < 0 < gap(planted.compiled(part))


@pytest.mark.parametrize("rule", GRIDS)
def test_frozen_by_compiled_tables_the_model_loses_less_than_by_swapped_ones(planted, rule):
    for seed, part in zip(SEEDS, planted.records[rule], strict=True):
        tables = planted.compiled(part)
        loss, held = frozen(planted.model, tables, seed)
        worse, missing = frozen(planted.model, swapped(tables), seed)
        assert loss < 0.7 * worse, (loss, worse)
        assert held > missing + 0.2, (held, missing)

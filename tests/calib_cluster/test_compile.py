"""Tables compiled from records: planted answers, coupling, support, and a real tiny model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from calib_cluster.compile import Compiled, CompileSettings, compile_tables
from calib_cluster.compile_effects import Effects, Factor, noise_ratio
from calib_cluster.cql import CellStatistics, solve
from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ALL, PAPER_GRID, ActionGrid
from calib_cluster.rewards.bandit import gate_records, head_records
from calib_cluster.rewards.collect import Collector, Task
from calib_cluster.rewards.model import RewardModel
from calib_cluster.rewards.records import (
    COLUMNS,
    RecordHeader,
    RewardRecords,
    concatenate,
    numpy_type,
)
from calib_cluster.rewards.risk import RiskGrid
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.retention import RULES, DeviceTables, retain
from tests.calib_cluster.tiny_models import VOCAB, save_tiny

GRID = ActionGrid(weights=(0.8, 1.0, 1.2, 1.4, 1.5), thresholds=(0.8, 0.85, 0.9, 1.0))
SMALL = CompileSettings(entropy_bins=2, perplexity_bins=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, native and global in turn, of two kv heads: two layers and four units freeze."""
    return save_tiny("gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.fixture(scope="module")
def geometry(folder) -> ModelGeometry:
    return read_geometry(folder)


class World:
    """Rewards that are a sum of one number for every state and action, and noise.

    ``best_weight`` [U] and ``best_threshold`` [budgets, L, 2, 2] have the highest numbers.
    """

    def __init__(self, geometry: ModelGeometry, budgets=(4, 8), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.units, self.budgets, self.geometry = FreezingUnits.of(geometry), budgets, geometry
        layers = len(self.units.layer_ids)
        self.best_weight = rng.integers(0, 5, len(self.units))
        self.best_threshold = rng.integers(0, 4, (len(budgets), layers, 2, 2))

    def header(self) -> RecordHeader:
        units = tuple(self.units.layers.tolist()), tuple(self.units.heads.tolist())
        return RecordHeader(self.geometry.config_hash, RULES["paper"], GRID, "factorial", *units)

    def records(
        self, count: int, noise: float, seed: int = 1, step: float = 1.0, **changes
    ) -> RewardRecords:
        """``count`` evaluations over 40 prompts; prompts differ by far more than actions."""
        rng = np.random.default_rng(seed)
        layers = len(self.units.layer_ids)
        prompt = np.arange(count) % 40
        budget = rng.integers(0, len(self.budgets), count)
        weights = rng.integers(0, 5, (count, len(self.units)))
        thresholds = rng.integers(0, 4, (count, layers))
        entropy, perplexity = prompt % 2, prompt // 2 % 2
        reward = -step * np.abs(weights - self.best_weight).sum(axis=1)
        for layer in range(layers):
            best = self.best_threshold[budget, layer, entropy, perplexity]
            reward = reward - step * np.abs(thresholds[:, layer] - best)
        reward = reward + noise * rng.normal(size=count) + 50 * (prompt % 7) + 9 * budget
        values = {
            "prompt": [f"{p:016x}" for p in prompt], "corpus": "made up", "context": 16,
            "continuation": 8, "scored": 0, "shares": 0, "mixtures": 0, "divergence": 0.0,
            "budget": np.array(self.budgets)[budget], "varied": ALL,
            "weights": weights, "thresholds": thresholds, "kept": 1, "psi": 0.0,
            "kept_set": np.arange(count), "nll_full": 0.0, "nll_compressed": -reward,
            "entropy": entropy * 0.5, "perplexity": 1.0 + perplexity,
            "entropy_bin": 0, "perplexity_bin": 0,
        } | changes  # fmt: skip
        widths = {"units": (len(self.units),), "layers": (layers,), None: ()}
        columns = {}
        for name, column in COLUMNS.items():
            columns[name] = np.empty((count, *widths[column.per]), numpy_type(column.kind))
            columns[name][:] = values[name]
        return RewardRecords(self.header(), columns)

    def right(self, found: Compiled) -> float:
        """Share of states whose best action was found."""
        heads = found.heads.actions == self.best_weight
        gate = found.gate.actions == self.best_threshold.reshape(-1)
        return float(np.concatenate([heads, gate]).mean())


def compiled(world: World, records: RewardRecords, **settings) -> Compiled:
    chosen = msgspec.structs.replace(SMALL, **settings)
    return compile_tables(records, world.geometry, world.budgets, chosen)


@pytest.mark.parametrize("method", ["exact", "converged"])
def test_planted_answers_are_found(geometry, method):
    world = World(geometry)
    records = world.records(3000, noise=0.3)
    found = compiled(world, records, method=method)
    assert world.right(found) == 1.0
    assert found.settled and found.residual < 1e-6
    tables = found.tables
    grid = np.array(GRID.weights, np.float32)
    units = world.units.layers, world.units.heads
    np.testing.assert_array_equal(tables.head_weights[units], grid[world.best_weight])
    thresholds = np.array(GRID.thresholds, np.float32)[world.best_threshold]
    np.testing.assert_array_equal(tables.gate[:, world.units.rows], thresholds)
    assert tables.budgets == world.budgets
    assert tables.entropy_edges.tolist() == [0.25] and tables.perplexity_edges.tolist() == [1.5]


def test_what_is_never_read_is_neutral(geometry):
    world = World(geometry)
    tables = compiled(world, world.records(500, noise=0.3)).tables
    native = [row for row in range(4) if row not in world.units.rows]
    assert (tables.head_weights[native] == 1).all() and (tables.gate[:, native] == 0.8).all()


def test_fitted_together_the_tables_need_fewer_records(geometry):
    """Other states' actions are noise to a table fitted alone, and are known to both together."""
    alone, together, rounds = [], [], []
    for seed in range(6):
        world = World(geometry, seed=seed)
        records = world.records(600, noise=0.3, seed=seed + 10)
        alone.append(world.right(compiled(world, records, joint=False)))
        found = compiled(world, records)
        together.append(world.right(found))
        rounds.append(found.rounds)
        assert found.settled
    assert np.mean(together) > np.mean(alone) + 0.1
    assert min(rounds) >= 2


def test_pure_noise_is_not_explained(geometry):
    """No signal, no effects: fitted together is fitted alone, and nothing is sure of itself."""
    world = World(geometry)
    records = world.records(2000, noise=1.0, step=0.0)
    together, alone = compiled(world, records), compiled(world, records, joint=False)
    assert (together.gate.actions == alone.gate.actions).mean() > 0.9
    # the best of 4 noisy means beats the second by chance: never by much
    assert np.median(together.gate.confidence) < 0.9


def test_alone_it_is_cql_on_the_bandit_records(geometry):
    """Without coupling nothing but eq. 1 and 2 on the records as ``bandit`` expands them."""
    world = World(geometry, budgets=(4,))
    records = world.records(400, noise=2.0, psi=np.random.default_rng(5).random((400, 2)) * 9)
    found = compiled(world, records, joint=False)
    rebinned = records.rebinned(RiskGrid((0.25,), (1.5,)))
    for choice, expanded in (
        (found.heads, head_records(rebinned)), (found.gate, gate_records(rebinned)),
    ):  # fmt: skip
        statistics = expanded.statistics.standardised()[0]
        q = solve(statistics, 0.75).q
        np.testing.assert_array_equal(choice.actions, q.argmax(axis=1))
        np.testing.assert_allclose(choice.values, q.max(axis=1), atol=1e-9)
        np.testing.assert_array_equal(choice.records, statistics.totals)


def test_the_penalty_moves_the_gate_and_only_the_gate(geometry):
    """Candidates past the budget cost beta / T each: a dear one makes high thresholds win."""
    world = World(geometry)
    plain = world.records(3000, noise=0.1)
    psi = (3.0 - plain["thresholds"]) * 16
    records = RewardRecords(plain.header, plain.columns | {"psi": psi})
    free, dear = (compiled(world, records, beta=beta) for beta in (0.0, 5.0))
    assert world.right(free) == 1.0
    assert (dear.gate.actions == 3).all()
    np.testing.assert_array_equal(dear.heads.actions, world.best_weight)


def test_cells_without_prompts_keep_more_and_say_so(geometry):
    world = World(geometry)
    plain = world.records(2000, noise=0.1)
    some = plain.where((plain["entropy"] < 0.25) == (plain["perplexity"] > 1.5))
    found = compiled(world, some)
    empty = found.gate.empty.reshape(2, 2, 2, 2)
    evidence = found.evidence(some)
    for cell in (0, 1):
        assert empty[:, :, cell, cell].all()
        assert (found.tables.gate[:, world.units.rows, cell, cell] == np.float32(0.8)).all()
        assert evidence["gate_empty"][:, world.units.rows, cell, cell].all()
    assert empty.sum() == 8
    assert evidence["gate_records"][:, world.units.rows].sum() == 2 * len(some)
    assert evidence["head_records"].shape == (4, 2)
    assert (evidence["head_records"][world.units.layers, world.units.heads] == len(some)).all()
    assert not evidence["head_empty"][world.units.layers, world.units.heads].any()


@pytest.mark.parametrize(
    ("alpha", "baseline", "picks"),
    [(0.0, False, True), (0.75, False, False), (0.0, True, False), (0.75, True, False)],
)
def test_alpha_decides_about_thresholds_that_nobody_tried(geometry, alpha, baseline, picks):
    """Where a cell's rewards are below the table's mean, 0 looks good to plain regression; a
    baseline for each prompt leaves no such cell."""
    world = World(geometry, budgets=(4,))
    records = world.records(4000, noise=0.1)
    records = records.where((records["thresholds"] != 3).all(axis=1))
    found = compiled(world, records, alpha=alpha, baseline=baseline)
    assert bool((found.gate.actions == 3).any()) == picks
    assert (found.gate.support[found.gate.actions == 3] == 0).all()


def test_shards_in_any_order_give_the_same_bytes(geometry):
    world = World(geometry)
    one, two = world.records(300, 1.0, seed=1), world.records(300, 1.0, seed=2)
    found = [compiled(world, concatenate(parts)) for parts in ([one, two], [two, one])]
    for name, tensor in found[0].tables.to_tensors().items():
        assert tensor.tobytes() == found[1].tables.to_tensors()[name].tobytes()
    assert found[0].heads.confidence.tobytes() == found[1].heads.confidence.tobytes()


def test_the_papers_recipe_is_reported_as_far_from_the_minimum(geometry):
    world = World(geometry)
    records = world.records(600, noise=0.3)
    found = compiled(world, records, method="paper", max_rounds=3)
    assert found.residual > 0.01


def test_records_at_one_at_a_time_count_only_where_they_vary(geometry):
    world = World(geometry)
    states = len(world.units) + len(world.units.layer_ids)
    plain = world.records(1200, noise=0.05)
    varied = (np.arange(1200) // 40 % states).astype(np.int32)
    columns = plain.columns | {"varied": varied}
    found = compiled(world, RewardRecords(plain.header, columns))
    assert found.heads.records.sum() + found.gate.records.sum() == 1200
    assert (found.heads.records == (varied[:, None] == np.arange(len(world.units))).sum(0)).all()


@pytest.mark.parametrize(
    ("budgets", "message"),
    [((), "must ascend"), ((8, 4), "must ascend"), ((4, 16), "no reward records of budget 16")],
)
def test_bad_budgets_are_refused(geometry, budgets, message):
    world = World(geometry)
    with pytest.raises(CalibrationError, match=message):
        compile_tables(world.records(50, 1.0), geometry, budgets, SMALL)


def test_records_of_another_model_are_refused(geometry):
    world = World(geometry)
    header = msgspec.structs.replace(world.header(), model_config="other")
    records = RewardRecords(header, world.records(50, 1.0).columns)
    with pytest.raises(CalibrationError, match="of another model"):
        compile_tables(records, geometry, (4,), SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"method": "sgd"}, "exact, converged, paper"), ({"max_rounds": 0}, "at least 1")],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(CalibrationError, match=message):
        CompileSettings(**changes)


@pytest.mark.parametrize("rule", ["paper", "head"])
def test_records_of_a_real_model_become_tables_that_serving_takes(folder, geometry, rule):
    model, rng = RewardModel(folder, geometry), np.random.default_rng(0)
    header = Collector.header(model, RULES[rule], PAPER_GRID, "factorial", RiskGrid())
    collector = Collector(model, header)
    parts = []
    for _ in range(4):
        ids = rng.integers(0, VOCAB, 100).tolist()
        task = Task(tuple(ids[:80]), tuple(ids[80:]), "random")
        prefill = collector.prefill(task)
        parts += [collector.collect(task, prefill, budget, 6) for budget in (16, 32)]
    found = compile_tables(concatenate(parts), geometry, (16, 32))
    assert found.heads.records.tolist() == [48] * len(model.units)
    if rule == "head":
        assert found.gate is None and found.tables.budgets == ()
    else:
        assert found.tables.gate.shape == (2, 4, 20, 4)
        assert set(np.unique(found.tables.gate)) <= set(np.array(PAPER_GRID.thresholds, np.float32))
    layers, heads = (torch.from_numpy(x) for x in (model.units.layers, model.units.heads))
    tables = DeviceTables.of(found.tables, layers, heads, "cpu")
    kept = retain(
        prefill.mass, prefill.value_norms, layers, heads, tables, 16, prefill.nll_sum,
        prefill.nll_count,
    )  # fmt: skip
    assert 1 <= int(kept.kept.counts.min()) <= int(kept.kept.counts.max()) <= 16


def test_effects_need_repeated_cells():
    counts = np.array([[1, 1, 0]])
    once = CellStatistics(counts, np.array([[3.0, -3.0, 0.0]]), np.zeros((1, 3)))
    assert noise_ratio([once]) == np.inf
    # 2 records a cell: within variance (1 + 1) / 2, between 2 * (9 + 9), minus 1 * 1, over 2
    twice = CellStatistics(counts * 2, np.array([[6.0, -6.0, 0.0]]), np.array([[1.0, 1.0, 0.0]]))
    assert noise_ratio([twice]) == pytest.approx(1 / ((36 - 1) / 2))


def test_effects_are_shrunk_by_their_tables_noise():
    """One factor, two actions of two records: means 3 and -3, noise ratio 1 / 17.5 as above."""
    zeros, actions = np.zeros(4, np.int64), np.array([0, 0, 1, 1])
    factor = Factor(zeros, actions, np.ones(4, bool), (1, 2), np.array([0]))
    spread = np.sqrt(0.5)
    rewards = np.array([3 + spread, 3 - spread, -3 + spread, -3 - spread])
    effects = Effects(rewards, [[factor]])
    effects.update(0)
    np.testing.assert_allclose(effects.rewards(0, 0), rewards)  # its own part is never taken out
    trust = 2 / (2 + 1 / 17.5)
    taken = rewards - effects._unexplained
    np.testing.assert_allclose(taken, [3 * trust, 3 * trust, -3 * trust, -3 * trust])

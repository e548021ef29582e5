"""Shares and mixtures from records: planted worth is found, noise is not taken for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calib_cluster.compile import CompileSettings, compile_tables
from calib_cluster.rewards.actions import ALL, MIX_GRID
from calib_cluster.rewards.behaviour import mixed
from calib_cluster.rewards.records import COLUMNS, RecordHeader, RewardRecords, numpy_type
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.retention import RULES
from tests.calib_cluster.tiny_models import save_tiny

BUDGETS = (16, 32)


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ModelGeometry:
    folder: Path = save_tiny("gemma2", tmp_path_factory.mktemp("gemma2"))
    return read_geometry(folder)


def planted(
    geometry: ModelGeometry,
    worth,
    best_mixture: int,
    count: int = 4000,
    noise: float = 1.0,
    worth_b=None,
) -> RewardRecords:
    """Divergence falls by ``worth[u]`` nats with each doubling of unit u's share, and by .2 where
    it mixes as ``best_mixture``; two corpora whose divergences differ hundredfold, the second with
    ``worth_b`` if given."""
    units, rng = FreezingUnits.of(geometry), np.random.default_rng(0)
    layers = len(units.layer_ids)
    even = MIX_GRID.shares.index(1.0)
    base = np.full(len(units), even), np.zeros(len(units), np.int64)
    draws = mixed(rng, count, layers, *base, MIX_GRID)
    doublings = np.log2(np.array(MIX_GRID.shares))[draws.shares]
    prompt = np.arange(count) % 40
    other = np.array(worth if worth_b is None else worth_b)
    reward = np.where(prompt % 2, doublings @ other, doublings @ np.array(worth))
    reward = reward + 0.2 * (draws.mixtures == best_mixture).sum(axis=1)
    scale = np.where(prompt % 2, 100.0, 1.0)
    divergence = scale * (50 + prompt - reward + noise * rng.normal(size=count))
    header = RecordHeader(
        geometry.config_hash, RULES["mix"], MIX_GRID, "factorial", tuple(units.layers.tolist()),
        tuple(units.heads.tolist()), query_weights=((1.0, 0.5),) * len(units),
    )  # fmt: skip
    values = {
        "prompt": [f"{p:016x}" for p in prompt], "corpus": np.where(prompt % 2, "b", "a"),
        "context": 64, "continuation": 8, "scored": 0, "budget": np.array(BUDGETS)[prompt // 20],
        "varied": ALL, "weights": 0, "thresholds": 0, "shares": draws.shares,
        "mixtures": draws.mixtures, "kept": 16, "psi": 0.0, "kept_set": np.arange(count),
        "nll_full": 0.0, "nll_compressed": 0.0, "divergence": divergence, "entropy": 0.5,
        "perplexity": 2.0, "entropy_bin": 0, "perplexity_bin": 0,
    }  # fmt: skip
    widths = {"units": (len(units),), "layers": (layers,), None: ()}
    columns = {}
    for name, column in COLUMNS.items():
        columns[name] = np.empty((count, *widths[column.per]), numpy_type(column.kind))
        columns[name][:] = values[name]
    return RewardRecords(header, columns)


def cells(found, table):
    """Entries of the units that freeze: gemma2's global layers are rows 1 and 3."""
    return table[:, [1, 1, 3, 3], [0, 1, 0, 1]]


def test_shares_follow_what_a_doubling_is_worth(geometry):
    worth = [0.4, 0.0, 0.1, 0.0]
    records = planted(geometry, worth, best_mixture=2)
    found = compile_tables(records, geometry, BUDGETS, CompileSettings(alpha=0.0, even=0.5))
    shares = cells(found, found.tables.mix.shares)
    assert shares.shape == (2, 4) and (shares[0] == shares[1]).all()
    np.testing.assert_allclose(shares[0], 0.5 + 0.5 * np.array(worth) / np.mean(worth), atol=0.1)
    assert shares.mean() == pytest.approx(1, abs=1e-5)
    quotas = cells(found, found.tables.mix.quotas)
    np.testing.assert_array_equal(quotas, np.broadcast_to(MIX_GRID.quotas[2], quotas.shape))
    assert found.settled and found.residual < 1e-6
    weights = found.tables.mix.query_weights
    assert weights[1].tolist() == [1.0, 0.5, 1.0, 0.5] and not weights[0].any()


def test_no_corpus_is_sacrificed_to_one_where_more_is_at_stake(geometry):
    """Unit 0 matters in one corpus, unit 2 as much in the other, in nats a hundred times more."""
    records = planted(geometry, [0.3, 0, 0, 0], 2, worth_b=[0, 0, 0.3, 0])
    found = compile_tables(records, geometry, BUDGETS, CompileSettings(alpha=0.0))
    shares = cells(found, found.tables.mix.shares)[0]
    assert shares[0] == pytest.approx(shares[2], rel=0.2)
    assert min(shares[0], shares[2]) > 2 * max(shares[1], shares[3])


def test_pessimism_keeps_the_order(geometry):
    worth = [0.4, 0.0, 0.1, 0.0]
    found = compile_tables(planted(geometry, worth, 2), geometry, BUDGETS)
    shares = cells(found, found.tables.mix.shares)[0]
    assert shares.argmax() == 0 and shares[2] > max(shares[1], shares[3])


def test_noise_alone_leaves_the_budget_nearly_even(geometry):
    found = compile_tables(planted(geometry, [0.0] * 4, 0, noise=30.0), geometry, BUDGETS)
    assert np.abs(found.worth).max() < 0.05


def test_even_is_the_part_that_everyone_gets(geometry):
    records = planted(geometry, [0.4, 0.0, 0.0, 0.0], 0)
    for even in (0.25, 1.0):
        found = compile_tables(records, geometry, BUDGETS, CompileSettings(even=even))
        shares = cells(found, found.tables.mix.shares)[0]
        assert shares.min() == pytest.approx(even, abs=0.1)


def test_shards_in_any_order_give_the_same_bytes(geometry):
    records = planted(geometry, [0.4, 0.0, 0.1, 0.0], 2, count=400)
    mixed_up = records.where(np.random.default_rng(1).permutation(len(records)))
    tables = [compile_tables(r, geometry, BUDGETS).tables.to_tensors() for r in (records, mixed_up)]
    for name, tensor in tables[0].items():
        assert tensor.tobytes() == tables[1][name].tobytes(), name


def test_evidence_counts_the_chosen_share(geometry):
    records = planted(geometry, [0.4, 0.0, 0.1, 0.0], 2, count=400)
    found = compile_tables(records, geometry, BUDGETS)
    evidence = found.evidence(records)
    assert evidence["head_records"][1].tolist() == [400, 400]
    assert evidence["head_empty"][0].all() and not evidence["head_empty"][1].any()
    taken = records["shares"][:, 0] == found.heads.actions[0]
    assert evidence["head_support"][1, 0] == taken.sum()

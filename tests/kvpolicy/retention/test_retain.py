"""Algorithm 1 end to end, for every combination of options, against the literal transcription."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvpolicy.errors import PolicyError
from kvpolicy.retention import RULES, DeviceTables, RetentionRule, RetentionTables, retain
from kvpolicy.retention import window_mass as device_window_mass
from tests.kvpolicy.retention import literal

# two of three attention layers are frozen, one of them with a windowed head between
LAYERS, HEADS = [0, 0, 0, 2, 2], [0, 1, 2, 0, 2]
OBSERVE = 8
MATRIX = [
    {
        "alpha_scope": scope, "pool": pool, "keep_window": keep, "gate": gate, "floor": floor,
        "share": share,
    }
    for scope, pool, keep, gate, floor, share in product(
        ("global", "layer", "head"), (1, 5), (False, True), ("table", "off"), (1, 4),
        ("layer", "head"),
    )
]  # fmt: skip
# (T, B): T < W, T = W, T < B, B = 1, B < W, B > W, one token, a longer prompt
SIZES = [(5, 3), (8, 4), (20, 30), (20, 1), (20, 6), (24, 12), (1, 1), (60, 16)]


def make_tables(rule: RetentionRule, seed: int = 0) -> RetentionTables:
    """Random tables of 3 layers and 3 heads: 2 budgets, 3 x 2 bins that the prompts really use."""
    rng = np.random.default_rng(seed)
    off = rule.gate == "off"
    gate = rng.uniform(0.3, 1.5, size=(2, 3, 3, 2)).astype(np.float32)
    return RetentionTables(
        rule=rule,
        head_weights=rng.uniform(0.8, 1.5, size=(3, 3)).astype(np.float32),
        budgets=() if off else (4, 16),
        gate=np.zeros((0, 3, 1, 1), np.float32) if off else gate,
        entropy_edges=np.array([] if off else [0.85, 0.93], np.float32),
        perplexity_edges=np.array([] if off else [4.0], np.float32),
    )


class Prompt:
    """What the engine observes of a prompt of T tokens, with W queries."""

    def __init__(self, seed: int, length: int) -> None:
        rng = np.random.default_rng(seed)
        window = min(OBSERVE, length)
        spread = rng.uniform(0.3, 1.6)
        mass = rng.lognormal(sigma=spread, size=(len(LAYERS), length))
        self.mass = (mass * window / mass.sum(1, keepdims=True)).astype(np.float32)
        self.norms = rng.lognormal(sigma=0.5, size=mass.shape).astype(np.float32)
        self.nlls = rng.uniform(0, 2.8, size=window).astype(np.float32).tolist()

    def retain(self, tables: RetentionTables, budget: int):
        layers, heads = torch.tensor(LAYERS), torch.tensor(HEADS)
        on_device = DeviceTables.of(tables, layers, heads, "cpu")
        mass, norms = torch.from_numpy(self.mass), torch.from_numpy(self.norms)
        nll = torch.tensor(self.nlls).sum()
        return retain(mass, norms, layers, heads, on_device, budget, nll, len(self.nlls))

    def literal(self, tables: RetentionTables, budget: int) -> literal.Outcome:
        return literal.retain(self.mass, self.norms, LAYERS, HEADS, tables, budget, self.nlls)


def plain(kept) -> list[list[int]]:
    return [row[:n] for row, n in zip(kept.positions.tolist(), kept.counts.tolist(), strict=True)]


@pytest.mark.parametrize("options", MATRIX, ids=lambda o: "-".join(map(str, o.values())))
def test_every_combination_of_options(options):
    tables = make_tables(RetentionRule("rule", observe=OBSERVE, **options))
    for seed, (length, budget) in enumerate(SIZES):
        prompt = Prompt(seed, length)
        found, expected = prompt.retain(tables, budget), prompt.literal(tables, budget)
        assert found.kept.positions.shape == (len(LAYERS), min(budget, length))
        assert plain(found.kept) == expected.kept
        assert (int(found.entropy_bin), int(found.perplexity_bin)) == expected.bins
        assert float(found.entropy) == pytest.approx(expected.entropy, abs=1e-5)
        assert float(found.perplexity) == pytest.approx(expected.perplexity, rel=1e-5)
        if options["share"] == "layer":
            rows = plain(found.kept)
            assert rows[0] == rows[1] == rows[2] and rows[3] == rows[4]


def test_the_matrix_really_exercises_bins_gates_and_differing_sets():
    tables = make_tables(RetentionRule("rule", observe=OBSERVE, alpha_scope="head", share="head"))
    prompts = [Prompt(seed, length) for seed, (length, _) in enumerate(SIZES)]
    found = [p.retain(tables, b) for p, (_, b) in zip(prompts, SIZES, strict=True)]
    bins = {(int(f.entropy_bin), int(f.perplexity_bin)) for f in found}
    assert len(bins) >= 4
    under = [f for f, (t, b) in zip(found, SIZES, strict=True) if f.kept.counts.min() < min(t, b)]
    full = [f for f, (t, b) in zip(found, SIZES, strict=True) if f.kept.counts.max() == min(t, b)]
    assert under and full
    assert any(len({tuple(r) for r in plain(f.kept)}) > 2 for f in found)


@st.composite
def dyadic_cases(draw):
    """Masses, norms and weights whose products tie exactly in any precision, or differ by far."""
    length = draw(st.integers(1, 24))
    powers = st.sampled_from((0.25, 0.5, 1.0, 2.0))
    row = st.lists(powers, min_size=length, max_size=length)
    block = st.lists(row, min_size=4, max_size=4)
    weights = draw(st.lists(powers, min_size=4, max_size=4))
    return np.float32(draw(block)), np.float32(draw(block)), np.float32(weights)


@settings(deadline=None, max_examples=150)
@given(
    case=dyadic_cases(),
    options=st.sampled_from([o for o in MATRIX if o["pool"] == 1]),
    budget=st.integers(1, 30),
)
def test_ties_are_broken_alike_in_the_whole_algorithm(case, options, budget):
    mass, norms, weights = case
    rule = RetentionRule("rule", observe=OBSERVE, **options)
    off = rule.gate == "off"
    tables = RetentionTables(
        rule, weights.reshape(2, 2), () if off else (8,),
        np.full((0 if off else 1, 2, 1, 1), 0.7312345, np.float32),
        np.zeros(0, np.float32), np.zeros(0, np.float32),
    )  # fmt: skip
    layers, heads = [0, 0, 1, 1], [0, 1, 0, 1]
    index = torch.tensor(layers), torch.tensor(heads)
    on_device = DeviceTables.of(tables, *index, "cpu")
    found = retain(
        torch.from_numpy(mass), torch.from_numpy(norms), *index, on_device, budget,
        torch.tensor(8.0), 8,
    )  # fmt: skip
    expected = literal.retain(mass, norms, layers, heads, tables, budget, [1.0] * 8)
    assert plain(found.kept) == expected.kept


def test_the_head_rule_gives_heads_their_own_sets_and_the_paper_one_per_layer():
    prompt = Prompt(2, 150)
    own = plain(prompt.retain(make_tables(RULES["head"]), 90).kept)
    assert len({tuple(row) for row in own}) == len(own)
    assert all(len(row) == 90 for row in own), "without a gate the budget is filled"
    assert all(row[-64:] == list(range(86, 150)) for row in own)
    shared = plain(prompt.retain(make_tables(RULES["paper"]), 90).kept)
    assert shared[0] == shared[1] == shared[2] and shared[3] == shared[4]


def test_tables_are_read_at_the_units_own_layer_and_head():
    tables = make_tables(RULES["paper"])
    layers, heads = torch.tensor(LAYERS), torch.tensor(HEADS)
    on_device = DeviceTables.of(tables, layers, heads, "cpu")
    expected = [tables.head_weights[x, h] for x, h in zip(LAYERS, HEADS, strict=True)]
    assert on_device.weights.tolist() == expected
    for budget, entropy, perplexity in product((1, 8, 9, 1000), (0, 1, 2), (0, 1)):
        found = on_device.thresholds(budget, torch.tensor(entropy), torch.tensor(perplexity))
        gate = tables.gate_for(budget)
        assert found.tolist() == [gate[x, entropy, perplexity] for x in LAYERS]


def test_units_outside_the_tables_and_bad_budgets_are_refused():
    tables = make_tables(RULES["paper"])
    for layers, heads in (([3], [0]), ([0], [3]), ([-1], [0])):
        with pytest.raises(PolicyError, match="retention tables have"):
            DeviceTables.of(tables, torch.tensor(layers), torch.tensor(heads), "cpu")
    with pytest.raises(PolicyError, match="at least 1 token, found 0"):
        Prompt(0, 9).retain(tables, 0)
    index = torch.tensor([0]), torch.tensor([0])
    on_device = DeviceTables.of(tables, *index, "cpu")
    two = torch.ones(2, 9)
    with pytest.raises(PolicyError, match="for 1 units"):
        both = torch.tensor([0, 0])
        retain(two, two, both, both, on_device, 4, torch.tensor(0.0), 8)


def test_no_unit_at_all_keeps_nothing():
    none = torch.zeros(0, dtype=torch.int64)
    on_device = DeviceTables.of(make_tables(RULES["head"]), none, none, "cpu")
    empty = torch.zeros(0, 9)
    found = retain(empty, empty, none, none, on_device, 4, torch.tensor(0.0), 8)
    assert found.kept.positions.shape == (0, 4)


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("options", MATRIX[::7])
def test_a_gpu_is_never_waited_for(options):
    """Fake CUDA tensors have no data: reading one on the host, or mixing devices, raises."""
    tables = make_tables(RetentionRule("rule", observe=OBSERVE, **options))
    real = DeviceTables.of(tables, torch.tensor(LAYERS), torch.tensor(HEADS), "cpu")
    parts = (real.weights, real.gates, real.entropy_edges, real.perplexity_edges)
    with FakeTensorMode():
        on_device = DeviceTables(tables, *(fake(*x.shape, dtype=x.dtype) for x in parts))
        index = fake(5, dtype=torch.int64)
        count = fake(dtype=torch.int64)
        found = retain(fake(5, 40), fake(5, 40), index, index, on_device, 12, fake(), count)
        mass = device_window_mass(
            fake(4, 3, 2, 8), fake(3, 40, 8, dtype=torch.bfloat16),
            fake(4, dtype=torch.int64), fake(40, dtype=torch.int64), 0.5, 30.0, 16,
        )  # fmt: skip
        with pytest.raises(DataDependentOutputException):  # what the check would see
            fake(5, 5)[count]
    assert found.kept.positions.shape == (5, 12) and mass.shape == (3, 40)
    assert {x.device.type for x in (found.kept.positions, found.entropy_bin, mass)} == {"cuda"}

"""Mixtures of orders and per-unit budgets against literal loops and exact fractions."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpolicy.errors import PolicyError
from kvpolicy.retention import (
    RULES,
    SOURCES,
    DeviceTables,
    Focus,
    MixTables,
    RetentionRule,
    RetentionTables,
    focus_mass,
    retain,
)
from kvpolicy.retention.mix import forward_pooled, mixed_scores, protected, ranks, unit_budgets
from kvpolicy.retention.select import select
from tests.kvpolicy.retention import literal
from tests.kvpolicy.retention.test_window_mass import CASES, DTYPES

# two of three attention layers are frozen, one of them with a windowed head between
LAYERS, HEADS = [0, 0, 0, 2, 2], [0, 1, 2, 0, 2]
BUDGETS = (4, 16)
RULE = RetentionRule(
    "mix", observe=8, pool=3, gate="off", share="head", mix="table", sinks=2, recent=3, focus=4
)
rules = st.builds(
    RetentionRule,
    name=st.just("mix"),
    observe=st.integers(4, 9),
    pool=st.sampled_from((1, 3, 5)),
    keep_window=st.booleans(),
    gate=st.just("off"),
    share=st.just("head"),
    mix=st.just("table"),
    sinks=st.integers(0, 5),
    recent=st.integers(1, 7),
    focus=st.integers(1, 4),
)


def make_tables(rule: RetentionRule = RULE, seed: int = 0) -> RetentionTables:
    """Random tables of 3 layers, 3 heads and 6 query heads; some quotas are 0."""
    rng = np.random.default_rng(seed)
    shares = np.exp(rng.uniform(np.log(0.25), np.log(4), size=(len(BUDGETS), 3, 3)))
    quotas = rng.uniform(0.1, 1, size=(*shares.shape, len(SOURCES)))
    quotas *= rng.random(quotas.shape) < 0.7
    quotas[..., 0] += quotas.sum(-1) == 0
    weights = rng.uniform(0, 1, size=(3, 6))
    arrays = (x.astype(np.float32) for x in (shares, quotas, weights))
    empty = np.zeros(0, np.float32)
    gate = np.zeros((0, 3, 1, 1), np.float32)
    ones = np.ones((3, 3), np.float32)
    return RetentionTables(rule, ones, BUDGETS, gate, empty, empty, MixTables(*arrays))


class Prompt:
    """What an engine observes of a prompt of T tokens: float32, distinct values."""

    def __init__(self, seed: int, length: int, units: int = len(LAYERS)) -> None:
        rng = np.random.default_rng(seed)
        shapes = ((units, length), (units, length), (length,))
        self.arrays = [rng.lognormal(sigma=2.0, size=s).astype(np.float32) for s in shapes]
        self.mass, own, retrieval = (torch.from_numpy(x) for x in self.arrays)
        self.focus = Focus(own, retrieval)

    def retain(self, tables: RetentionTables, budget: int):
        index = torch.tensor(LAYERS), torch.tensor(HEADS)
        on_device = DeviceTables.of(tables, *index, "cpu")
        zero = torch.zeros(())
        return retain(self.mass, None, *index, on_device, budget, zero, 1, self.focus)

    def literal(self, tables: RetentionTables, budget: int) -> list[list[int]]:
        mass, *focus = (x.astype(np.float64) for x in self.arrays)
        found = literal.retain(mass, None, LAYERS, HEADS, tables, budget, [], focus)
        return found.kept


def plain(kept) -> list[list[int]]:
    return [row[:n] for row, n in zip(kept.positions.tolist(), kept.counts.tolist(), strict=True)]


# -- the whole rule ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    rule=rules,
    seed=st.integers(0, 2**16),
    length=st.integers(1, 70),
    budget=st.integers(1, 80),
)
def test_what_every_unit_keeps_equals_the_literal_rule(rule, seed, length, budget):
    tables, prompt = make_tables(rule, seed), Prompt(seed, length)
    kept = prompt.retain(tables, budget).kept
    assert plain(kept) == prompt.literal(tables, budget)
    assert int(kept.counts.sum()) == len(LAYERS) * min(budget, length)
    assert kept.positions.shape[1] == int(kept.counts.max()) <= length


def test_units_really_differ_in_count_and_choice():
    kept = plain(Prompt(4, 120).retain(make_tables(seed=4), 24).kept)
    assert len({len(row) for row in kept}) == len(kept)
    for a, b in combinations(map(set, kept), 2):
        assert not a <= b and not b <= a


@pytest.mark.parametrize("source", range(len(SOURCES)))
def test_one_quota_alone_keeps_the_best_of_that_source(source):
    tables = make_tables()
    quotas = np.zeros_like(tables.mix.quotas)
    quotas[..., source] = 0.3
    tables = replace(tables, mix=replace(tables.mix, quotas=quotas))
    prompt = Prompt(3, 60)
    mass, own, retrieval = (x.astype(np.float64) for x in prompt.arrays)
    for u, row in enumerate(plain(prompt.retain(tables, 16).kept)):
        scores = [
            literal.pooled(mass[u], RULE.pool),
            literal.forward_pooled(np.sqrt(own[u])),
            literal.forward_pooled(np.sqrt(retrieval)),
        ][source]
        always = [*range(RULE.sinks), *range(60 - RULE.recent, 60)]
        best = sorted(set(range(60)) - set(always), key=lambda t: -scores[t])
        assert row == sorted([*always, *best[: len(row) - len(always)]])


def test_tables_of_the_nearest_budget_are_used():
    tables, prompt = make_tables(), Prompt(4, 60)
    for budget, row in ((4, 0), (8, 0), (9, 1), (30, 1)):
        one = replace(
            tables,
            budgets=(7,),
            mix=replace(
                tables.mix,
                shares=tables.mix.shares[row : row + 1],
                quotas=tables.mix.quotas[row : row + 1],
            ),
        )
        assert plain(prompt.retain(tables, budget).kept) == plain(prompt.retain(one, budget).kept)


def test_the_mass_of_a_head_decides_only_its_own_set():
    tables, prompt = make_tables(), Prompt(5, 60)
    even = np.ones_like(tables.mix.quotas)
    tables = replace(tables, mix=replace(tables.mix, quotas=even))
    before = plain(prompt.retain(tables, 12).kept)
    prompt.mass[1] = prompt.mass[1].flip(0)
    prompt.focus.own[1] = prompt.focus.own[1].flip(0)
    after = plain(prompt.retain(tables, 12).kept)
    assert before[1] != after[1]
    assert [before[u] for u in (0, 2, 3, 4)] == [after[u] for u in (0, 2, 3, 4)]


def test_a_mix_without_its_focus_is_refused():
    index = torch.tensor(LAYERS), torch.tensor(HEADS)
    on_device = DeviceTables.of(make_tables(), *index, "cpu")
    with pytest.raises(PolicyError, match="needs the focus"):
        retain(torch.ones(5, 9), None, *index, on_device, 4, torch.zeros(()), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "table"}, "needs gate=off"),
        ({"share": "layer"}, "share=head"),
        ({"focus": 9}, "within the 8 observed positions, found 9"),
        ({"focus": 0}, "focus must be an integer >= 1"),
        ({"sinks": -1}, "sinks must be an integer >= 0"),
        ({"recent": 0}, "recent must be an integer >= 1"),
    ],
)
def test_rules_that_cannot_mix_are_refused(change, message):
    fields = {name: getattr(RULE, name) for name in RULE.__struct_fields__}
    with pytest.raises(PolicyError, match=message):
        RetentionRule(**fields | change)


def test_a_focus_beyond_the_window_matters_only_to_a_mix():
    assert RetentionRule("rule", observe=4).focus > 4


# -- its parts ---------------------------------------------------------------------------------

numbers = st.floats(0, 10, width=32)


@settings(deadline=None, max_examples=150)
@given(st.lists(numbers, min_size=1, max_size=80))
def test_forward_pooling_looks_at_every_neighbour(row):
    found = forward_pooled(torch.tensor([row, row[::-1]], dtype=torch.float32))
    for mine, given_row in zip(found.tolist(), (row, row[::-1]), strict=True):
        assert mine == pytest.approx(literal.forward_pooled(given_row), rel=1e-6, abs=1e-30)


def test_forward_pooling_of_one_peak():
    row = torch.zeros(100)
    row[50] = 2.0
    found = forward_pooled(row)
    assert found.nonzero().flatten().tolist() == list(range(48, 83))
    wanted = [2 * 0.9**2, 2 * 0.9, 2.0, 2 * 0.97, 2 * 0.97**2]
    assert found[48:53].tolist() == pytest.approx(wanted)
    assert float(found[82]) == pytest.approx(2 * 0.97**32)


@settings(deadline=None, max_examples=150)
@given(
    rule=rules,
    rows=st.integers(1, 30).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=n, max_size=n),
            min_size=1,
            max_size=3,
        )
    ),
)
def test_ranks_with_ties_and_protected_tokens(rule, rows):
    shielded = protected(len(rows[0]), rule, "cpu")
    found = ranks(torch.tensor(rows, dtype=torch.float32), shielded)
    assert found.dtype == torch.float32
    assert found.tolist() == [literal.ranks(row, rule) for row in rows]


@settings(deadline=None, max_examples=60)
@given(rule=rules, seed=st.integers(0, 2**16), length=st.integers(1, 40))
def test_mixed_scores(rule, seed, length):
    prompt = Prompt(seed, length, units=3)
    rng = np.random.default_rng(seed)
    quotas = rng.choice(np.float32([0, 0.5, 1, 2, 0.3]), size=(3, len(SOURCES)))
    found = mixed_scores(prompt.mass, prompt.focus, torch.from_numpy(quotas), rule)
    mass, own, retrieval = (x.astype(np.float64) for x in prompt.arrays)
    expected = literal.mixed_scores(mass, own, retrieval, quotas, rule)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@settings(deadline=None, max_examples=60)
@given(case=CASES, block=st.integers(1, 20), cap=st.sampled_from((0.0, 1.5)))
def test_focus_mass_equals_one_softmax_at_a_time(case, block, cap):
    found = focus_mass(
        case.q, case.k, case.query_positions, case.key_positions, case.scale, cap, block
    )
    arrays = (x.double().numpy() for x in (case.q, case.k))
    positions = (case.query_positions.tolist(), case.key_positions.tolist())
    expected = literal.focus_mass(*arrays, *positions, case.scale, cap)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(case=CASES, cut=st.integers(1, 4))
def test_focus_mass_is_additive_over_rows(case, cut):
    assume(cut < len(case.q))

    def part(rows: slice) -> torch.Tensor:
        positions = case.query_positions[rows], case.key_positions
        return focus_mass(case.q[rows], case.k, *positions, case.scale)

    both = part(slice(0, cut)) + part(slice(cut, None))
    torch.testing.assert_close(both, part(slice(None)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_focus_mass_of_any_dtype_is_float32(dtype):
    rng = np.random.default_rng(0)
    q, k = (torch.from_numpy(rng.normal(size=s)).to(dtype) for s in ((3, 2, 2, 8), (2, 9, 8)))
    positions = torch.arange(9)
    found = focus_mass(q, k, positions[6:], positions, 0.5)
    expected = focus_mass(q.float(), k.float(), positions[6:], positions, 0.5)
    assert found.dtype == torch.float32 and found.shape == (2, 2, 9)
    torch.testing.assert_close(found, expected)


@st.composite
def selections(draw):
    """(scores [R, T], thresholds [R] or None, budgets [R]), with many ties."""
    count, length = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    cell = st.sampled_from((0.0, 0.5, 0.9, 1.0, 3.0))
    line = st.lists(cell, min_size=length, max_size=length)
    scores = draw(st.lists(line, min_size=count, max_size=count))
    thresholds = draw(st.none() | st.lists(cell, min_size=count, max_size=count))
    return scores, thresholds, draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))


@settings(deadline=None, max_examples=300)
@given(
    case=selections(),
    rule=st.builds(
        RetentionRule,
        name=st.just("rule"),
        observe=st.integers(1, 12),
        keep_window=st.booleans(),
        floor=st.integers(1, 4),
        sinks=st.integers(0, 6),
        recent=st.integers(1, 9),
    ),
)
def test_selection_with_sinks_and_recent_tokens(case, rule):
    scores, thresholds, budgets = case
    length = len(scores[0])
    taus = None if thresholds is None else torch.tensor(thresholds)
    width = max(1, min(max(budgets), length))
    kept = plain(select(torch.tensor(scores), taus, torch.tensor(budgets), rule, width))
    taus = thresholds or [None] * len(scores)
    for row, score, tau, budget in zip(kept, scores, taus, budgets, strict=True):
        exact = None if tau is None else float(np.float32(tau))
        assert row == literal.select(np.float32(score).tolist(), exact, budget, rule)
        budget = min(budget, length)
        last = min(budget, max(rule.recent, rule.observe if rule.keep_window else 1))
        assert set(range(length - last, length)) <= set(row) and len(row) <= budget
        assert set(range(min(rule.sinks, budget - last))) <= set(row)


# -- budgets -----------------------------------------------------------------------------------

some_shares = st.lists(st.floats(0.25, 4, width=32), min_size=1, max_size=12)


@st.composite
def splits(draw):
    """(shares, budget, length, least)."""
    length = draw(st.integers(1, 300))
    least = draw(st.integers(1, 30))
    return draw(some_shares), draw(st.integers(1, length)), length, least


@settings(deadline=None, max_examples=300)
@given(splits())
@example(([1.0, 2.0, 3.0], 1, 10, 1))
@example(([0.25, 4.0, 4.0], 99, 100, 20))
@example(([0.25] * 5 + [4.0], 20, 1000, 20))
def test_budgets_equal_an_exact_split(split):
    shares, budget, length, least = split
    found = unit_budgets(np.float32(shares), budget, length, least)
    assert found.dtype == np.int64
    assert found.tolist() == literal.unit_budgets(shares, budget, length, least)


@settings(deadline=None, max_examples=300)
@given(splits())
def test_budgets_are_exact_in_sum_bounded_and_monotone(split):
    shares, budget, length, least = split
    found = unit_budgets(np.float32(shares), budget, length, least)
    assert int(found.sum()) == len(shares) * budget
    assert found.min() >= min(least, budget) and found.max() <= length
    order = np.argsort(shares, kind="stable")
    ascending = np.array(shares)[order]
    steps = np.diff(found[order])
    assert (steps[np.diff(ascending) > 0] >= 0).all(), "a larger share keeps less"
    assert (abs(steps[np.diff(ascending) == 0]) <= 1).all()


@settings(deadline=None, max_examples=200)
@given(splits(), st.sampled_from([2.0, 0.5, 1024.0]))
def test_only_the_proportion_of_shares_counts(split, factor):
    shares, *rest = split
    scaled = [factor * x for x in shares]
    assert unit_budgets(shares, *rest).tolist() == unit_budgets(scaled, *rest).tolist()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(1, 10),
)
def test_extreme_shares_still_add_up(shares, budget, least):
    found = unit_budgets(np.array(shares), budget, 100, least)
    assert int(found.sum()) == len(shares) * budget
    assert found.min() >= min(least, budget) and found.max() <= 100


def test_equal_shares_keep_the_budget_each():
    for budget in (1, 7, 100):
        assert unit_budgets(np.full(9, 0.3, np.float32), budget, 100, 20).tolist() == [budget] * 9


def test_a_budget_of_everything_is_everything():
    assert unit_budgets([0.1, 5.0, 1.0], 50, 50, 3).tolist() == [50] * 3
    assert unit_budgets([], 5, 50).tolist() == []


@pytest.mark.parametrize("budget", [0, -1, 51])
def test_budgets_beyond_the_prompt_are_refused(budget):
    with pytest.raises(PolicyError, match=rf"1\.\.50 tokens, found {budget}"):
        unit_budgets([1.0], budget, 50)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**16), length=st.integers(1, 200), budget=st.integers(1, 200))
def test_a_device_table_splits_over_its_own_units(seed, length, budget):
    assume(budget <= length)
    tables = make_tables(seed=seed)
    on_device = DeviceTables.of(tables, torch.tensor(LAYERS), torch.tensor(HEADS), "cpu")
    row = literal.nearest_budget(BUDGETS, budget)
    shares = tables.mix.shares[row][LAYERS, HEADS]
    least = RULE.sinks + RULE.recent
    expected = literal.unit_budgets(shares, budget, length, least)
    assert on_device.unit_budgets(budget, length).tolist() == expected


@pytest.mark.parametrize("rule", [RULES["paper"], RULES["head"]], ids=lambda rule: rule.name)
def test_without_a_mix_every_unit_has_the_budget(rule):
    empty, ones = np.zeros(0, np.float32), np.ones((3, 3), np.float32)
    budgets = (8,) if rule.gate == "table" else ()
    gate = np.ones((len(budgets), 3, 1, 1), np.float32)
    tables = RetentionTables(rule, ones, budgets, gate, empty, empty)
    on_device = DeviceTables.of(tables, torch.tensor(LAYERS), torch.tensor(HEADS), "cpu")
    for budget in (1, 5, 40):
        assert on_device.unit_budgets(budget, 40).tolist() == [budget] * 5


# -- the device --------------------------------------------------------------------------------


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_a_gpu_is_never_waited_for():
    """Fake CUDA tensors have no data: reading one on the host, or mixing devices, raises."""
    tables = make_tables()
    real = DeviceTables.of(tables, torch.tensor(LAYERS), torch.tensor(HEADS), "cpu")
    parts = (real.weights, real.gates, real.entropy_edges, real.perplexity_edges)
    with FakeTensorMode():
        on_device = DeviceTables(
            tables, *(fake(*x.shape) for x in parts), real.shares, fake(*real.quotas.shape)
        )
        index = fake(5, dtype=torch.int64)
        focus = Focus(fake(5, 40), fake(40))
        found = retain(fake(5, 40), None, index, index, on_device, 12, fake(), 1, focus)
        squares = focus_mass(
            fake(4, 3, 2, 8), fake(3, 40, 8, dtype=torch.bfloat16),
            fake(4, dtype=torch.int64), fake(40, dtype=torch.int64), 0.5, 30.0, 16,
        )  # fmt: skip
    assert found.kept.positions.device.type == squares.device.type == "cuda"
    assert found.kept.positions.shape == (5, int(real.unit_budgets(12, 40).max()))
    assert squares.shape == (3, 2, 40)

"""Window mass against one softmax row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpolicy.retention import window_mass
from tests.kvpolicy.retention import literal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case:
    """Random queries and keys in shuffled slots, some empty and full of NaN."""

    def __init__(self, seed: int, n: int, heads: int, group: int, tokens: int, empty: int) -> None:
        rng = np.random.default_rng(seed)
        slots = tokens + empty
        self.scale = float(rng.uniform(0.2, 1.5))
        self.q = torch.from_numpy(rng.normal(size=(n, heads, group, 6))).float()
        self.k = torch.from_numpy(rng.normal(size=(heads, slots, 6))).float()
        self.key_positions = torch.full((slots,), -1)
        places = torch.from_numpy(rng.permutation(slots)[:tokens])
        self.key_positions[places] = torch.from_numpy(rng.permutation(tokens))
        self.k[:, self.key_positions < 0] = torch.nan
        self.query_positions = torch.from_numpy(rng.integers(0, tokens, size=n))

    def mass(self, **options) -> torch.Tensor:
        return window_mass(
            self.q, self.k, self.query_positions, self.key_positions, self.scale, **options
        )

    def literal(self, logit_cap: float = 0.0) -> np.ndarray:
        arrays = (x.double().numpy() for x in (self.q, self.k))
        positions = (self.query_positions.tolist(), self.key_positions.tolist())
        return literal.window_mass(*arrays, *positions, self.scale, logit_cap)


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**20),
    n=st.integers(1, 5),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 14),
    empty=st.integers(0, 4),
)


@settings(deadline=None, max_examples=60)
@given(
    case=CASES,
    block=st.integers(1, 20),
    cap=st.sampled_from((0.0, 1.5)),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_softmax_of_each_row(case, block, cap, dtype):
    case.q, case.k = case.q.to(dtype), case.k.to(dtype)
    mass = case.mass(block=block, logit_cap=cap)
    assert mass.dtype == torch.float32 and mass.shape == case.k.shape[:2]
    np.testing.assert_allclose(mass.numpy(), case.literal(cap), rtol=2e-5, atol=2e-6)


@settings(deadline=None, max_examples=40)
@given(case=CASES, cut=st.integers(0, 5))
def test_adds_up_over_chunks_of_queries(case, cut):
    parts = torch.zeros(case.k.shape[:2])
    for rows in (slice(0, cut), slice(cut, None)):
        if len(case.q[rows]):
            positions = case.query_positions[rows]
            parts += window_mass(case.q[rows], case.k, positions, case.key_positions, case.scale)
    torch.testing.assert_close(parts, case.mass(), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(case=CASES)
def test_each_query_spreads_one_over_what_it_may_read(case):
    mass = case.mass()
    torch.testing.assert_close(mass.sum(1), torch.full(mass.shape[:1], float(len(case.q))))
    empty = case.key_positions < 0
    unread = empty | (case.key_positions > case.query_positions.max())
    assert (mass[:, unread] == 0).all() and (mass[:, ~unread] >= 0).all()


def test_what_lies_in_empty_slots_does_not_matter():
    case = Case(3, n=4, heads=2, group=2, tokens=9, empty=3)
    reference = case.mass()
    for junk in (0.0, torch.inf, 1e30):
        case.k[:, case.key_positions < 0] = junk
        assert torch.equal(case.mass(), reference)


def test_a_query_that_may_read_nothing_adds_nothing():
    case = Case(5, n=2, heads=1, group=2, tokens=4, empty=1)
    case.query_positions = torch.tensor([3, 2])
    alone = case.mass()
    case.q = torch.cat([case.q, case.q[:1]])
    case.query_positions = torch.tensor([3, 2, -1])
    torch.testing.assert_close(case.mass(), alone)
    case.key_positions[:] = -1
    assert (case.mass() == 0).all()


def test_large_logits_do_not_overflow():
    case = Case(7, n=3, heads=2, group=1, tokens=8, empty=0)
    case.scale *= 1e4
    np.testing.assert_allclose(case.mass(block=3).numpy(), case.literal(), atol=1e-5)


class Largest(TorchDispatchMode):
    """Most elements of any tensor made inside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0) if sizes else self.numel
        return result


@pytest.mark.parametrize("block", [64, 256])
def test_never_holds_the_logits_of_all_keys(block):
    q, k = torch.randn(16, 2, 3, 4), torch.randn(2, 4096, 4, dtype=torch.bfloat16)
    with Largest() as seen:
        mass = window_mass(q, k, torch.arange(4080, 4096), torch.arange(4096), 0.5, block=block)
    assert mass.shape == (2, 4096)
    assert seen.numel <= max(k.numel(), 2 * 16 * 3 * block)

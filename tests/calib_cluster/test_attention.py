"""Blockwise attention against dense masked attention, and the memory it takes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from calib_cluster import attention
from calib_cluster.attention import HeadInputs, attend, judge
from kvpolicy.windows import FULL
from tests.calib_cluster.brute_force import Seen

KEY_DIM, VALUE_DIM = 8, 5
FIVE = st.integers(1, 5)
BLOCKS = st.sampled_from([1, 3, 8, 16, 128])
TILES = st.sampled_from([1, 5, 16, 32, 2048])


def random_inputs(
    length: int, kv_heads: int, group: int, softcap: float | None = None, seed: int = 0
) -> HeadInputs:
    """Spiky attention: logits have a standard deviation of about 3."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, length, dim, generator=generator)

    q, k = 3 * draw(kv_heads * group, KEY_DIM), draw(kv_heads, KEY_DIM)
    return HeadInputs(q, k, draw(kv_heads, VALUE_DIM), KEY_DIM**-0.5, softcap)


def dense(inputs: HeadInputs) -> Seen:
    """The same inputs for dense attention, under no mask but the windows'."""
    every = torch.ones(inputs.length, inputs.length, dtype=torch.bool)
    return Seen(inputs.q, inputs.k, inputs.v, inputs.scaling, inputs.softcap, every)


@contextmanager
def sizes(block: int, tile: int) -> Iterator[None]:
    """Other block sizes, so that short prompts cross many borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK", block)
        patch.setattr(attention, "KEY_TILE", tile)
        yield


@st.composite
def cases(draw) -> tuple[HeadInputs, list[int], int]:
    """(inputs, codebook, sinks), with lengths drawn to where windows and sinks begin to bind."""
    codebook = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))
    sinks = draw(st.integers(0, 24))
    window = draw(st.sampled_from(codebook))
    border = draw(st.sampled_from([window, window + sinks, sinks])) + draw(st.integers(-1, 1))
    length = draw(st.one_of(st.just(max(1, border)), st.integers(1, 90)))
    softcap = draw(st.sampled_from([None, 2.0, 30.0]))
    heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return random_inputs(length, heads, group, softcap, draw(FIVE)), codebook, sinks


# T < window; T = window + sinks (nothing hidden) and one more; sinks beyond a block and beyond T
SHORT = (random_inputs(9, 2, 2), [10, 12], 0)
EQUAL = (random_inputs(24, 2, 2), [3, 20], 4)
ONE_BINDS = (random_inputs(25, 2, 2), [3, 20], 4)
MANY_SINKS = (random_inputs(60, 2, 3, softcap=5.0), [3, 16], 20)
ONLY_SINKS = (random_inputs(15, 1, 1), [3], 24)


@given(case=cases(), block=BLOCKS, tile=TILES)
@example(case=SHORT, block=8, tile=5)
@example(case=EQUAL, block=8, tile=5)
@example(case=ONE_BINDS, block=8, tile=5)
@example(case=MANY_SINKS, block=8, tile=16)
@example(case=ONLY_SINKS, block=8, tile=5)
@settings(max_examples=150, deadline=None)
def test_judge_sums_the_cosines_of_dense_attention(case, block, tile):
    inputs, codebook, sinks = case
    with sizes(block, tile):
        found = judge(inputs, codebook, sinks)
    sums, counts = dense(inputs).mean_cosines(codebook, sinks)
    assert found.sums.dtype == torch.float64
    assert (found.positions * found.group).tolist() == counts
    torch.testing.assert_close(found.sums, sums, rtol=0, atol=1e-4)


@given(case=cases(), block=BLOCKS, tile=TILES, data=st.data())
@settings(max_examples=150, deadline=None)
def test_attend_is_dense_attention_with_a_window_per_head(case, block, tile, data):
    inputs, codebook, sinks = case
    heads = inputs.k.shape[0]
    window = st.sampled_from([*codebook, FULL])
    windows = data.draw(st.lists(window, min_size=heads, max_size=heads))
    with sizes(block, tile):
        out = attend(inputs, torch.tensor(windows), sinks)
    expected = dense(inputs).attend(windows, sinks).transpose(0, 1)
    assert out.shape == (inputs.length, inputs.q.shape[0], VALUE_DIM)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("length", [attention.QUERY_BLOCK - 1, attention.KEY_TILE + 70])
def test_with_the_sizes_that_are_used(length):
    inputs = random_inputs(length, 2, 2)
    codebook = [20, 64, 1000]
    sums, counts = dense(inputs).mean_cosines(codebook, 4)
    found = judge(inputs, codebook, 4)
    assert (found.positions * found.group).tolist() == counts
    torch.testing.assert_close(found.sums, sums, rtol=0, atol=2e-3)
    out = attend(inputs, torch.tensor([64, FULL]), 4)
    expected = dense(inputs).attend([64, FULL], 4).transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_half_precision_inputs_are_computed_in_float32():
    """Only inputs and output are rounded to bfloat16: sums equal those of float32 copies."""
    full = random_inputs(200, 2, 2)
    q, k, v = (tensor.bfloat16() for tensor in (full.q, full.k, full.v))
    half = HeadInputs(q, k, v, full.scaling)
    same = HeadInputs(q.float(), k.float(), v.float(), full.scaling)
    assert torch.equal(judge(half, [8, 64], 4).sums, judge(same, [8, 64], 4).sums)
    out = attend(half, torch.tensor([8, FULL]), 4)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(same, torch.tensor([8, FULL]), 4).bfloat16())


def test_huge_logits_stay_finite():
    """Online softmax subtracts the maximum: logits of +-10^4 neither overflow nor vanish."""
    spiky = random_inputs(150, 2, 1)
    inputs = HeadInputs(spiky.q * 3000, spiky.k, spiky.v, spiky.scaling)
    with sizes(16, 8):
        found = judge(inputs, [8, 32], 2)
        out = attend(inputs, torch.tensor([8, FULL]), 2)
    sums, _ = dense(inputs).mean_cosines([8, 32], 2)
    torch.testing.assert_close(found.sums, sums, rtol=0, atol=0.02)
    expected = dense(inputs).attend([8, FULL], 2).transpose(0, 1)
    # a logit of 10^4 is rounded by 10^-3, so near ties are off by as much
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-3)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations inside made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._live = 0
        self._users: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if _has_bytes(t)}
        for tensor in filter(_has_bytes, tree_leaves(out)):
            self._count(tensor, known)
        self.peak = max(self.peak, self._live)
        return out

    def _count(self, tensor: torch.Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in known and not self._users[address]:
            return  # a view of an input
        self._live += 0 if self._users[address] else size
        self._users[address] += 1
        self.largest = max(self.largest, size)
        weakref.finalize(tensor, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._users[address] -= 1
        self._live -= 0 if self._users[address] else size


def _has_bytes(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > 0


def bytes_of(task: Callable[[], object]) -> LiveBytes:
    """What ``task`` had alive at once, apart from its inputs."""
    with LiveBytes() as live:
        task()
    return live


TASKS = {
    "judge": lambda inputs: judge(inputs, [64, 256, 900], 4),
    "attend": lambda inputs: attend(inputs, torch.tensor([64, FULL]), 4),
}


@pytest.mark.parametrize("name", TASKS)
def test_memory_grows_with_the_length_not_its_square(name):
    """From T to 2T beyond the key tile, what is alive at once less than doubles.

    A [T, T] matrix would make it four times as much; that the meter sees one is checked too.
    """
    task, length = TASKS[name], attention.KEY_TILE
    inputs, longer = random_inputs(length, 2, 1), random_inputs(2 * length, 2, 1)
    once, twice = bytes_of(lambda: task(inputs)), bytes_of(lambda: task(longer))
    matrix = 4 * (2 * length) ** 2
    assert twice.peak < 2 * once.peak
    assert twice.largest < matrix / 4
    assert bytes_of(lambda: longer.q[0] @ longer.k[0].T).peak >= matrix

"""The decode work list: every token once, in even items, against a plain model of the rule."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashinfer_ext.contract import DecodeBatch, FrozenPrompts, LayerHeads
from flashinfer_ext.triton_work import CHUNK_STEP, WorkList
from tests.flashinfer_ext.cases import FULL, GARBAGE, reads

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lengths of a batch's rows, and (window, sinks) of every head [L][H]; ``prompts`` of the
    rows' frozen prompts (0: none) with ``kept`` tokens of every [L][H][row]."""

    lengths: list[int]
    heads: list[list[tuple[int, int]]]
    prompts: list[int] | None = None
    kept: list[list[list[int]]] | None = None

    @property
    def frozen(self) -> bool:
        return self.prompts is not None

    def tokens(self, layer: int) -> list[int]:
        """What each row of a layer reads, counted token by token."""
        return [
            self._tokens(layer, head, row)
            for row in range(len(self.lengths))
            for head in range(len(self.heads[layer]))
        ]

    def _tokens(self, layer: int, head: int, row: int) -> int:
        length = self.lengths[row]
        window, sinks = self.heads[layer][head]
        if not length:
            return 0
        if self.frozen and self.prompts[row] and window == FULL:
            return self.kept[layer][head][row] + length - self.prompts[row]
        return int(reads(length - 1, window, sinks, length).sum())


def layer_heads(batch: Batch, device: str) -> LayerHeads:
    """Units are numbered backwards, so that a unit is not its head's index."""
    layers, count = len(batch.heads), len(batch.heads[0])
    units = torch.arange(layers * count).flip(0).view(layers, count)
    both = torch.tensor(batch.heads).view(layers, count, 2)
    return LayerHeads(*(x.int().to(device) for x in (units, both[..., 0], both[..., 1])))


def decode_batch(batch: Batch, device: str) -> DecodeBatch:
    """Request slots are numbered backwards; those of padded rows are out of bounds."""
    last = len(batch.lengths) - 1
    slots = [last - row if n else GARBAGE for row, n in enumerate(batch.lengths)]
    ints = {"dtype": torch.int32, "device": device}
    return DecodeBatch(torch.tensor(slots, **ints), torch.tensor(batch.lengths, **ints))


def frozen_prompts(batch: Batch, device: str) -> FrozenPrompts | None:
    if not batch.frozen:
        return None
    rows, units = len(batch.lengths), len(batch.heads) * len(batch.heads[0])
    counts = torch.tensor(batch.kept).view(units, rows).T.flip(0, 1).int().contiguous().to(device)
    prompts = torch.tensor(batch.prompts).flip(0).int().to(device)
    starts = torch.zeros(rows, units, dtype=torch.int64, device=device)
    return FrozenPrompts(prompts, counts, starts, torch.zeros(1, dtype=torch.int32, device=device))


def filled(batch: Batch, target: int, device: str, spare_rows: int = 0) -> WorkList:
    """A work list written over stale buffers."""
    layers, count = len(batch.heads), len(batch.heads[0])
    rows = (len(batch.lengths) + spare_rows) * count
    work = WorkList.allocate(layers, rows, target, device)
    for array in vars(work).values():
        if torch.is_tensor(array):
            array.fill_(-7 if array.dim() == 1 else 3)
    heads = layer_heads(batch, device)
    work.fill(decode_batch(batch, device), heads, frozen_prompts(batch, device))
    return work


def check(batch: Batch, work: WorkList, layer: int, target: int) -> None:
    """Everything that a decode launch relies on."""
    tokens = batch.tokens(layer)
    rows, total = len(tokens), sum(tokens)
    wanted = -(-total // target)
    chunk = max(CHUNK_STEP, -(-wanted // CHUNK_STEP) * CHUNK_STEP)
    assert int(work.chunks[layer]) == chunk
    parts = [max(1, -(-n // chunk)) for n in tokens]
    assert work.row_lengths[layer, :rows].tolist() == tokens
    assert work.row_parts[layer, :rows].tolist() == parts
    assert sum(parts) <= rows + target == work.items(rows)

    item_rows = work.item_rows[layer, : rows + target].tolist()
    item_parts = work.item_parts[layer, : rows + target].tolist()
    assert item_rows[sum(parts) :] == [-1] * (rows + target - sum(parts))
    covered = {row: [] for row in range(rows)}
    for row, part in zip(item_rows, item_parts, strict=True):
        if row >= 0:
            covered[row] += range(part * chunk, min((part + 1) * chunk, tokens[row]))
    assert [sorted(covered[row]) for row in range(rows)] == [list(range(n)) for n in tokens]
    firsts = work.row_firsts[layer, :rows].tolist()
    places = sorted(
        p for first, n in zip(firsts, parts, strict=True) for p in range(first, first + n)
    )
    assert places == list(range(sum(parts))), "partial results would share a place"
    sizes = [
        min(chunk, tokens[row] - part * chunk)
        for row, part in zip(item_rows, item_parts, strict=True)
        if row >= 0
    ]
    long = [2 * size >= chunk for size in sizes]
    assert long == sorted(long, reverse=True), "a long item behind a short one"


@pytest.mark.parametrize("target", [1, 3, 8])
def test_one_long_head_among_windows_is_cut_evenly(device, target):
    """The reason for the list: a launch never waits for the one unlimited head."""
    batch = Batch([2048, 2048], [[(FULL, 0), *[(64, 4)] * 7]])
    work = filled(batch, target, device)
    check(batch, work, 0, target)
    total = 2 * (2048 + 7 * 68)
    assert int(work.chunks[0]) - CHUNK_STEP < max(CHUNK_STEP, total / target)
    assert int(work.row_parts[0].max()) == -(-2048 // int(work.chunks[0]))


def test_a_frozen_prompt_is_its_kept_tokens(device):
    """In heads of unlimited history only, and in frozen requests only."""
    heads = [[(FULL, 4), (50, 4)], [(FULL, 0), (FULL, 17)]]
    kept = [[[90, 0, 7], [0, 0, 0]], [[100, 0, 0], [0, 0, 64]]]
    batch = Batch([300, 280, 70], heads, [100, 0, 64], kept)
    work = filled(batch, 6, device)
    for layer in range(2):
        check(batch, work, layer, 6)


@pytest.mark.parametrize("length", [0, 1, CHUNK_STEP - 1, CHUNK_STEP, CHUNK_STEP + 1, 256, 257])
def test_around_the_chunk_size(device, length):
    batch = Batch([length, 0, 1], [[(FULL, 4), (17, 4)]])
    check(batch, filled(batch, 2, device), 0, 2)


def test_more_items_than_one_block_of_them(device):
    """Items are cleared 256 at a time."""
    batch = Batch([3] * 90 + [0], [[(FULL, 0), (2, 0), (2, 1)]])
    check(batch, filled(batch, 300, device, spare_rows=3), 0, 300)


def test_a_smaller_batch_leaves_nothing_of_a_larger_one(device):
    large, small = Batch([700, 500, 300], [[(FULL, 0)]]), Batch([70], [[(FULL, 0)]])
    work = filled(large, 8, device)
    check(large, work, 0, 8)
    work.fill(decode_batch(small, device), layer_heads(small, device))
    check(small, work, 0, 8)


def test_too_many_rows_are_refused_before_anything_is_written(device):
    batch = Batch([5, 6], [[(FULL, 0), (FULL, 0)]])
    work = WorkList.allocate(1, 3, 4, device)
    with pytest.raises(ValueError, match="4 rows, the buffers hold 3"):
        work.fill(decode_batch(batch, device), layer_heads(batch, device))
    assert int(work.item_rows.abs().sum()) == 0


def windows():
    return st.tuples(st.sampled_from([FULL, FULL, 16, 64, 100]), st.sampled_from([0, 4, 16, 17]))


@st.composite
def batches(draw) -> Batch:
    length = st.integers(0, 20) | st.integers(60, 70) | st.integers(100, 700)
    lengths = draw(st.lists(length, min_size=1, max_size=5))
    layers, count = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = [[draw(windows()) for _ in range(count)] for _ in range(layers)]
    if not draw(st.booleans()):
        return Batch(lengths, heads)
    prompts = [draw(st.integers(0, n - 1)) if n > 1 else 0 for n in lengths]
    kept = [[[draw(st.integers(0, p)) for p in prompts] for _ in range(count)] for _ in heads]
    return Batch(lengths, heads, prompts, kept)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), target=st.integers(1, 12) | st.just(64), spare=st.integers(0, 2))
def test_every_token_is_in_one_item(device, batch, target, spare):
    work = filled(batch, target, device, spare)
    for layer in range(len(batch.heads)):
        check(batch, work, layer, target)

"""Random ragged decode cases: every slot that no row may read holds NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from flashinfer_ext.contract import (
    ArenaLayout,
    DecodeBatch,
    ExtendBatch,
    FrozenPrompts,
    LayerHeads,
    PageTable,
    read_range,
)

FULL = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """Sizes of a case."""

    lengths: tuple[int, ...]
    heads: int = 2
    group: int = 3
    head_dim: int = 64
    v_head_dim: int | None = None
    page: int = 16
    layers: int = 1
    windows: tuple[int, ...] = (FULL,)
    sinks: tuple[int, ...] = (0, 4, 16, 17)
    dtype: torch.dtype = torch.float32
    frozen: bool = False


@dataclass
class Case:
    """One arena with a batch on it. ``written``: bool [NP, P], slots that hold a row's token."""

    layout: ArenaLayout
    arena: torch.Tensor
    table: PageTable
    heads: LayerHeads
    batch: DecodeBatch
    frozen: FrozenPrompts | None
    q: torch.Tensor
    written: torch.Tensor = field(repr=False)


def make_case(shape: Shape, seed: int, device: str = "cpu") -> Case:
    """Every unit of every request owns pages of its own, scattered over the arena; only what the
    newest query reads is written, all else is NaN. Request slots are dealt at random too."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    size, rows, units = shape.page, len(shape.lengths), shape.layers * shape.heads
    v_dim = shape.v_head_dim or shape.head_dim
    deep = max(shape.lengths) // size + 2
    logical = 1 + rows * deep
    num_pages = 1 + 2 * rows * units * deep
    layout = ArenaLayout(num_pages, size, shape.head_dim, v_dim)
    free = rng.sample(range(1, num_pages), num_pages - 1)
    slots_of = rng.sample(range(2 * rows), rows)
    table = PageTable(
        torch.zeros(units, logical, dtype=torch.int32),
        torch.zeros(2 * rows, max(*shape.lengths, 1), dtype=torch.int32),
    )
    order = rng.sample(range(units), units)
    windows = [rng.choice(shape.windows) for _ in range(units)]
    sinks = [0 if w == FULL else rng.choice(shape.sinks) for w in windows]
    grid = (shape.layers, shape.heads)
    heads = LayerHeads(*(torch.tensor(x, dtype=torch.int32).view(grid) for x in (
        order, windows, sinks)))  # fmt: skip
    fz = _Frozen(2 * rows, units) if shape.frozen else None
    written = torch.zeros(num_pages, size, dtype=torch.bool)
    names = rng.sample(range(1, logical), logical - 1)
    for r, length in enumerate(shape.lengths):
        mine = [names.pop() for _ in range(-(-length // size))]
        for t in range(length):
            table.slots[slots_of[r], t] = mine[t // size] * size + t % size
        prompt = rng.randint(1, length - 1) if fz and length > 1 and rng.random() < 0.6 else 0
        for cell, unit in enumerate(order):
            kept = rng.randint(1, prompt) if prompt and windows[cell] == FULL else 0
            if kept:
                pages = [free.pop() for _ in range(-(-kept // size))]
                fz.add(slots_of[r], unit, prompt, kept, pages)
                for t in range(kept):
                    written[pages[t // size], t % size] = True
            span = read_range(length, windows[cell], sinks[cell], prompt if kept else 0, kept)
            places = [*range(span.gap_at), *range(span.gap_at + span.gap, length)]
            for t in places if length else ():
                page = table.pages[unit, mine[t // size]]
                if not page:
                    table.pages[unit, mine[t // size]] = page = free.pop()
                written[page, t % size] = True
    arena = torch.full((num_pages, layout.page_elements), float("nan"), dtype=shape.dtype)
    for store in (layout.keys(arena), layout.values(arena)):
        store[written] = torch.randn(int(written.sum()), store.shape[-1], generator=gen).to(
            shape.dtype
        )
    batch = DecodeBatch(
        torch.tensor(slots_of, dtype=torch.int32), torch.tensor(shape.lengths, dtype=torch.int32)
    )
    q = torch.randn(rows, shape.heads * shape.group, shape.head_dim, generator=gen)
    moved = [_to(x, device) for x in (table, heads, batch, fz and fz.build())]
    return Case(
        layout, arena.to(device), moved[0], moved[1], moved[2], moved[3],
        q.to(shape.dtype).to(device), written,
    )  # fmt: skip


class _Frozen:
    def __init__(self, slots: int, units: int) -> None:
        self.prompts = torch.zeros(slots, dtype=torch.int32)
        self.counts = torch.zeros(slots, units, dtype=torch.int32)
        self.starts = torch.zeros(slots, units, dtype=torch.int64)
        self.pages: list[int] = [0, 0, 0]

    def add(self, slot: int, unit: int, prompt: int, kept: int, pages: list[int]) -> None:
        self.prompts[slot], self.counts[slot, unit] = prompt, kept
        self.starts[slot, unit] = len(self.pages)
        self.pages += pages

    def build(self) -> FrozenPrompts:
        pages = torch.tensor(self.pages, dtype=torch.int32)
        return FrozenPrompts(self.prompts, self.counts, self.starts, pages)


def _to(bundle, device: str):
    if bundle is None:
        return None
    return type(bundle)(**{k: v.to(device) for k, v in vars(bundle).items()})


@dataclass(frozen=True)
class ExtendShape:
    """Sizes of an extend case: ``chunks`` (begin, length) of every request."""

    chunks: tuple[tuple[int, int], ...]
    heads: int = 2
    group: int = 3
    head_dim: int = 64
    v_head_dim: int | None = None
    page: int = 16
    layers: int = 1
    windows: tuple[int, ...] = (FULL,)
    sinks: tuple[int, ...] = (0, 4, 16, 17)
    dtype: torch.dtype = torch.float32


@dataclass
class ExtendCase:
    """One arena with chunks to prefill."""

    layout: ArenaLayout
    arena: torch.Tensor
    heads: LayerHeads
    batch: ExtendBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_extend_case(shape: ExtendShape, seed: int, device: str = "cpu") -> ExtendCase:
    """History pages hold what the chunk's first query reads, and a page more where there is one;
    slots without a token (also those of the chunk in a shared page) are NaN."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    size, units, requests = shape.page, shape.layers * shape.heads, len(shape.chunks)
    v_dim = shape.v_head_dim or shape.head_dim
    deep = max(begin for begin, _ in shape.chunks) // size + 3
    num_pages = 1 + 2 * units * requests * deep
    layout = ArenaLayout(num_pages, size, shape.head_dim, v_dim)
    free = rng.sample(range(1, num_pages), num_pages - 1)
    order = rng.sample(range(units), units)
    windows = [rng.choice(shape.windows) for _ in range(units)]
    sinks = [0 if w == FULL else rng.choice(shape.sinks) for w in windows]
    grid = (shape.layers, shape.heads)
    heads = LayerHeads(*(torch.tensor(x, dtype=torch.int32).view(grid) for x in (
        order, windows, sinks)))  # fmt: skip
    written = torch.zeros(num_pages, size, dtype=torch.bool)
    pages, positions = [0] * rng.randint(0, 3), [-1] * rng.randint(0, 40)
    page_starts = torch.zeros(units, requests, dtype=torch.int64)
    position_starts = page_starts.clone()
    counts = torch.zeros(units, requests, dtype=torch.int32)
    for r, (begin, _) in enumerate(shape.chunks):
        for cell, unit in enumerate(order):
            first = max(0, begin - windows[cell] + 1 - rng.choice((0, size))) // size
            below = min(-(-sinks[cell] // size), first)
            index = [*range(below), *range(first, -(-begin // size))]
            page_starts[unit, r], position_starts[unit, r] = len(pages), len(positions)
            counts[unit, r] = len(index) * size
            for g in index:
                pages.append(free.pop())
                tokens = [t if t < begin else -1 for t in range(g * size, (g + 1) * size)]
                positions += tokens
                written[pages[-1]] = torch.tensor(tokens) >= 0
    arena = torch.full((num_pages, layout.page_elements), float("nan"), dtype=shape.dtype)
    for store in (layout.keys(arena), layout.values(arena)):
        store[written] = torch.randn(int(written.sum()), store.shape[-1], generator=gen).to(
            shape.dtype
        )
    lengths = torch.tensor([0, *(n for _, n in shape.chunks)])
    batch = ExtendBatch(
        lengths.cumsum(0).int(), torch.tensor([b for b, _ in shape.chunks], dtype=torch.int32),
        page_starts, position_starts, counts, torch.tensor(pages, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32), int(lengths.max()),
    )  # fmt: skip
    total = int(lengths.sum())

    def fresh(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(total, heads, dim, generator=gen).to(shape.dtype).to(device)

    q = fresh(shape.heads * shape.group, shape.head_dim)
    k, v = fresh(shape.heads, shape.head_dim), fresh(shape.heads, v_dim)
    moved = {n: x.to(device) if torch.is_tensor(x) else x for n, x in vars(batch).items()}
    return ExtendCase(layout, arena.to(device), _to(heads, device), ExtendBatch(**moved), q, k, v)

"""Random ragged cases: every slot that no row may read holds NaN.

What a query reads is worked out here from the rule in words (keys ``[0, sinks)`` and the last
``window``), not from the package's own arithmetic, and a dense copy of the tokens is kept.
"""

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
)

FULL = 2**31 - 1
GARBAGE = 10**6
"""Stands where nothing may look: an index that would fall outside of every array."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a case. Each head's window and sinks are drawn from those given."""

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


@dataclass(frozen=True)
class Dense:
    """One request's tokens in one head: ``k`` [L, D], ``v`` [L, Dv]; ``read`` bool [L], what the
    newest query reads (decode) or what some query of the chunk reads (extend)."""

    k: torch.Tensor
    v: torch.Tensor
    read: torch.Tensor


@dataclass
class Case:
    """One arena with a batch on it. ``written``: bool [NP, P], slots that hold a row's token;
    ``dense[layer, head, row]`` the tokens themselves, on the CPU."""

    layout: ArenaLayout
    arena: torch.Tensor
    table: PageTable
    heads: LayerHeads
    batch: DecodeBatch
    frozen: FrozenPrompts | None
    q: torch.Tensor
    written: torch.Tensor = field(repr=False)
    dense: dict[tuple[int, int, int], Dense] = field(repr=False)


def reads(query: int, window: int, sinks: int, keys: int) -> torch.Tensor:
    """bool [keys]: what a query at position ``query`` reads, token by token."""
    seen = [j < sinks or max(0, query - window + 1) <= j for j in range(keys)]
    return torch.tensor(seen, dtype=torch.bool) & (torch.arange(keys) <= query)


def make_case(shape: Shape, seed: int, device: str = "cpu") -> Case:
    """Every unit of every request owns pages of its own, scattered over the arena; only what the
    newest query reads is written, all else is NaN. Request slots are dealt at random too."""
    return _DecodeBuilder(shape, seed).build(device)


class _Arena:
    """Scattered pages of an arena that starts as NaN, and random heads."""

    def __init__(self, shape: Shape | ExtendShape, seed: int, pages: int) -> None:
        self.shape, self.rng = shape, random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.size, units = shape.page, shape.layers * shape.heads
        v_dim = shape.v_head_dim or shape.head_dim
        self.layout = ArenaLayout(pages, shape.page, shape.head_dim, v_dim)
        nan = float("nan")
        self.arena = torch.full((pages, self.layout.page_elements), nan, dtype=shape.dtype)
        self.free = self.rng.sample(range(1, pages), pages - 1)
        self.order = self.rng.sample(range(units), units)
        self.windows = [self.rng.choice(shape.windows) for _ in range(units)]
        self.sinks = [self.rng.choice(shape.sinks) for _ in range(units)]
        self.written = torch.zeros(pages, shape.page, dtype=torch.bool)

    def heads(self) -> LayerHeads:
        grid = (self.shape.layers, self.shape.heads)
        arrays = (self.order, self.windows, self.sinks)
        return LayerHeads(*(torch.tensor(x, dtype=torch.int32).view(grid) for x in arrays))

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.gen).to(self.shape.dtype)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.randn(count, self.layout.head_dim),
            self.randn(count, self.layout.v_head_dim),
        )

    def write(self, page: int, slot: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.layout.keys(self.arena)[page, slot] = k
        self.layout.values(self.arena)[page, slot] = v
        self.written[page, slot] = True


class _DecodeBuilder(_Arena):
    def __init__(self, shape: Shape, seed: int) -> None:
        self.rows, units = len(shape.lengths), shape.layers * shape.heads
        self.deep = max(shape.lengths) // shape.page + 2
        super().__init__(shape, seed, 1 + 2 * self.rows * units * self.deep)
        logical = 1 + self.rows * self.deep
        self.slots_of = self.rng.sample(range(2 * self.rows), self.rows)
        self.names = self.rng.sample(range(1, logical), logical - 1)
        self.table = PageTable(
            torch.zeros(units, logical, dtype=torch.int32),
            torch.zeros(2 * self.rows, max(*shape.lengths, 1), dtype=torch.int32),
        )
        self.frozen = _Frozen(2 * self.rows, units) if shape.frozen else None
        self.dense: dict[tuple[int, int, int], Dense] = {}

    def build(self, device: str) -> Case:
        shape = self.shape
        for row, length in enumerate(shape.lengths):
            if length:
                self._request(row, length)
            else:
                self.slots_of[row] = GARBAGE
        batch = DecodeBatch(
            torch.tensor(self.slots_of, dtype=torch.int32),
            torch.tensor(shape.lengths, dtype=torch.int32),
        )
        q = self.randn(self.rows, shape.heads * shape.group, shape.head_dim)
        frozen = self.frozen and self.frozen.build()
        table, heads, batch, frozen = (
            _to(x, device) for x in (self.table, self.heads(), batch, frozen)
        )
        return Case(
            self.layout, self.arena.to(device), table, heads, batch, frozen, q.to(device),
            self.written, self.dense,
        )  # fmt: skip

    def _request(self, row: int, length: int) -> None:
        size, slot = self.size, self.slots_of[row]
        mine = [self.names.pop() for _ in range(-(-length // size))]
        for t in range(length):
            self.table.slots[slot, t] = mine[t // size] * size + t % size
        freeze = self.frozen and length > 1 and self.rng.random() < 0.6
        prompt = self.rng.randint(1, length - 1) if freeze else 0
        if prompt:
            self.frozen.prompts[slot] = prompt
        for cell, unit in enumerate(self.order):
            k, v = self.tokens(length)
            seen = reads(length - 1, self.windows[cell], self.sinks[cell], length)
            own = seen.clone()
            if prompt and self.windows[cell] == FULL:
                own[:prompt] = False
                kept = sorted(self.rng.sample(range(prompt), self.rng.randint(0, prompt)))
                seen = own.clone()
                seen[kept] = True
                self._freeze(slot, unit, [(k[t], v[t]) for t in kept])
            for t in own.nonzero().flatten().tolist():
                page = int(self.table.pages[unit, mine[t // size]])
                if not page:
                    self.table.pages[unit, mine[t // size]] = page = self.free.pop()
                self.write(page, t % size, k[t], v[t])
            layer, head = divmod(cell, self.shape.heads)
            self.dense[layer, head, row] = Dense(k, v, seen)

    def _freeze(self, slot: int, unit: int, tokens: list) -> None:
        pages = [self.free.pop() for _ in range(-(-len(tokens) // self.size))]
        self.frozen.add(slot, unit, len(tokens), pages)
        for index, (k, v) in enumerate(tokens):
            self.write(pages[index // self.size], index % self.size, k, v)


class _Frozen:
    """Counts and starts of units that are not frozen are garbage: nobody may read them."""

    def __init__(self, slots: int, units: int) -> None:
        self.prompts = torch.zeros(slots, dtype=torch.int32)
        self.counts = torch.full((slots, units), GARBAGE, dtype=torch.int32)
        self.starts = torch.full((slots, units), GARBAGE, dtype=torch.int64)
        self.pages: list[int] = [0, 0, 0]

    def add(self, slot: int, unit: int, kept: int, pages: list[int]) -> None:
        self.counts[slot, unit], self.starts[slot, unit] = kept, len(self.pages)
        self.pages += pages

    def build(self) -> FrozenPrompts:
        pages = torch.tensor(self.pages, dtype=torch.int32)
        return FrozenPrompts(self.prompts, self.counts, self.starts, pages)


def _to(bundle, device: str):
    if bundle is None:
        return None
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in vars(bundle).items()}
    return type(bundle)(**moved)


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
    """One arena with chunks to prefill. ``dense[layer, head, request]``: the history's tokens
    (k and v [begin, ...]), on the CPU; the chunk's own are rows of ``k`` and ``v``."""

    layout: ArenaLayout
    arena: torch.Tensor
    heads: LayerHeads
    batch: ExtendBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dense: dict[tuple[int, int, int], Dense] = field(repr=False)


def make_extend_case(shape: ExtendShape, seed: int, device: str = "cpu") -> ExtendCase:
    """History pages hold what the chunk's first query reads, and sometimes a page more.

    Slots of tokens that no query reads are either there, to be masked, or NaN and not listed;
    those of the chunk itself in a page it shares with its history are NaN, listed or not.
    """
    return _ExtendBuilder(shape, seed).build(device)


class _ExtendBuilder(_Arena):
    def __init__(self, shape: ExtendShape, seed: int) -> None:
        self.units, self.requests = shape.layers * shape.heads, len(shape.chunks)
        deep = max(begin for begin, _ in shape.chunks) // shape.page + 3
        super().__init__(shape, seed, 1 + 2 * self.units * self.requests * deep)
        self.pages, self.positions = [0] * self.rng.randint(0, 3), [-1] * self.rng.randint(0, 40)
        self.page_starts = torch.zeros(self.units, self.requests, dtype=torch.int64)
        self.position_starts = self.page_starts.clone()
        self.counts = torch.zeros(self.units, self.requests, dtype=torch.int32)
        self.dense: dict[tuple[int, int, int], Dense] = {}

    def build(self, device: str) -> ExtendCase:
        shape = self.shape
        for request, (begin, _) in enumerate(shape.chunks):
            for cell in range(self.units):
                self._history(request, cell, begin)
        lengths = torch.tensor([0, *(n for _, n in shape.chunks)])
        batch = ExtendBatch(
            lengths.cumsum(0).int(), torch.tensor([b for b, _ in shape.chunks], dtype=torch.int32),
            self.page_starts, self.position_starts, self.counts,
            torch.tensor(self.pages, dtype=torch.int32),
            torch.tensor(self.positions, dtype=torch.int32), int(lengths.max()),
        )  # fmt: skip
        total = int(lengths.sum())
        q = self.randn(total, shape.heads * shape.group, shape.head_dim)
        k = self.randn(total, shape.heads, shape.head_dim)
        v = self.randn(total, shape.heads, self.layout.v_head_dim)
        return ExtendCase(
            self.layout, self.arena.to(device), _to(self.heads(), device), _to(batch, device),
            q.to(device), k.to(device), v.to(device), self.dense,
        )  # fmt: skip

    def _history(self, request: int, cell: int, begin: int) -> None:
        size, unit, rng = self.size, self.order[cell], self.rng
        k, v = self.tokens(begin)
        seen = reads(begin, self.windows[cell], self.sinks[cell], begin)
        layer, head = divmod(cell, self.shape.heads)
        self.dense[layer, head, request] = Dense(k, v, seen)
        index = sorted({t // size for t in seen.nonzero().flatten().tolist()})
        if index and index[0] and rng.random() < 0.5:
            index.insert(0, index[0] - 1)
        stale, own = rng.random() < 0.5, rng.random() < 0.5
        self.page_starts[unit, request] = len(self.pages)
        self.position_starts[unit, request] = len(self.positions)
        self.counts[unit, request] = len(index) * size
        for g in index:
            self.pages.append(self.free.pop())
            for t in range(g * size, (g + 1) * size):
                stored = t < begin and (stale or bool(seen[t]))
                if stored:
                    self.write(self.pages[-1], t % size, k[t], v[t])
                self.positions.append(t if stored or (own and t >= begin) else -1)

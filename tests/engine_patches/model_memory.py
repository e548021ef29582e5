"""The memory side of the brute-force model: arena contents, prefix tree, allocator (``model.py``).

The allocator is the real one; only its constructor is replaced, because that wants a server.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictResult

from engine_patches.allocator import RaggedAllocator
from engine_patches.budget import Budget
from engine_patches.counters import Counters
from engine_patches.ledger import PageLedger
from engine_patches.plan import LevelWrite, Planner
from engine_patches.residents import Resident, Residents
from engine_patches.snapshots import SnapshotGrid
from flashinfer_ext.contract import HeadWindow
from kvpolicy.windows import Level

POISON = -1
MOST_TOKENS = 512
"""More than any request of the model has."""


@dataclass(frozen=True)
class Setup:
    """One engine: policy, sizes and habits.

    Fields: ``ahead`` the share of a request's remaining output that admission reserves for it
    (SGLang's new-token ratio); ``hostile`` evicts whatever it may between plan and forward;
    ``freezes`` whether prompts are frozen, to ``budget`` unless a request says otherwise, by what
    their last ``observe`` queries read; ``shares`` in which the heads split the budget, in turn
    (none: all keep the same); ``lag`` how many looks at the device it takes at most until it has
    told what was kept; ``grid`` where states of recurrent layers are kept (None: there are none).
    """

    levels: tuple[Level, ...]
    page_size: int
    capacity: int
    logical: int
    cache: bool = True
    overlap: bool = False
    ahead: float = 0.3
    hostile: bool = False
    freezes: bool = False
    budget: Budget | None = None
    observe: int = 16
    shares: tuple[float, ...] = ()
    lag: int = 0
    grid: SnapshotGrid | None = None


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """Slots of whole logical pages, int64 [pages * page_size]."""
    return (
        torch.tensor(pages, dtype=torch.int64)[:, None] * page_size + torch.arange(page_size)
    ).flatten()


@dataclass(eq=False)
class Node:
    """One page of the prefix tree: its logical id, and the identity of each of its tokens."""

    page: int
    ids: list[int]
    parent: Node | None = None
    key: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    state: bool = False


@dataclass(eq=False)
class Request:
    """A request: ``tokens`` prompt and output so far, ``computed`` how many of them are stored.

    ``keep`` is the budget its prompt is frozen to (None: never); ``kept`` what each frozen unit
    has kept, None until then; ``observed`` and ``losses`` the positions that were observed so far;
    ``states`` the newest lengths whose recurrent state it still has.
    """

    rid: int
    tokens: list[int]
    prompt: int
    max_new: int
    letter: int
    computed: int = 0
    ids: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    lock: list[Node] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)
    updated: int = 0
    lost: list[int] = field(default_factory=list)
    raggedkv: Resident | None = None
    raggedkv_branch: int = 0
    life: int = 0
    over: bool = False
    custom: dict | None = None
    keep: int | None = None
    kept: dict[int, np.ndarray] | None = None
    observed: list[int] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    mamba_branching_seqlen: int | None = None

    extra_key = cache_salt = None
    prefix_len: int = 0
    full_untruncated_fill_ids = property(lambda self: array("q", self.tokens))
    origin_input_ids = property(lambda self: self.tokens[: self.prompt])
    output_ids = property(lambda self: self.tokens[self.prompt :])
    sampling_params = property(
        lambda self: SimpleNamespace(max_new_tokens=self.max_new, custom_params=self.custom)
    )

    def finished(self) -> bool:
        return self.over


class Contents:
    """What every slot of the arena holds; see the module."""

    def __init__(self, setup: Setup) -> None:
        self.size = setup.page_size
        self.slots = np.full((setup.capacity + 1, setup.page_size), POISON, dtype=np.int64)
        self.units = [
            (unit, k, row)
            for k, level in enumerate(setup.levels)
            for row, unit in enumerate(level.units)
        ]
        self.units.sort()
        self._known: dict[tuple[int, int], int] = {}

    def identities(self, req: Request) -> list[int]:
        """A number for each token, equal only if everything before it is equal too."""
        last = req.ids[-1] if req.ids else 0
        for token in req.tokens[len(req.ids) :]:
            last = self._known.setdefault((last, token), len(self._known) + 1)
            req.ids.append(last)
        return req.ids

    def mark(self, ids: np.ndarray, unit: int) -> np.ndarray:
        """What a slot holds after ``unit`` wrote the tokens ``ids``."""
        return ids * len(self.units) + unit

    def poison(self, pages: torch.Tensor) -> None:
        self.slots[pages.numpy()] = POISON

    def write(self, unit: int, row: int, write: LevelWrite, ids: np.ndarray) -> None:
        """Carry out one unit's part of a ``LevelWrite`` of tokens with these identities."""
        pages, slots = write.pages[row].numpy(), write.slots.numpy()
        targets = pages.astype(np.int64) * self.size + slots
        assert (pages > 0).all(), "a resident token goes to the write sink"
        assert len(np.unique(targets)) == len(targets), "two tokens in one slot"
        self.slots[pages, slots] = self.mark(ids[write.tokens.numpy()], unit)

    def check_read(
        self, unit: int, pages: np.ndarray, positions: np.ndarray, ids: np.ndarray, wanted: Keys
    ) -> None:
        """Every wanted position is listed once, and its slot holds that very token."""
        slots = np.arange(len(positions))
        self.check_slots(unit, pages[slots // self.size], slots % self.size, positions, ids, wanted)

    def check_slots(self, unit: int, pages, slots, positions, ids, wanted: Keys) -> None:
        """As ``check_read``; ``pages`` and ``slots`` [n] of each of ``positions`` [n]."""
        listed = np.flatnonzero(wanted.among[positions])
        seen = positions[listed]
        assert np.array_equal(seen, wanted.positions), f"unit {unit} lists {seen}, needs {wanted}"
        found = self.slots[pages[listed], slots[listed]]
        wrong = found != self.mark(np.asarray(ids)[seen], unit)
        assert not wrong.any(), f"unit {unit} reads foreign or stale bytes at {seen[wrong]}"


class Keys(NamedTuple):
    """``positions`` int64 [n], ascending, and the same as a mask that is False at -1."""

    positions: np.ndarray
    among: np.ndarray


@cache
def visible_keys(level: Level, query: int, itself: bool) -> Keys:
    """What the query reads by the kernels' own rule, with or without its own position."""
    keys = torch.arange(query + itself)
    seen = keys[HeadWindow(level.window, level.sinks).visible(torch.tensor(query), keys)].numpy()
    among = np.zeros(MOST_TOKENS, dtype=bool)
    among[seen] = True
    return Keys(seen, among)


@cache
def window_pages(level: Level, length: int, size: int) -> frozenset[int]:
    """Pages of the sinks and of the window with its page of slack, token by token."""
    reach = length if level.is_full else level.window + size
    tokens = (t for t in range(length) if t < level.sinks or t >= length - reach)
    return frozenset(t // size for t in tokens)


class Tree:
    """Prefix tree of whole pages; evicts unlocked leaves, least recently used first."""

    def __init__(self, setup: Setup, contents: Contents) -> None:
        self.size, self.cache, self.contents = setup.page_size, setup.cache, contents
        self.root = Node(0, [])
        self.allocator: Allocator
        self._clock = itertools.count(1)

    def supports_prefix_sharing(self) -> bool:
        return self.cache

    def prefix_device_indices(self, req: Request) -> torch.Tensor:
        return slots_of(req.hit, self.size)

    def nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def match(self, tokens: Sequence[int]) -> list[Node]:
        path, node = [], self.root
        for key in self._keys(tokens):
            if key not in node.children:
                break
            node = node.children[key]
            node.used = next(self._clock)
            path.append(node)
        return path

    def insert(self, req: Request, length: int) -> None:
        """Keep the request's first whole pages up to ``length`` tokens, and lock them for it.

        Where the tree has the tokens already, its page wins and the request's is freed.
        """
        ids = self.contents.identities(req)
        node, path = self.root, []
        for i, key in enumerate(self._keys(req.tokens[:length])):
            child = node.children.get(key)
            if child is None:
                part = ids[i * self.size : (i + 1) * self.size]
                child = node.children[key] = Node(req.row[i], part, node, key)
            elif child.page != req.row[i]:
                assert i >= len(req.lock), "a locked page was replaced"
                self._free([req.row[i]])
                req.row[i] = child.page
            child.used = next(self._clock)
            path.append(child)
            node = child
        self.lock(req, path)

    def lock(self, req: Request, path: list[Node]) -> None:
        for node in path:
            node.locks += 1
        for node in req.lock:
            node.locks -= 1
        req.lock = path

    def evict(self, params) -> EvictResult:
        freed = 0
        while freed < params.num_tokens:
            leaves = [n for n in self.nodes() if not n.children and not n.locks]
            if not leaves:
                break
            leaf = min(leaves, key=lambda n: n.used)
            del leaf.parent.children[leaf.key]
            self._free([leaf.page])
            freed += self.size
        return EvictResult(num_tokens_evicted=freed)

    def _free(self, pages: list[int]) -> None:
        self.allocator.free_segment(slots_of(pages, self.size), start_pos=0)

    def _keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        count = len(tokens) // self.size
        return [tuple(tokens[i * self.size : (i + 1) * self.size]) for i in range(count)]


class Allocator(RaggedAllocator):
    """The real allocator over a pool that is only a ledger."""

    def __init__(self, setup: Setup, tree: Tree, poison: Callable, served) -> None:
        self.served, self._considered, self._audited, self._ending = served, None, -1, None
        self.size, self.page_size = setup.logical * setup.page_size, setup.page_size
        self.num_pages, self.device = setup.logical, "cpu"
        self.need_sort = self.debug_mode = False
        self.ledger = PageLedger(
            setup.levels, setup.capacity + 1, setup.logical + 1, on_free=poison
        )
        self.counters = Counters()
        self.metrics = SimpleNamespace(publish=lambda **_: None)
        self.snapshots = setup.grid
        self.tree_cache = tree
        self.residents = Residents(self.ledger, setup.page_size, setup.cache, self.reclaim)
        self.residents.freezes = setup.freezes
        self.planner = Planner(self.residents)
        self.clear()

    def evict_to_free_tokens(self, tree: Tree, num_tokens: int) -> None:
        tree.evict(SimpleNamespace(num_tokens=num_tokens - self.available_size()))

    def take(self, count: int) -> list[int]:
        self.evict_to_free_tokens(self.tree_cache, count * self.page_size)
        slots = self.alloc(count * self.page_size)
        assert slots is not None, "the model ran out of logical pages"
        return (slots[:: self.page_size] // self.page_size).tolist()

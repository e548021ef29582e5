"""Freezing in the brute-force model (``model.py``): a random choice, and what must follow from it.

The planning of a freeze, the copy into compact pages and all bookkeeping are the real code; only
what is kept is drawn at random, so the model knows it without any attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import torch

from engine_patches.budget import Budget, wish_of
from engine_patches.freeze import Freeze, Freezer, ObservedChunk
from kvpolicy.retention import RetentionRule
from kvpolicy.retention.mix import unit_budgets
from tests.engine_patches.model_memory import (
    MOST_TOKENS,
    Contents,
    Keys,
    Request,
    Setup,
    window_pages,
)
from tests.kvpolicy.retention import literal

LEAST = 2
"""Tokens that a head keeps at least, as far as the budget allows, where they split it."""


@dataclass
class Gate:
    """Stands for a CUDA event: the device has told once it was asked ``left`` times before."""

    left: int
    told: bool = False

    def query(self) -> bool:
        self.told = self.left <= 0
        self.left -= 1
        return self.told


class ModelFreezer(Freezer):
    """Keeps what a random number says, in slots of the model's arena."""

    def __init__(self, setup: Setup, contents: Contents) -> None:
        self.rule = RetentionRule("model", observe=setup.observe)
        self.layers = np.arange(len(shares_of(setup)))
        self.setup = setup
        self.keys = self.values = torch.from_numpy(contents.slots)
        self.kept: dict[Freeze, list[np.ndarray]] = {}
        self._random, self._lag = np.random.default_rng(len(self.layers)), setup.lag

    def unit_budgets(self, budget: int, prompt: int) -> np.ndarray | None:
        shares = shares_of(self.setup)
        return unit_budgets(shares, budget, prompt, LEAST) if self.setup.shares else None

    def run(self, chunk: ObservedChunk) -> None:
        freeze = chunk.freeze
        most = unit_keep(self.setup, freeze.prompt, freeze.budget)
        rows = [self._draw(freeze, count) for count in most]
        padded = np.full((len(rows), max(most)), -1, dtype=np.int64)
        for row, positions in zip(padded, rows, strict=True):
            row[: len(positions)] = positions
        self._copy(chunk.pages, freeze, torch.from_numpy(padded))
        freeze.finish(torch.tensor([len(row) for row in rows]))
        lag = int(self._random.integers(self._lag + 1))
        freeze._ready = Gate(lag) if lag else None
        self.kept[freeze] = rows

    def _draw(self, freeze: Freeze, most: int) -> np.ndarray:
        """Positions one unit keeps; the last one always, often as many as it may."""
        count = most if self._random.random() < 0.3 else int(self._random.integers(1, most + 1))
        others = self._random.permutation(freeze.prompt - 1)[: count - 1]
        return np.sort(np.append(others, freeze.prompt - 1))


def shares_of(setup: Setup) -> tuple[float, ...]:
    """Share of each unit that freezes."""
    (full,) = [level for level in setup.levels if level.is_full]
    shares = setup.shares or (1.0,)
    return tuple(shares[i % len(shares)] for i in range(len(full.units)))


@cache
def unit_keep(setup: Setup, prompt: int, keep: int) -> tuple[int, ...]:
    """Tokens that each unit may keep of a prompt that is frozen to ``keep``."""
    if not setup.shares:
        return (keep,) * len(shares_of(setup))
    return tuple(literal.unit_budgets(shares_of(setup), keep, prompt, LEAST))


def serving_of(setup: Setup, freezer: ModelFreezer | None) -> SimpleNamespace:
    """What the allocator asks of ``engine_patches.serving``."""
    return SimpleNamespace(
        freezer=freezer,
        frozen_store=None,
        kernel="reference",
        wish=partial(wish_of, default=setup.budget, retains=setup.freezes),
        request=SimpleNamespace(budget=setup.budget),
    )


def budget_of(setup: Setup, custom: dict | None, prompt: int) -> int | None:
    """Tokens that a prompt is frozen to; None if it keeps everything."""
    wish = custom or {}
    if not setup.freezes or wish.get("kv_retention") == "off":
        return None
    budget = setup.budget or Budget()
    tokens = wish.get("kv_budget_tokens")
    ratio = wish.get("kv_budget_ratio")
    if tokens is None and ratio is None:
        tokens, ratio = budget.tokens, budget.ratio
    if tokens is None and ratio is None:
        return None
    keep = tokens if tokens is not None else max(1, math.ceil(ratio * prompt))
    return keep if keep < prompt else None


def most_pages(setup: Setup, prompt: int, length: int, keep: int | None) -> int:
    """Most pages that a request on its own may come to pin before it has ``length`` tokens.

    The compact pages of a prompt that is frozen count all along, as admission counts.
    """
    if keep is None:
        return max(_pages_at(setup, s) for s in range(length + 1))
    compact = sum(-(-count // setup.page_size) for count in unit_keep(setup, prompt, keep))
    before = max(_pages_at(setup, s) for s in range(prompt + 1))
    after = max(_pages_at(setup, s, prompt) for s in range(prompt, length + 1))
    return compact + max(before, after)


def _pages_at(setup: Setup, length: int, frozen: int | None = None) -> int:
    """Pages of ``length`` tokens; ``frozen`` is the length of a prompt that was frozen."""
    size, total = setup.page_size, 0
    for level in setup.levels:
        pages = window_pages(level, length, size)
        if level.is_full and frozen is not None:
            pages = {t // size for t in range(frozen // size * size, length)}
        total += len(level.units) * len(pages)
    return total


def compact_pages(setup: Setup, req: Request) -> int:
    """Pages that a frozen request's kept tokens take now."""
    if req.kept is None:
        return 0
    gate = req.raggedkv.freeze._ready
    told = gate is None or gate.told
    most = unit_keep(setup, req.prompt, req.keep)
    counts = [len(kept) for kept in req.kept.values()] if told else most
    return sum(-(-count // setup.page_size) for count in counts)


def check_observed(setup: Setup, req: Request, chunk: ObservedChunk | None, start, count) -> None:
    """A prefill chunk adds exactly those of its positions that the freeze observes.

    Side effect: notes them on the request.
    """
    if req.keep is None or req.kept is not None:
        assert chunk is None, "a chunk adds to a freeze that is none, or is over"
        return
    assert start + count <= req.prompt, "a chunk ran over the end of a prompt to be frozen"
    queries, losses, targets = [], [], []
    if chunk is not None:
        assert (chunk.freeze.prompt, chunk.freeze.budget) == (req.prompt, req.keep)
        queries = list(range(start + chunk.begin, start + count))
        losses = list(range(start + chunk.losses[0], start + chunk.losses[1]))
        targets = chunk.targets.tolist()
    first = max(0, req.prompt - setup.observe)
    assert queries == [t for t in range(start, start + count) if t >= first]
    assert targets == [req.tokens[t + 1] for t in losses]
    req.observed += queries
    req.losses += losses
    ends = start + count == req.prompt
    assert ends == (chunk is not None and chunk.pages is not None)
    if ends:
        assert req.observed == list(range(first, req.prompt))
        assert req.losses == [t for t in range(req.prompt - 1) if t + 1 >= first]


def check_frozen_read(
    contents: Contents, unit: int, req: Request, pages: np.ndarray, positions: np.ndarray, end: int
) -> None:
    """The slots with a position below ``end`` hold what ``unit`` kept and what came after."""
    wanted = np.append(req.kept[unit], np.arange(req.prompt, end))
    among = np.zeros(MOST_TOKENS, dtype=bool)
    among[:end] = True
    size = contents.size
    slots = np.arange(len(positions))
    order = np.argsort(positions, kind="stable")
    pages, slots = pages[slots[order] // size], slots[order] % size
    contents.check_slots(unit, pages, slots, positions[order], req.ids, Keys(wanted, among))


def frozen_slots(req: Request, row: int, tail: np.ndarray, size: int) -> tuple:
    """(pages, positions) of one unit of a frozen request: compact ones, then those of ``tail``.

    ``tail`` are the physical pages from the prompt's end on.
    """
    freeze = req.raggedkv.freeze
    first = req.prompt // size * size
    after = np.arange(first, first + len(tail) * size)
    pages = np.append(freeze.pages.ids[row].numpy(), tail)
    return pages, np.append(
        freeze.kept_positions[row].numpy(), np.where(after < req.prompt, -1, after)
    )

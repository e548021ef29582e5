"""Compact pages by request slot, through random freezes and ends."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine_patches.frozen_store import FrozenStore
from engine_patches.ledger import PageLedger
from kvpolicy.windows import FULL, Level

LEVELS = (Level(0, 64, 4, (0, 1)), Level(1, FULL, 0, (2, 3, 4)))
SIZE, SLOTS = 16, 7


@pytest.mark.parametrize("seed", range(8))
def test_every_frozen_request_finds_its_own_pages(seed):
    rng = random.Random(seed)
    ledger = PageLedger(LEVELS, 60, 8)
    store = FrozenStore(ledger, ledger.rows(1), SLOTS)
    alive: dict[int, SimpleNamespace] = {}
    packed = 0
    for _ in range(200):
        slot = rng.randrange(SLOTS)
        if slot in alive:
            freeze = alive.pop(slot)
            clear = store.remove(slot)
            ledger.give_back(freeze.pages)
            clear()
        else:
            counts = np.array([rng.randint(1, 90) for _ in range(3)])
            pages = -(-counts // SIZE)
            if pages.sum() > ledger.free:
                continue
            taken = ledger.take(1, pages)
            freeze = SimpleNamespace(
                pages=taken, prompt=rng.randint(91, 500), listed=0,
                report=SimpleNamespace(counts=torch.tensor(counts, dtype=torch.int32)),
            )  # fmt: skip
            packed += store._gap(taken.total) is None
            store.add(slot, freeze)
            alive[slot] = freeze
        _check(store, alive)
    assert ledger.check_integrity() == []


def _check(store: FrozenStore, alive: dict) -> None:
    arrays = store.arrays
    assert arrays.prompts.tolist() == [
        alive[slot].prompt if slot in alive else 0 for slot in range(SLOTS)
    ]
    for slot, freeze in alive.items():
        assert arrays.counts[slot, 2:].tolist() == freeze.report.counts.tolist()
        for unit, count in enumerate(freeze.pages.counts.tolist()):
            start = int(arrays.starts[slot, 2 + unit])
            assert arrays.pages[start : start + count].tolist() == (
                freeze.pages.ids[unit, :count].tolist()
            )


def test_nobody_is_frozen_after_a_flush():
    """Even if the end of a request is still waiting for a forward, as it may be at a flush."""
    ledger = PageLedger(LEVELS, 60, 8)
    store = FrozenStore(ledger, ledger.rows(1), SLOTS)
    counts = torch.tensor([20, 20, 20], dtype=torch.int32)
    for slot in (1, 4):
        pages = ledger.take(1, np.array([2, 2, 2]))
        freeze = SimpleNamespace(
            pages=pages, prompt=99, listed=0, report=SimpleNamespace(counts=counts)
        )
        store.add(slot, freeze)
    ledger.fall_behind()
    ledger.on_device(store.remove(1))
    ledger.clear()
    store.clear()
    ledger.catch_up()
    assert not store.arrays.prompts.any() and store._gap(len(store.arrays.pages)) == 0


def test_regions_are_packed_where_no_gap_is_left():
    ledger = PageLedger(LEVELS, 40, 8)
    store = FrozenStore(ledger, ledger.rows(1), SLOTS)
    store.arrays.pages.resize_(24)
    freezes = {}
    for slot in range(4):
        pages = ledger.take(1, np.array([2, 2, 2]))
        counts = torch.tensor([20, 20, 20], dtype=torch.int32)
        freezes[slot] = SimpleNamespace(
            pages=pages, prompt=99, listed=0, report=SimpleNamespace(counts=counts)
        )
        store.add(slot, freezes[slot])
    for slot in (0, 2):
        store.remove(slot)()
        ledger.give_back(freezes.pop(slot).pages)
    counts = torch.tensor([60, 60, 20], dtype=torch.int32)
    pages = ledger.take(1, np.array([4, 4, 2]))
    freezes[5] = SimpleNamespace(
        pages=pages, prompt=99, listed=0, report=SimpleNamespace(counts=counts)
    )
    assert store._gap(10) is None
    store.add(5, freezes[5])
    _check(store, freezes)

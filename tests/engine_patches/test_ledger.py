"""The page ledger against plain dictionaries, and each of its refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_patches.ledger import SINK_PAGE, LedgerError, OutOfPages, PageLedger
from kvpolicy.windows import FULL, Level

LEVELS = (Level(0, 8, 4, (0, 3)), Level(1, 24, 4, (1,)), Level(2, FULL, 0, (2, 4, 5)))
LOGICAL = 9


@pytest.fixture
def ledger() -> PageLedger:
    return PageLedger(LEVELS, num_pages=13, num_logical_pages=LOGICAL)


def pages_of(ledger: PageLedger, level: int, logical: int) -> list[int]:
    return ledger.table[ledger.rows(level), logical].tolist()


class Model:
    """Owners in a dictionary: (level, row, logical) -> physical page; everything else counted."""

    def __init__(self, pages: int) -> None:
        self.capacity = pages - 1
        self.owner: dict[tuple[int, int, int], int] = {}
        self.hold = {(k, g): 0 for k in range(3) for g in range(1, LOGICAL)}
        self.queue: list[tuple[int, int]] = []
        self.fenced: list[tuple[int, int]] = []
        self.parked: set[int] = set()
        self.freed: list[int] = []

    def live(self, k: int, g: int) -> bool:
        return (k, 0, g) in self.owner

    def units(self, k: int) -> int:
        return len(LEVELS[k].units)

    @property
    def free(self) -> int:
        return self.capacity - len(self.owner) - len(self.parked)

    @property
    def pinned(self) -> int:
        return sum(self.units(k) for (k, _), count in self.hold.items() if count)

    def unmap(self, k: int, g: int, park: bool) -> None:
        pages = [self.owner.pop((k, row, g)) for row in range(self.units(k))]
        self.queue = [x for x in self.queue if x != (k, g)]
        if park:
            self.parked.update(pages)
        else:
            self.freed.extend(pages)

    def retain(self, k: int, g: int) -> None:
        if (k, g) not in self.queue:
            self.queue.append((k, g))


class Pair:
    """A ledger and its model; each command acts on both, or must be refused by the ledger."""

    def __init__(self, pages: int) -> None:
        self.poisoned: list[int] = []
        self.ledger = PageLedger(
            LEVELS, pages, LOGICAL, on_free=lambda ids: self.poisoned.extend(ids.tolist())
        )
        self.model = Model(pages)
        self.evicted = 0

    def bind(self, k: int, g: int, h: int) -> None:
        wanted = sorted({g, h})
        if self.model.units(k) * len(wanted) > self.model.free:
            with pytest.raises(OutOfPages):
                self.ledger.bind(k, wanted)
        elif any(self.model.live(k, x) for x in wanted):
            with pytest.raises(LedgerError):
                self.ledger.bind(k, wanted)
        else:
            self.ledger.bind(k, wanted)
            for x in wanted:
                for row, page in enumerate(pages_of(self.ledger, k, x)):
                    self.model.owner[k, row, x] = page

    def rebind(self, k: int, g: int, h: int) -> None:
        m = self.model
        if not m.live(k, g) or m.live(k, h) or m.hold[k, g]:
            with pytest.raises(LedgerError):
                self.ledger.rebind(k, [g], [h])
            return
        self.ledger.rebind(k, [g], [h])
        m.queue = [x for x in m.queue if x != (k, g)]
        for row in range(m.units(k)):
            m.owner[k, row, h] = m.owner.pop((k, row, g))

    def move(self, k: int, g: int, h: int) -> None:
        m = self.model
        if not m.live(k, g) or m.live(k, h):
            return
        self.ledger.move(k, g, h)
        queued = (k, g) in m.queue
        m.queue = [x for x in m.queue if x != (k, g)]
        m.hold[k, h], m.hold[k, g] = m.hold[k, g], 0
        for row in range(m.units(k)):
            m.owner[k, row, h] = m.owner.pop((k, row, g))
        if not m.hold[k, h] and (queued or not LEVELS[k].is_full):
            m.retain(k, h)

    def acquire(self, k: int, g: int, h: int) -> None:
        wanted = sorted({g, h})
        if not all(self.model.live(k, x) for x in wanted):
            with pytest.raises(LedgerError):
                self.ledger.acquire(k, wanted)
            return
        self.ledger.acquire(k, wanted)
        for x in wanted:
            self.model.hold[k, x] += 1
            self.model.queue = [y for y in self.model.queue if y != (k, x)]

    def release(self, k: int, g: int, h: int) -> None:
        wanted = sorted({g, h})
        if not all(self.model.hold[k, x] for x in wanted):
            with pytest.raises(LedgerError):
                self.ledger.release(k, wanted)
            return
        loose = self.ledger.release(k, wanted)
        for x in wanted:
            self.model.hold[k, x] -= 1
        assert loose == [x for x in wanted if not self.model.hold[k, x]]

    def retain(self, k: int, g: int, h: int) -> None:
        if not self.model.live(k, g) or self.model.hold[k, g]:
            return
        self.ledger.retain(k, [g], fence=h % 2 == 0)
        if h % 2:
            self.model.retain(k, g)
        else:
            self.model.fenced.append((k, g))

    def unmap(self, k: int, g: int, h: int) -> None:
        if not self.model.live(k, g) or self.model.hold[k, g]:
            with pytest.raises(LedgerError):
                self.ledger.release_pages(k, [g], park=h % 2 == 0)
            return
        self.ledger.release_pages(k, [g], park=h % 2 == 0)
        self.model.unmap(k, g, park=h % 2 == 0)

    def drop(self, k: int, g: int, h: int) -> None:
        if any(self.model.hold[level, g] for level in range(3)):
            return
        self.ledger.drop([g])
        for level in range(3):
            if self.model.live(level, g):
                self.model.unmap(level, g, park=False)

    def evict(self, k: int, g: int, h: int) -> None:
        freed = 0
        while freed < h and self.model.queue:
            level, x = self.model.queue[0]
            self.model.unmap(level, x, park=False)
            freed += self.model.units(level)
        assert self.ledger.evict(h) == freed
        self.evicted += freed

    def lift(self, k: int, g: int, h: int) -> None:
        m = self.model
        self.ledger.lift_fence()
        for level, x in m.fenced:
            if m.live(level, x) and not m.hold[level, x]:
                m.retain(level, x)
        m.freed.extend(m.parked)
        m.fenced, m.parked = [], set()

    def check(self) -> None:
        m, ledger = self.model, self.ledger
        assert ledger.check_integrity() == []
        assert (ledger.free, ledger.pinned, ledger.parked) == (m.free, m.pinned, len(m.parked))
        assert ledger.used == ledger.capacity - m.free
        assert ledger.evictable == sum(m.units(k) for k, _ in m.queue)
        assert ledger.evicted_pages == self.evicted
        assert sorted(self.poisoned) == sorted(m.freed)
        held = [0, 0, 0]
        for k in range(3):
            for g in range(1, LOGICAL):
                expected = [m.owner.get((k, row, g), SINK_PAGE) for row in range(m.units(k))]
                assert pages_of(ledger, k, g) == expected
                assert ledger.hold[k, g] == m.hold[k, g]
                held[k] += m.units(k) * m.live(k, g)
        assert ledger.held_by_level() == held


COMMANDS = ["bind"] * 4 + ["acquire"] * 2 + ["release"] * 2
COMMANDS += ["retain", "unmap", "drop", "evict", "lift", "rebind", "move"]
commands = st.tuples(
    st.sampled_from(COMMANDS),
    st.integers(0, 2),
    st.integers(1, LOGICAL - 1),
    st.integers(1, LOGICAL - 1),
)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(4, 40), st.lists(commands, min_size=15, max_size=50))
def test_any_sequence_of_commands(pages, program):
    pair = Pair(pages)
    for name, level, g, h in program:
        getattr(pair, name)(level, g, h)
        pair.check()
    peaks = (pair.ledger.peak_pinned, pair.ledger.peak_used)
    assert peaks >= (pair.ledger.pinned, 0) and peaks[1] >= pair.ledger.used
    pair.ledger.clear()
    assert pair.ledger.check_integrity() == []
    assert (pair.ledger.free, pair.ledger.pinned, pair.ledger.peak_used) == (pages - 1, 0, 0)


# -- single rules ------------------------------------------------------------------------------


def test_a_failed_bind_changes_nothing(ledger):
    ledger.bind(2, [1, 2, 3])
    before = ledger.table.clone()
    with pytest.raises(OutOfPages, match="6 pages needed, 3 free of 12"):
        ledger.bind(2, [4, 5])
    assert torch.equal(ledger.table, before) and ledger.free == 3
    assert ledger.check_integrity() == []


def test_every_unit_gets_its_own_page(ledger):
    ledger.bind(0, [1, 2])
    ledger.bind(2, [1, 2])
    pages = [*pages_of(ledger, 0, 1), *pages_of(ledger, 0, 2)]
    pages += [*pages_of(ledger, 2, 1), *pages_of(ledger, 2, 2)]
    assert len(set(pages)) == 10 and SINK_PAGE not in pages


def test_rebinding_keeps_each_page_with_its_unit(ledger):
    ledger.bind(0, [1, 2])
    first, second = pages_of(ledger, 0, 1), pages_of(ledger, 0, 2)
    ledger.rebind(0, [1, 2], [5, 4])
    assert pages_of(ledger, 0, 5) == first and pages_of(ledger, 0, 4) == second
    assert pages_of(ledger, 0, 1) == [SINK_PAGE, SINK_PAGE] and ledger.used == 4


def test_a_held_page_is_never_taken_away(ledger):
    ledger.bind(0, [1])
    ledger.acquire(0, [1])
    assert ledger.evict(99) == 0
    for take in (
        lambda: ledger.release_pages(0, [1]),
        lambda: ledger.drop([1]),
        lambda: ledger.rebind(0, [1], [2]),
    ):
        with pytest.raises(LedgerError):
            take()
    assert ledger.live[0, 1] and ledger.check_integrity() == []


def test_fenced_and_parked_pages_are_out_of_reach_until_the_fence_lifts(ledger):
    ledger.bind(0, [1, 2])
    ledger.retain(0, [1], fence=True)
    ledger.release_pages(0, [2], park=True)
    assert (ledger.evict(99), ledger.free, ledger.parked) == (0, 8, 2)
    ledger.lift_fence()
    assert (ledger.free, ledger.parked, ledger.evictable) == (10, 0, 2)
    assert ledger.evict(99) == 2 and ledger.free == 12


def test_the_least_recently_used_window_goes_first(ledger):
    ledger.bind(0, [1, 2, 3])
    ledger.retain(0, [1, 2, 3])
    ledger.acquire(0, [1])  # a hit
    ledger.retain(0, ledger.release(0, [1]))
    assert ledger.evict(1) == 2
    assert ledger.live[0, [1, 2, 3]].tolist() == [True, False, True]


def test_a_moved_page_keeps_its_holds_and_its_place_among_the_cached(ledger):
    ledger.bind(2, [1, 2, 3])
    pages = [pages_of(ledger, 2, g) for g in (1, 2, 3)]
    ledger.acquire(2, [1])
    ledger.retain(2, [2])
    for old, new in ((1, 4), (2, 5), (3, 6)):  # held, cached, neither
        ledger.move(2, old, new)
    assert [pages_of(ledger, 2, g) for g in (4, 5, 6)] == pages
    assert ledger.hold[2, [1, 2, 3, 4, 5, 6]].tolist() == [0, 0, 0, 1, 0, 0]
    assert (ledger.pinned, ledger.evictable, ledger.check_integrity()) == (3, 3, [])
    assert ledger.evict(99) == 3 and ledger.live[2, [4, 5, 6]].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda x: x.table.__setitem__((0, 1), int(x.table[1, 1])), "owners"),
        (lambda x: x.table.__setitem__((0, 1), SINK_PAGE), "write sink"),
        (lambda x: x.live.__setitem__((0, 1), False), "dead page still has a mapping"),
        (lambda x: x.live.__setitem__((0, 1), False), "held page is not live"),
        (lambda x: setattr(x, "pinned", 3), "pinned is 3"),
        (lambda x: x.retain(0, [1]), "cache queue"),
        (lambda x: setattr(x, "_num_free", x.free - 1), "owners"),
    ],
)
def test_the_audit_sees_each_kind_of_damage(ledger, damage, fault):
    ledger.bind(0, [1])
    ledger.acquire(0, [1])
    assert ledger.check_integrity() == []
    damage(ledger)
    assert any(fault in line for line in ledger.check_integrity())


def test_counts_cost_no_look_at_the_table(ledger):
    ledger.bind(1, [1, 2])
    ledger.acquire(1, np.array([1]).tolist())
    ledger.table = None
    assert (ledger.free, ledger.used, ledger.pinned, ledger.held_by_level()) == (
        10,
        2,
        1,
        [0, 2, 0],
    )


def _fill(ledger: PageLedger) -> tuple[PageLedger, object]:
    for level in (0, 1):
        ledger.bind(level, [1, 2, 3])
        ledger.acquire(level, [1, 2])
    return ledger, ledger.take(1, np.array([1, 2]))


def _change(ledger: PageLedger, private) -> None:
    """What handling a batch's results may do: releases, moves, evictions, ends of freezes."""
    ledger.retain(0, ledger.release(0, [1]))
    ledger.release_pages(0, [3])
    ledger.move(1, 3, 5)
    ledger.drop([5])
    ledger.trim(private, np.array([1, 1]))
    ledger.evict(2)
    ledger.give_back(private)
    ledger.drop([9])


def test_the_devices_copy_stays_behind_until_it_catches_up():
    """Counts go on at once; table, free stack and private pages change later, to the same."""
    levels = (Level(0, 64, 4, (0, 1, 2)), Level(1, FULL, 0, (3, 4)))
    (now, first), (later, second) = (_fill(PageLedger(levels, 40, 12)) for _ in range(2))
    _change(now, first)
    table, stack, ids = later.table.clone(), later._stack.clone(), second.ids.clone()
    later.fall_behind()
    _change(later, second)
    assert (later.free, later.pinned, later.evictable) == (now.free, now.pinned, now.evictable)
    assert torch.equal(later.table, table) and torch.equal(later._stack, stack)
    assert torch.equal(second.ids, ids) and not torch.equal(now.table, table)
    later.lift_fence()
    assert torch.equal(later.table, now.table) and torch.equal(second.ids, first.ids)
    assert torch.equal(later._stack[: later.free], now._stack[: now.free])
    assert later.check_integrity() == []
    later.bind(0, [7])
    now.bind(0, [7])
    assert torch.equal(later.table, now.table)

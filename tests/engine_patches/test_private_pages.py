"""Private pages of the ledger: owned by no logical page, pinned until they are given back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.ledger import SINK_PAGE, LedgerError, OutOfPages, PageLedger
from kvpolicy.windows import FULL, Level

LEVELS = (Level(0, 8, 4, (0, 3)), Level(1, FULL, 0, (1, 2, 4)))
PAGES = 21


class Freed(list):
    """Page ids in the order they were freed."""

    def __call__(self, ids: torch.Tensor) -> None:
        assert ids.dtype == torch.int64
        self.extend(ids.tolist())


@pytest.fixture
def freed() -> Freed:
    return Freed()


@pytest.fixture
def ledger(freed) -> PageLedger:
    return PageLedger(LEVELS, PAGES, num_logical_pages=9, on_free=freed)


def rows(private) -> list[list[int]]:
    return [[p for p in row if p != SINK_PAGE] for row in private.ids.tolist()]


def test_each_unit_gets_as_many_pages_as_asked(ledger, freed):
    private = ledger.take(1, np.array([3, 0, 2]))
    assert private.ids.shape == (3, 3) and private.ids.dtype == torch.int32
    assert [len(row) for row in rows(private)] == [3, 0, 2] == private.counts.tolist()
    assert private.ids[1].tolist() == [SINK_PAGE] * 3 and private.ids[2, 2] == SINK_PAGE
    assert len({p for row in rows(private) for p in row}) == private.total == 5
    counts = (ledger.pinned, ledger.peak_pinned, ledger.used, ledger.peak_used, ledger.free)
    assert counts == (5, 5, 5, 5, 15)
    assert ledger.check_integrity() == [] and freed == []


def test_the_callers_counts_are_its_own(ledger):
    counts = np.array([2, 2, 2])
    private = ledger.take(1, counts)
    counts[:] = 0
    assert private.total == 6 and ledger.check_integrity() == []


def test_nothing_at_all_may_be_taken(ledger):
    private = ledger.take(0, np.array([0, 0]))
    assert private.ids.shape == (2, 0) and ledger.pinned == 0
    ledger.give_back(private)
    assert ledger.check_integrity() == []


def test_a_take_that_fails_changes_nothing(ledger):
    ledger.take(1, np.array([6, 6, 6]))
    with pytest.raises(OutOfPages, match="3 pages needed, 2 free of 20"):
        ledger.take(0, np.array([1, 2]))
    assert (ledger.free, ledger.pinned, ledger.check_integrity()) == (2, 18, [])


def test_trim_gives_back_each_units_last_pages(ledger, freed):
    private = ledger.take(1, np.array([3, 1, 2]))
    before = rows(private)
    ledger.trim(private, np.array([1, 1, 3]))
    assert rows(private) == [before[0][:1], before[1], before[2]]
    assert sorted(freed) == sorted(before[0][1:])
    assert private.counts.tolist() == [1, 1, 2]
    assert (ledger.pinned, ledger.free, ledger.peak_pinned) == (4, 16, 6)
    assert ledger.check_integrity() == []


def test_giving_back_frees_all_and_only_once(ledger, freed):
    private, other = ledger.take(1, np.array([2, 2, 2])), ledger.take(0, np.array([1, 1]))
    mine = [p for row in rows(private) for p in row]
    ledger.give_back(private)
    ledger.give_back(private)
    assert sorted(freed) == sorted(mine)
    assert (ledger.pinned, ledger.free) == (2, 18) and other.total == 2
    assert ledger.check_integrity() == []


def test_eviction_and_drops_never_touch_them(ledger):
    private = ledger.take(1, np.array([2, 2, 2]))
    before = rows(private)
    ledger.bind(1, [4])
    ledger.retain(1, [4])
    assert ledger.evict(99) == 3
    ledger.drop(range(1, 9))
    assert rows(private) == before and ledger.pinned == 6


def test_clear_forgets_them(ledger):
    ledger.take(1, np.array([2, 2, 2]))
    ledger.clear()
    assert (ledger.pinned, ledger.free) == (0, 20) and ledger.check_integrity() == []


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda x, p: p.ids.__setitem__((0, 0), SINK_PAGE), "private pages lost"),
        (lambda x, p: p.ids.__setitem__((0, 0), int(p.ids[1, 0])), "owners"),
        (lambda x, p: p.ids.__setitem__((0, 0), int(x.table[0, 1])), "owners"),
        (lambda x, p: p.counts.__setitem__(0, 1), "private pages lost"),
        (lambda x, p: x._private.clear(), "owners"),
        (lambda x, p: setattr(x, "pinned", x.pinned - 1), "recount differs"),
        (lambda x, p: x._push(lambda: p.ids[0, :1], 1), "owners"),
    ],
)
def test_the_audit_sees_each_kind_of_damage(ledger, damage, fault):
    ledger.bind(0, [1])
    private = ledger.take(1, np.array([2, 1, 1]))
    assert ledger.check_integrity() == []
    damage(ledger, private)
    assert any(fault in line for line in ledger.check_integrity())


class Books:
    """Owners by brute force, beside a ledger that does the same."""

    def __init__(self) -> None:
        self.freed = Freed()
        self.ledger = PageLedger(LEVELS, PAGES, num_logical_pages=9, on_free=self.freed)
        self.private: list[tuple] = []
        self.bound: set[int] = set()
        self.expected: list[int] = []

    @property
    def owned(self) -> int:
        return sum(len(row) for _, pages in self.private for row in pages)

    def take(self, a: int, b: int, c: int) -> None:
        counts = np.array([a, b, c])
        if counts.sum() > PAGES - 1 - self.owned - 3 * len(self.bound):
            with pytest.raises(OutOfPages):
                self.ledger.take(1, counts)
            return
        private = self.ledger.take(1, counts)
        assert [len(row) for row in rows(private)] == counts.tolist()
        self.private.append((private, rows(private)))

    def trim(self, which: int, a: int, b: int) -> None:
        if not self.private:
            return
        private, pages = self.private[which % len(self.private)]
        limits = [a, b, a]
        self.ledger.trim(private, np.array(limits))
        for row, limit in zip(pages, limits, strict=True):
            self.expected += row[limit:]
            del row[limit:]

    def give(self, which: int, *_: int) -> None:
        if self.private:
            private, pages = self.private.pop(which % len(self.private))
            self.ledger.give_back(private)
            self.expected += [p for row in pages for p in row]

    def bind(self, page: int, *_: int) -> None:
        try:
            self.ledger.bind(1, [page + 1])
            self.bound.add(page + 1)
        except (OutOfPages, LedgerError):
            assert page + 1 in self.bound or PAGES - 1 - self.owned - 3 * len(self.bound) < 3

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.check_integrity() == []
        assert ledger.pinned == self.owned
        assert ledger.free == PAGES - 1 - self.owned - 3 * len(self.bound)
        assert sorted(self.freed) == sorted(self.expected)
        for private, pages in self.private:
            assert rows(private) == pages and private.total == sum(map(len, pages))


few = st.integers(0, 4)
commands = st.tuples(st.sampled_from(["take", "take", "trim", "give", "bind"]), few, few, few)


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(st.lists(commands, min_size=5, max_size=25))
def test_any_sequence_of_commands(program):
    books = Books()
    for name, *args in program:
        getattr(books, name)(*args)
        books.check()

"""Who owns which physical page: one arena shared by every (layer, kv head).

A *level* is a group of units with one window; the units of a level live and die together, so all
bookkeeping is per (level, logical page) and costs the same for 3 units as for 300. Nothing here
knows about requests or SGLang.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from flashinfer_ext.upload import upload
from kvpolicy.windows import Level

SINK_PAGE = 0
"""Physical page that takes writes nobody will read: padding, warm-up, tokens already outside."""


class OutOfPages(RuntimeError):
    """The arena cannot serve an allocation; admission or retraction should have prevented it."""


class LedgerError(RuntimeError):
    """An ownership rule was broken: a bug, never a user's fault."""


class PrivatePages:
    """Physical pages of one level that no logical page stands for: a frozen request's own.

    Attributes: ``ids`` int32 [units, n], the sink page where a unit has fewer than n.
    """

    def __init__(self, level: int, ids: torch.Tensor, counts: np.ndarray) -> None:
        self.level = level
        self.ids = ids
        self.counts = counts

    @property
    def total(self) -> int:
        """Pages over all units."""
        return int(self.counts.sum())


class PageLedger:
    """Maps (unit, logical page) to a physical page and counts what is pinned, cached and free.

    Args:
        levels: the policy's levels; unit ids are those of ``kvpolicy``.
        num_pages: physical pages, page 0 (the write sink) included.
        num_logical_pages: largest logical page id + 1.
        device: where the table and the free stack live. Counts stay on the host, so no method
            synchronises with the device.
        on_free: called with the int64 [n] ids of pages nobody owns any more (used to poison them).

    A live page is *pinned* while its hold count is above zero, else *cached*: cached pages of
    windowed levels, and a frozen prompt's of a full level, sit in an LRU queue and can be evicted;
    other pages of a full level go when their logical page is dropped. *Private* pages are pinned.
    A *fenced* page is cached but still read by the forward being prepared; a *parked* page is free
    from the next ``lift_fence`` on.

    Attributes: ``changes`` counts what was done to the table, the free stack and private pages.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        num_pages: int,
        num_logical_pages: int,
        device: str | torch.device = "cpu",
        on_free: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.levels = tuple(levels)
        self.units = np.array([len(level.units) for level in levels], dtype=np.int64)
        self.num_pages = num_pages
        self.num_logical_pages = num_logical_pages
        self.device = torch.device(device)
        self._on_free = on_free
        bounds = np.concatenate([[0], np.cumsum(self.units)])
        self._rows = [slice(int(a), int(b)) for a, b in pairwise(bounds)]
        self.table = torch.zeros(
            (int(bounds[-1]), num_logical_pages), dtype=torch.int32, device=self.device
        )
        self._stack = torch.empty(self.capacity, dtype=torch.int32, device=self.device)
        self.live = np.zeros((len(levels), num_logical_pages), dtype=bool)
        self.hold = np.zeros((len(levels), num_logical_pages), dtype=np.int32)
        self.changes = 0
        self.clear()

    def clear(self) -> None:
        """Forget every mapping and hold; all pages become free. Side effect: resets peaks."""
        self.table.zero_()
        self._stack.copy_(torch.arange(self.num_pages - 1, 0, -1, dtype=torch.int32))
        self._num_free = self.capacity
        self.live[:] = False
        self.hold[:] = 0
        self._lru: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._evictable = 0
        self._fenced: list[tuple[int, int]] = []
        self._parked: list[torch.Tensor] = []
        self.parked = 0
        self._private: set[PrivatePages] = set()
        self._behind = False
        self._waiting: list[Callable[[], object]] = []
        self.changes += 1
        self.pinned = 0
        self.peak_pinned = 0
        self.peak_used = 0
        self.evicted_pages = 0

    # -- counts, in pages ----------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Pages that can hold tokens: all but the write sink."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return self._num_free

    @property
    def used(self) -> int:
        """Pages mapped or parked."""
        return self.capacity - self._num_free

    @property
    def evictable(self) -> int:
        """Cached pages in the LRU queue."""
        return self._evictable

    def held_by_level(self) -> list[int]:
        """Live pages of each level, over all its units."""
        return (self.live.sum(axis=1) * self.units).tolist()

    def rows(self, level: int) -> slice:
        """Rows of ``table`` that belong to ``level``, in the order of ``Level.units``."""
        return self._rows[level]

    # -- mapping -------------------------------------------------------------------------------

    def bind(self, level: int, logical: Sequence[int]) -> None:
        """Give each unit of ``level`` a fresh page for every logical page; none is held yet.

        Raises:
            OutOfPages: too few free pages (nothing is changed).
            LedgerError: a logical page already is live.
        """
        count = int(self.units[level]) * len(logical)
        if not count:
            return
        if count > self._num_free:
            raise OutOfPages(f"{count} pages needed, {self._num_free} free of {self.capacity}")
        if self.live[level, logical].any():
            raise LedgerError(f"level {level}: binding a live page among {list(logical)}")
        self._num_free -= count
        rows, index, top = self._rows[level], self._index(logical), self._num_free

        def map_pages() -> None:
            ids = self._stack[top : top + count]
            self.table[rows, index] = ids.view(-1, len(logical))

        self.on_device(map_pages)
        self.live[level, logical] = True
        self.peak_used = max(self.peak_used, self.used)

    def rebind(self, level: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Move each unit's page from ``old[i]`` to ``new[i]``: same unit, same bytes in place."""
        if not len(old):
            return
        if not self.live[level, old].all() or self.live[level, new].any():
            raise LedgerError(f"level {level}: rebinding {list(old)} to {list(new)}")
        if self.hold[level, old].any():
            raise LedgerError(f"level {level}: rebinding a held page among {list(old)}")
        rows, src, dst = self._rows[level], self._index(old), self._index(new)

        def move_pages() -> None:
            self.table[rows, dst] = self.table[rows, src]
            self.table[rows, src] = SINK_PAGE

        self.on_device(move_pages)
        self._forget(level, old)
        self.live[level, old] = False
        self.live[level, new] = True

    def move(self, level: int, old: int, new: int) -> None:
        """Let logical page ``new`` take over ``old``'s pages, holds and place in the queue."""
        holds, self.hold[level, old] = int(self.hold[level, old]), 0
        queued = (level, old) in self._lru
        self.rebind(level, [old], [new])
        self.hold[level, new] = holds
        if not holds and (queued or not self.levels[level].is_full):
            self.retain(level, [new])

    def release_pages(self, level: int, logical: Sequence[int], park: bool = False) -> None:
        """Unmap pages that nobody holds. ``park`` keeps them from reuse until ``lift_fence``.

        Raises:
            LedgerError: a page is held or not live.
        """
        if not len(logical):
            return
        if self.hold[level, logical].any() or not self.live[level, logical].all():
            raise LedgerError(f"level {level}: releasing held or dead pages {list(logical)}")
        rows, index = self._rows[level], self._index(logical)

        def unmap() -> torch.Tensor:
            ids = self.table[rows, index].reshape(-1)
            self.table[rows, index] = SINK_PAGE
            return ids

        count = int(self.units[level]) * len(logical)
        self._forget(level, logical)
        self.live[level, logical] = False
        if park:
            self.on_device(lambda: self._parked.append(unmap()))
            self.parked += count
        else:
            self._push(unmap, count)

    def drop(self, logical: Sequence[int]) -> None:
        """A logical page was freed by SGLang: unmap it on every level.

        Raises:
            LedgerError: some level still holds it.
        """
        for level in range(len(self.levels)):
            mine = [g for g in logical if self.live[level, g]]
            self.release_pages(level, mine)

    # -- holds ---------------------------------------------------------------------------------

    def acquire(self, level: int, logical: Sequence[int]) -> None:
        """One more running request needs these live pages."""
        if not len(logical):
            return
        if not self.live[level, logical].all():
            raise LedgerError(f"level {level}: holding dead pages among {list(logical)}")
        fresh = [g for g in logical if not self.hold[level, g]]
        self._forget(level, fresh)
        self.hold[level, logical] += 1
        self.pinned += int(self.units[level]) * len(fresh)
        self.peak_pinned = max(self.peak_pinned, self.pinned)

    def release(self, level: int, logical: Sequence[int]) -> list[int]:
        """One request fewer; returns the pages that nobody holds now (still live)."""
        if not len(logical):
            return []
        if (self.hold[level, logical] <= 0).any():
            raise LedgerError(f"level {level}: releasing an unheld page among {list(logical)}")
        self.hold[level, logical] -= 1
        loose = [g for g in logical if not self.hold[level, g]]
        self.pinned -= int(self.units[level]) * len(loose)
        return loose

    # -- private pages -------------------------------------------------------------------------

    def take(self, level: int, counts: np.ndarray) -> PrivatePages:
        """Pin fresh pages of their own for each unit of ``level``: ``counts`` int64 [units].

        Raises:
            OutOfPages: too few free pages (nothing is changed).
        """
        total = int(counts.sum())
        if total > self._num_free:
            raise OutOfPages(f"{total} pages needed, {self._num_free} free of {self.capacity}")
        self._num_free -= total
        top, width = self._num_free, int(counts.max(initial=0))
        ids = torch.full((len(counts), width), SINK_PAGE, dtype=torch.int32, device=self.device)
        cells = self._cells(np.arange(width)[None, :] < counts[:, None])
        self.on_device(lambda: ids.__setitem__(cells, self._stack[top : top + total]))
        private = PrivatePages(level, ids, counts.copy())
        self._private.add(private)
        self.pinned += total
        self.peak_pinned = max(self.peak_pinned, self.pinned)
        self.peak_used = max(self.peak_used, self.used)
        return private

    def trim(self, private: PrivatePages, counts: np.ndarray) -> None:
        """Give back each unit's pages beyond its first ``counts`` [units]."""
        width = private.ids.shape[1]
        column = np.arange(width)[None, :]
        surplus = (column >= counts[:, None]) & (column < private.counts[:, None])
        index = self._cells(surplus)

        def strip() -> torch.Tensor:
            ids = private.ids[index]
            private.ids[index] = SINK_PAGE
            return ids

        private.counts = np.minimum(private.counts, counts)
        self.pinned -= int(surplus.sum())
        self._push(strip, int(surplus.sum()))

    def give_back(self, private: PrivatePages) -> None:
        """Free private pages for good."""
        self.trim(private, np.zeros_like(private.counts))
        self._private.discard(private)

    # -- cache ---------------------------------------------------------------------------------

    def retain(self, level: int, logical: Sequence[int], fence: bool = False) -> None:
        """Keep unheld pages for later hits, most recent last. ``fence``: not evictable yet."""
        for g in logical:
            if fence:
                self._fenced.append((level, g))
            elif (level, g) not in self._lru:
                self._lru[level, g] = None
                self._evictable += int(self.units[level])

    def evict(self, num_pages: int) -> int:
        """Free least recently used cached pages, at least ``num_pages`` if there are as many.

        Returns:
            pages freed.
        """
        freed = 0
        while freed < num_pages and self._lru:
            level, g = next(iter(self._lru))
            self.release_pages(level, [g])
            freed += int(self.units[level])
        self.evicted_pages += freed
        return freed

    def lift_fence(self) -> None:
        """The forward that read fenced and parked pages is ordered before what comes next.

        Side effect: as ``catch_up``.
        """
        self.catch_up()
        fenced, self._fenced = self._fenced, []
        for level, g in fenced:
            if self.live[level, g] and not self.hold[level, g]:
                self.retain(level, [g])
        parked, self._parked = self._parked, []
        self.parked = 0
        for ids in parked:
            self._push(lambda ids=ids: ids, len(ids))

    # -- the device's copy ---------------------------------------------------------------------

    def fall_behind(self) -> None:
        """A forward that reads the table was launched: leave the device's copy as it is.

        Counts and holds on the host go on; what they mean for the table, the free stack and
        private pages is carried out, in order, by ``catch_up``. SGLang may handle a batch's
        results between the next one's allocation and its launch, and a freeze is settled on the
        stream of the forward that is running.
        """
        self._behind = True

    def catch_up(self) -> None:
        """No forward reads the table any more, or all are ordered before: carry out the rest."""
        self._behind = False
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            change()

    def on_device(self, change: Callable[[], object]) -> None:
        """Carry out ``change`` to what forwards read, now or with ``catch_up``, in order."""
        self.changes += 1
        if self._behind:
            self._waiting.append(change)
        else:
            change()

    # -- audit ---------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Recount everything from the table. Returns violations, empty when sound.

        Side effects: as ``catch_up``; copies the table and the free stack to the host
        (synchronises a GPU).
        """
        self.catch_up()
        faults = []
        table = self.table.cpu().numpy()
        owned = [ids.cpu().numpy() for ids in self._parked]
        for level, rows in enumerate(self._rows):
            block = table[rows]
            if (block[:, self.live[level]] == SINK_PAGE).any():
                faults.append(f"level {level}: a live page points to the write sink")
            if (block[:, ~self.live[level]] != SINK_PAGE).any():
                faults.append(f"level {level}: a dead page still has a mapping")
            owned.append(block[:, self.live[level]].reshape(-1))
        for private in self._private:
            ids = private.ids.cpu().numpy()
            owned.append(ids[ids != SINK_PAGE])
            if len(owned[-1]) != private.total:
                faults.append(f"level {private.level}: private pages lost")
        owned.append(self._stack[: self._num_free].cpu().numpy())
        ids = np.sort(np.concatenate(owned))
        if not np.array_equal(ids, np.arange(1, self.num_pages)):
            faults.append(f"{self.capacity} pages, but {len(ids)} owners, some missing or doubled")
        held = self.hold > 0
        if (held & ~self.live).any():
            faults.append("a held page is not live")
        private = sum(pages.total for pages in self._private)
        if int((held.sum(axis=1) * self.units).sum()) + private != self.pinned:
            faults.append(f"pinned is {self.pinned}, recount differs")
        queued = sum(int(self.units[level]) for level, _ in self._lru)
        stray = any(held[k, g] or not self.live[k, g] for k, g in self._lru)
        if stray or queued != self._evictable:
            faults.append("the cache queue holds a pinned or dead page")
        return faults

    # -- internals -----------------------------------------------------------------------------

    def _index(self, logical: Sequence[int]) -> torch.Tensor:
        return upload(np.array(logical, dtype=np.int64), self.device)

    def _cells(self, mask: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Index of the true cells of a host mask; a mask on the device would synchronise."""
        return tuple(upload(axis, self.device) for axis in np.nonzero(mask))

    def _push(self, take_ids: Callable[[], torch.Tensor], count: int) -> None:
        top = self._num_free
        self._num_free += count

        def push() -> None:
            ids = take_ids()
            if self._on_free is not None:
                self._on_free(ids.long())
            self._stack[top : top + count] = ids

        self.on_device(push)

    def _forget(self, level: int, logical: Sequence[int]) -> None:
        for g in logical:
            if self._lru.pop((level, g), 0) is None:
                self._evictable -= int(self.units[level])

"""What each running request keeps resident, and how that changes as it grows.

A request of length s holds, on each level, its sink pages and the window pages
``[floor(max(0, s - w - P) / P), ceil(s / P))`` (design section 3). Growing it slides those ranges:
new pages are bound, pages that fall out are rebound in place, cached for later hits, or freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from engine_patches import freezing
from engine_patches.freeze import Freeze
from engine_patches.ledger import OutOfPages, PageLedger
from engine_patches.prefix import first_read_page, sink_pages
from kvpolicy.residency import first_window_page
from kvpolicy.windows import Level


@dataclass(eq=False)
class Resident:
    """One request's resident pages.

    Fields: ``pages`` are its logical pages in order; ``length`` its allocated tokens; ``first[k]``
    the first window page held on level k; ``hit_pages`` how many leading pages came from the
    prefix cache; ``checkpoints`` the lengths at which a later request may hit, in tokens;
    ``branch`` a length at which an earlier hit had to be shortened (0: none); ``stop`` the length
    within the newest chunk at which a later request may hit (None: its end, 0: nowhere);
    ``tracked`` such lengths among the decoded tokens, the newest two; ``target`` the length that
    admission reserved for; ``slot`` its row of SGLang's request table, where decode reads that;
    ``freeze`` what happens at the end of its prompt, if any.
    """

    pages: list[int]
    length: int
    first: list[int]
    hit_pages: int = 0
    checkpoints: list[int] = field(default_factory=list)
    branch: int = 0
    stop: int | None = None
    tracked: list[int] = field(default_factory=list)
    target: int = 0
    slot: int = -1
    freeze: Freeze | None = None


@dataclass
class Slide:
    """How one level of one request moves: page indices within the request, not page ids.

    ``stop`` and ``branch`` are pages of the newest chunk that only a later hit there would need.
    """

    level: int
    dying: list[int]
    needed: list[int]
    stop: list[int]
    branch: list[int]


class Residents:
    """Applies the windows of a policy to running requests over a ``PageLedger``.

    Args:
        ledger: page ownership.
        page_size: tokens a page, P.
        cache: whether pages that fall out of a window may serve later prefix hits (radix cache on).
        reclaim: called with a number of pages when the ledger is short; frees what it can from
            the prefix tree and the queue of cached pages.

    Attributes: ``freezes`` whether requests may be frozen: the pages of a full level that nobody
    holds then queue for eviction too, since a frozen request locks its prompt in the prefix tree.
    """

    def __init__(
        self,
        ledger: PageLedger,
        page_size: int,
        cache: bool,
        reclaim: Callable[[int], None],
    ) -> None:
        self.ledger = ledger
        self.page_size = page_size
        self.cache = cache
        self._reclaim = reclaim
        self._sinks = [sink_pages(level, page_size) for level in ledger.levels]
        self._all_levels = range(len(ledger.levels))
        self.running: set[Resident] = set()
        self.freezes = False
        self._pending_drops: list[int] = []
        self._deferrals = 0
        self._to_spend = 0

    @property
    def levels(self) -> tuple[Level, ...]:
        return self.ledger.levels

    # -- ranges --------------------------------------------------------------------------------

    def held(self, resident: Resident, level: int) -> list[int]:
        """Page indices the request holds on ``level``: sinks, then window."""
        count = len(resident.pages)
        sinks = min(self._sinks[level], count)
        return [*range(sinks), *range(max(resident.first[level], sinks), count)]

    def ids(self, resident: Resident, indices: Iterable[int]) -> list[int]:
        """Logical page ids of page indices."""
        return [resident.pages[i] for i in indices]

    def reads(self, level: int, position: int) -> tuple[int, int]:
        """(sink pages below the window, first window page) read by the query at ``position``."""
        first = first_read_page(self.levels[level], position, self.page_size)
        return min(self._sinks[level], first), first

    # -- life of a request ---------------------------------------------------------------------

    def admit(
        self, pages: Sequence[int], branch: int = 0, freeze: Freeze | None = None
    ) -> Resident:
        """Start a request on a valid prefix hit of ``len(pages)`` whole pages, and hold it.

        Side effects: holds the sinks and windows of the hit on every level.
        """
        hit = list(pages)
        resident = Resident(
            hit,
            len(hit) * self.page_size,
            [0] * len(self.levels),
            len(hit),
            branch=branch,
            freeze=freeze,
        )
        for k, level in enumerate(self.levels):
            resident.first[k] = self._first_live(k, level, resident)
            self.ledger.acquire(k, self.ids(resident, self.held(resident, k)))
        self.running.add(resident)
        return resident

    def prepare(self, growth: Sequence[tuple[Resident, int, int]]) -> None:
        """Make room for one prefill batch before any of its ``extend`` calls.

        Args:
            growth: (request, its new logical pages, its new length) for the whole batch.

        Side effects: lifts the fence of the previous forward; may reclaim cached pages. Fixes how
        many pages this batch may spend on caching windows that fall out of use.
        """
        self.ledger.lift_fence()
        must = wish = 0
        for resident, num_new, length in growth:
            for k in self._all_levels:
                count = len(resident.pages)
                slide = self._slide(k, resident, count, length, count + num_new)
                units = int(self.ledger.units[k])
                gone = [i for i in slide.dying if self._last_holder(k, resident, i)]
                kept = sum(self._worth_keeping(k, resident, i) for i in gone)
                must += units * max(0, len(slide.needed) - len(gone))
                wish += units * max(0, len(slide.needed) - len(gone) + kept)
                wish += units * len(slide.stop)
            compact = freezing.compact_pages(self, resident, length)
            must, wish = must + compact, wish + compact
        if wish > self.ledger.free:
            self._reclaim(wish - self.ledger.free)
        self._to_spend = self.ledger.free + self.ledger.evictable - must

    def extend(self, resident: Resident, new_pages: Sequence[int], length: int) -> None:
        """Grow by a prefill chunk to ``length`` tokens; ``new_pages`` are its new logical pages.

        Pages that the chunk's queries still read are rebound only to the same unit, or stay out
        of reach until the next ``lift_fence``.

        Preconditions: ``prepare`` was called for the batch.

        Raises:
            OutOfPages: the arena is too small for the tail that stays resident.
        """
        old_count = len(resident.pages)
        resident.pages.extend(new_pages)
        count = len(resident.pages)
        slides = [self._slide(k, resident, old_count, length, count) for k in self._all_levels]
        # every level lets go before any level grows: what is pinned never exceeds the formula
        loose = [self._release_dying(resident, slide) for slide in slides]
        for slide, gone in zip(slides, loose, strict=True):
            self._extend_level(resident, slide, gone)
            k = slide.level
            resident.first[k] = max(resident.first[k], self._window_first(k, length))
        resident.length = length
        freezing.take_compact(self, resident)
        stop = length if resident.stop is None else resident.stop
        if self.cache and stop:
            resident.checkpoints.append(stop)

    def decode(self, resident: Resident, new_page: int | None) -> None:
        """Grow by one token; ``new_page`` is its logical page if it starts one.

        Raises:
            OutOfPages: no page for the new token.
        """
        resident.length += 1
        if new_page is None:
            return
        old_count = len(resident.pages)
        resident.pages.append(new_page)
        length, count = resident.length, old_count + 1
        slides = [self._slide(k, resident, old_count, length, count) for k in self._all_levels]
        for slide in slides:
            self._let_go(resident, slide)
        for slide in slides:
            k = slide.level
            self._bind(k, self.ids(resident, slide.needed))
            resident.first[k] = max(resident.first[k], self._window_first(k, length))

    def track(self, resident: Resident) -> None:
        """A later request may hit at the request's present length, once it ended.

        Side effect: of these lengths the newest two count (SGLang keeps two states, either of
        which may be the last whose tokens are known); what only an older one needed is freed.
        """
        if not self.cache or resident.freeze is not None:
            return
        resident.tracked.append(resident.length)
        if len(resident.tracked) <= 2:
            return
        outdated = resident.tracked.pop(0) // self.page_size
        shared = max([resident.hit_pages * self.page_size, *resident.checkpoints])
        own = -(-shared // self.page_size)  # pages before are the prefix tree's
        for k in self._all_levels:
            first = max(own, self._window_first(k, outdated * self.page_size))
            mine = [
                i
                for i in range(first, outdated)
                if not self._holds(resident, k, i) and not self._worth_keeping(k, resident, i)
            ]
            cached = [g for g in self.ids(resident, mine) if self.ledger.live[k, g]]
            self.ledger.release_pages(k, cached)

    def release(self, resident: Resident) -> None:
        """End a request: nothing is held any more. Pages still in the prefix tree stay cached."""
        for k in self._all_levels:
            loose = self.ledger.release(k, self.ids(resident, self.held(resident, k)))
            if not self.levels[k].is_full:
                self.ledger.retain(k, loose)
            elif self.freezes:
                self.ledger.retain(k, loose[::-1])  # a prefix is cut from its end
        freezing.drop_compact(self, resident)
        self.running.discard(resident)

    def replace_pages(self, resident: Resident, pages: Sequence[int]) -> None:
        """The prefix tree now keeps ``pages`` for the request's leading tokens.

        Where the tree already had the same tokens under another logical page, the request's
        physical pages move there, or are given up if the tree's copy is live.
        """
        for i, tree_page in enumerate(pages):
            own = resident.pages[i]
            if own == tree_page:
                continue
            for k in self._all_levels:
                self._adopt(k, own, tree_page, held=self._holds(resident, k, i))
            resident.pages[i] = tree_page

    @contextmanager
    def drops_deferred(self) -> Iterator[None]:
        """Unmap what SGLang frees inside the block only at its end (outermost block wins)."""
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
            if not self._deferrals:
                pending, self._pending_drops = self._pending_drops, []
                self.ledger.drop(pending)

    def drop(self, logical: Sequence[int]) -> None:
        """SGLang freed these logical pages."""
        if self._deferrals:
            self._pending_drops.extend(logical)
        else:
            self.ledger.drop(logical)

    # -- capacity ------------------------------------------------------------------------------

    def available(self) -> int:
        """Pages that are free, or will be once fences lift and cached pages are evicted."""
        return self.ledger.capacity - self.ledger.pinned

    def future_pages(self, resident: Resident, target: int) -> int:
        """Pages the request may still need to reach ``target`` tokens, beyond what it pins.

        Pages shared with other requests stay with them when a window slides on, so only pages
        that this request alone holds count as reusable.
        """
        target = max(target, resident.length)
        needs = [
            self._beyond(resident, stage)
            for stage in freezing.stages(resident.freeze, target, self.page_size)
        ]
        return freezing.compact_ahead(self, resident.freeze) + max(0, *needs)

    def _beyond(self, resident: Resident, stage: freezing.Stage) -> int:
        """Pages that ``stage`` takes beyond what the request pins and keeps or lets go for it."""
        total = 0
        for k, level in enumerate(self.levels):
            mine = self.held(resident, k)
            reusable = len(mine)
            if not level.is_full or stage.tail is not None:
                reusable = int((self.ledger.hold[k, self.ids(resident, mine)] == 1).sum())
            need = stage.held(level, self.page_size) - reusable
            if not level.is_full:
                need = max(0, need)
            total += int(self.ledger.units[k]) * need
        return total

    def exclusive_pages(self, resident: Resident) -> int:
        """Pages that only this request pins."""
        total = freezing.compact_held(resident.freeze)
        for k in self._all_levels:
            holds = self.ledger.hold[k, self.ids(resident, self.held(resident, k))]
            total += int(self.ledger.units[k]) * int((holds == 1).sum())
        return total

    def prefix_cost(self, pages: Sequence[int], target: int, freeze: Freeze | None = None) -> int:
        """Pages a new request with this valid hit would pin by the time it reaches ``target``."""
        target = max(target, len(pages) * self.page_size)
        stages = freezing.stages(freeze, target, self.page_size)
        cost = max(self._cost(pages, stage) for stage in stages)
        return freezing.compact_ahead(self, freeze) + cost

    def _cost(self, pages: Sequence[int], stage: freezing.Stage) -> int:
        total = 0
        for k, level in enumerate(self.levels):
            held = stage.held(level, self.page_size)
            if level.is_full and stage.tail is None and len(pages):
                held -= int((self._lasting_holds(k)[np.asarray(pages)] > 0).sum())
            total += int(self.ledger.units[k]) * held
        return total

    def _lasting_holds(self, k: int) -> np.ndarray:
        """Holds on level ``k`` without those of requests that count on letting go at their freeze.

        Whoever shares such a page keeps it pinned, so it has to pay for it.
        """
        holds = self.ledger.hold[k].copy()
        for resident in self.running:
            if resident.freeze is not None and not resident.freeze.done:
                holds[self.ids(resident, self.held(resident, k))] -= 1
        return holds

    def decode_demand(self, residents: Iterable[Resident]) -> int:
        """Pages that one more token for each request takes, net of what it lets go."""
        total = 0
        for resident in residents:
            if resident.length % self.page_size:
                continue
            count = len(resident.pages)
            for k in self._all_levels:
                slide = self._slide(k, resident, count, resident.length + 1, count + 1)
                holds = self.ledger.hold[k, self.ids(resident, slide.dying)]
                net = len(slide.needed) - int((holds == 1).sum())
                total += int(self.ledger.units[k]) * net
        return total

    # -- internals -----------------------------------------------------------------------------

    def _window_first(self, k: int, length: int) -> int:
        return first_window_page(self.levels[k], length, self.page_size)

    def _first_live(self, k: int, level: Level, resident: Resident) -> int:
        """Start of the hit's held window: the slack page only if it is still live."""
        first = first_read_page(level, resident.length, self.page_size)
        while (
            first > self._window_first(k, resident.length)
            and self.ledger.live[k, resident.pages[first - 1]]
        ):
            first -= 1
        return min(first, len(resident.pages))

    def _slide(self, k: int, resident: Resident, old: int, length: int, count: int) -> Slide:
        """How level k moves when the request grows from ``old`` to ``count`` pages."""
        sinks, first = self._sinks[k], self._window_first(k, length)
        dying = range(max(resident.first[k], sinks), min(old, first))
        needed = [i for i in range(old, count) if i < sinks or i >= first]
        stop = self._window_of(k, resident.stop or 0, range(old, first), length)
        branch = self._window_of(k, resident.branch, range(old, first), length)
        return Slide(k, list(dying), needed, stop, [i for i in branch if i not in stop])

    def _window_of(self, k: int, at: int, new: range, length: int) -> list[int]:
        """Pages among ``new`` that a hit at ``at`` tokens, within ``length``, would need."""
        if (
            not self.cache
            or self.levels[k].is_full
            or not new.start * self.page_size < at <= length
        ):
            return []
        start = max(new.start, self._window_first(k, at), self._sinks[k])
        return list(range(start, min(at // self.page_size, new.stop)))

    def _last_holder(self, k: int, resident: Resident, index: int) -> bool:
        return self.ledger.hold[k, resident.pages[index]] == 1

    def _release_dying(self, resident: Resident, slide: Slide) -> set[int]:
        """Drop the request's holds on dying pages; returns those nobody holds now."""
        return set(self.ledger.release(slide.level, self.ids(resident, slide.dying)))

    def _extend_level(self, resident: Resident, slide: Slide, loose: set[int]) -> None:
        k, ledger = slide.level, self.ledger
        needed = self.ids(resident, slide.needed)
        keep, spare = [], []
        for i in slide.dying:
            page = resident.pages[i]
            if page in loose:
                (keep if self._worth_keeping(k, resident, i) else spare).append(page)
        cost = int(ledger.units[k]) * min(len(keep), max(0, len(needed) - len(spare)))
        if cost > self._to_spend:
            keep, spare = [], keep + spare
        else:
            self._to_spend -= cost
        taken = min(len(spare), len(needed))
        ledger.rebind(k, spare[:taken], needed[:taken])
        ledger.acquire(k, needed[:taken])
        ledger.release_pages(k, spare[taken:], park=True)
        self._bind(k, needed[taken:])
        ledger.retain(k, keep, fence=True)
        for extra in (slide.stop, slide.branch):
            self._keep_extra(k, self.ids(resident, extra))

    def make_room(self, num_pages: int) -> None:
        """Reclaim cached pages until ``num_pages`` are free, if there are as many."""
        if num_pages > self.ledger.free:
            self._reclaim(num_pages - self.ledger.free)

    def _bind(self, k: int, logical: list[int]) -> None:
        self.make_room(len(logical) * int(self.ledger.units[k]))
        self.ledger.bind(k, logical)
        self.ledger.acquire(k, logical)

    def _keep_extra(self, k: int, logical: list[int]) -> None:
        """Write the window of a stop or branch point within the chunk too, if there is room.

        ``prepare`` made room for a stop, where cached pages could give way; a branch point, which
        most models have instead, costs nobody a page.
        """
        cost = len(logical) * int(self.ledger.units[k])
        if cost <= min(self._to_spend, self.ledger.free):
            self._to_spend -= cost
            self.ledger.bind(k, logical)
            self.ledger.retain(k, logical, fence=True)

    def _let_go(self, resident: Resident, slide: Slide) -> None:
        k, loose = slide.level, self._release_dying(resident, slide)
        for i in slide.dying:
            page = resident.pages[i]
            if page not in loose:
                continue
            if self._worth_keeping(k, resident, i):
                self.ledger.retain(k, [page])
            else:
                self.ledger.release_pages(k, [page])

    def _worth_keeping(self, k: int, resident: Resident, index: int) -> bool:
        """Whether a page that left the window belongs to a window some later hit may need."""
        if not self.cache:
            return False
        if index < resident.hit_pages:
            return True
        size = self.page_size
        stops = (*resident.checkpoints, *resident.tracked, resident.branch, resident.stop or 0)
        return any(self._window_first(k, c) <= index < -(-c // size) for c in stops)

    def _holds(self, resident: Resident, k: int, index: int) -> bool:
        return index < self._sinks[k] or index >= resident.first[k]

    def _adopt(self, k: int, own: int, tree_page: int, held: bool) -> None:
        ledger = self.ledger
        if not ledger.live[k, own]:
            if held:
                raise OutOfPages(f"level {k}: page {own} is held but not live")
            return
        if not ledger.live[k, tree_page]:
            ledger.move(k, own, tree_page)
        elif held:
            ledger.release(k, [own])
            ledger.acquire(k, [tree_page])

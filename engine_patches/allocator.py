"""SGLang's paged allocator, with logical pages that no longer imply memory.

Logical slots, the prefix tree and ``req_to_token`` work as in stock SGLang. Physical pages follow
the requests through the hooks in ``patches/``; capacity questions are answered in pages.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from engine_patches import freezing, serving
from engine_patches.budget import BudgetError, Wish
from engine_patches.counters import Counters
from engine_patches.freeze import Freeze, Freezer, FreezeReport
from engine_patches.host_pages import HostPages
from engine_patches.kernels.choice import reads_table
from engine_patches.metrics import Metrics
from engine_patches.plan import DecodePlan, ExtendPlan, Planner
from engine_patches.pool import leaf_pool
from engine_patches.prefix import longest_valid_hit
from engine_patches.residents import Resident, Residents
from engine_patches.snapshots import server_grid
from engine_patches.startup import startup_table
from kvpolicy.residency import ceil_div, frozen_pages, peak_length, peak_pages
from kvpolicy.retention import retention_units

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.radix_cache import RadixKey

logger = logging.getLogger(__name__)


class RaggedAllocator(PagedTokenToKVPoolAllocator):
    """Logical pages from SGLang's free list, physical pages from the pool's ledger.

    Attributes: ``residents`` what each running request keeps; ``counters`` what happened so far;
    ``tree_cache`` the prefix tree, known from the first batch on.
    """

    def __init__(self, size, page_size, dtype, device, kvcache: KVCache, need_sort) -> None:
        served = serving.require()
        pool = leaf_pool(kvcache)
        self.ledger = pool.ledger
        self.snapshots = server_grid(page_size) if served.geometry.recurrent_layers else None
        self.counters = Counters()
        self.tree_cache: BasePrefixCache | None = None
        self.residents = Residents(self.ledger, page_size, cache=True, reclaim=self.reclaim)
        self.residents.freezes = served.retention is not None
        self.planner = Planner(self.residents)
        if served.retention is not None:
            _, layers, heads = retention_units(served.policy)
            served.freezer = Freezer(served.retention, layers, heads, pool.keys, pool.values)
        self.served = served
        self._considered: Freeze | None = None
        self._fresh_pages: list[int] = []
        self._ending: Resident | None = None
        self._audited = -1
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        served.allocator = self
        self.metrics = Metrics(served)
        logger.info("%s", startup_table(served, size))

    # -- SGLang's allocator interface ----------------------------------------------------------

    def clear(self) -> None:
        """Free everything, logical and physical."""
        super().clear()
        compare = self.ledger.device.type == "cpu"
        self.host = HostPages(
            self.page_size, self.num_pages, self.need_sort, self.counters, compare
        )
        self.ledger.clear()
        if self.served.frozen_store is not None:
            self.served.frozen_store.clear()  # the end of a request may still have been waiting
        self.residents.running.clear()

    def alloc_extend(self, *args, **kwargs) -> torch.Tensor | None:
        """As SGLang's, and remembers which pages it took."""
        return self._remember(super().alloc_extend(*args, **kwargs))

    def alloc_decode(self, *args, **kwargs) -> torch.Tensor | None:
        """As SGLang's, and remembers which pages it took."""
        return self._remember(super().alloc_decode(*args, **kwargs))

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """As SGLang's, and remembers which pages it took."""
        return self._remember(super().alloc(need_size))

    def _remember(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        self._fresh_pages = self.host.free.take(len(self.free_pages))
        return slots

    def merge_and_sort_free(self) -> None:
        super().merge_and_sort_free()
        self.host.free.merge()

    def free(self, free_index: torch.Tensor) -> None:
        """As SGLang's; the host has to read which pages these are."""
        with self.host.untold():
            super().free(free_index)

    def free_segments(self, segments) -> None:
        """As SGLang's; of a request that ends, the host knows which pages its slots are on."""
        segments = list(segments)
        if self._ending is not None:
            ends = [(start, start + slots.numel()) for slots, start in segments if len(slots)]
            self.host.foresee([self._pages_between(*end) for end in ends])
        try:
            super().free_segments(segments)
        finally:
            self.host.foresee([])

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """As SGLang's."""
        if page_ids.numel():
            self.host.tell(page_ids.numel())
        super().free_page_ids(page_ids)

    def _pages_between(self, start: int, end: int) -> list[int]:
        """Pages of the ending request's tokens in [start, end), ``start`` at a page's first."""
        return self._ending.pages[start // self.page_size : ceil_div(end, self.page_size)]

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        freed = self.host.freed(page_ids)
        self.residents.drop(freed)
        super()._release_page_ids(*page_ids)
        self.host.give(freed)

    def check_decode_capacity(
        self, *, num_tokens, tree_cache, requests=None, spec_algorithm=None
    ) -> bool:
        """Whether the next token of each request fits, logically and physically.

        Side effect: evicts cached pages to make room.
        """
        if not super().check_decode_capacity(num_tokens=num_tokens, tree_cache=tree_cache):
            return False
        self.attach(tree_cache)
        self.ledger.lift_fence()
        running = [getattr(req, "raggedkv", None) for req in requests or ()]
        demand = self.residents.decode_demand(r for r in running if r is not None)
        if demand > self.ledger.free:
            self.reclaim(demand - self.ledger.free)
        return demand <= self.ledger.free

    def max_new_tokens_for_memory(
        self, input_tokens, max_new_tokens, *, token_capacity, sliding_window_size, chunk_size
    ) -> int | None:
        """Longest generation that fits an empty arena; None if the prompt alone does not."""
        logical = super().max_new_tokens_for_memory(
            input_tokens,
            max_new_tokens,
            token_capacity=token_capacity,
            sliding_window_size=sliding_window_size,
            chunk_size=chunk_size,
        )
        if self._peak(input_tokens, 1) > self.ledger.capacity:
            return None
        low, high = 0, logical
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._peak(input_tokens, middle) <= self.ledger.capacity
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def verify_byte_accounting(self) -> list[str]:
        """Idle audit: every physical page has exactly one owner and none is pinned.

        On a GPU pages are recounted only after they changed: an idle server asks again and again.
        """
        self.ledger.lift_fence()  # idle: no forward reads anything any more
        faults = []
        if self.ledger.device.type != "cuda" or self.ledger.changes != self._audited:
            faults = self.ledger.check_integrity()
            self._audited = self.ledger.changes
        if self.residents.running or self.ledger.pinned:
            faults.append(
                f"idle, but {len(self.residents.running)} requests pin {self.ledger.pinned} pages"
            )
        self.counters.audits += 1
        self.counters.audit_faults += len(faults)
        self.metrics.publish(idle=False)
        return [f"raggedkv: {fault}" for fault in faults]

    # -- physical memory -----------------------------------------------------------------------

    def attach(self, tree_cache: BasePrefixCache) -> None:
        """Remember the prefix tree. Idempotent."""
        self.tree_cache = tree_cache
        self.residents.cache = tree_cache.supports_prefix_sharing()

    def reclaim(self, num_pages: int) -> None:
        """Free ``num_pages`` of cached pages if there are as many.

        Where some level keeps everything, a cached prefix is worth what its full pages hold: drop
        least recently used leaves of the prefix tree first, so that pages without a usable window
        do not pile up. What is still short comes from cached windows.
        """
        target = self.ledger.free + num_pages
        full_units = sum(len(level.units) for level in self.ledger.levels if level.is_full)
        while full_units and self.ledger.free < target and self.tree_cache is not None:
            short = -(-(target - self.ledger.free) // full_units)
            params = EvictParams(num_tokens=short * self.page_size)
            if not self.tree_cache.evict(params).num_tokens_evicted:
                break
        self.ledger.evict(target - self.ledger.free)

    def extend_batch(self, batch: ScheduleBatch) -> ExtendPlan:
        """Slide every request of a prefill batch over its chunk.

        Args:
            batch: right after its logical allocation, whose pages go to its requests in order.

        Raises:
            OutOfPages: admission let in more than the arena holds.
        """
        self.attach(batch.tree_cache)
        growth, fresh = [], iter(self._fresh_pages)
        for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            resident = self.resident_of(req)
            if resident.length != start:
                raise RuntimeError(f"{req.rid}: {resident.length} tokens resident, not {start}")
            need = ceil_div(start + count, self.page_size) - ceil_div(start, self.page_size)
            pages = list(islice(fresh, need))
            if self.snapshots is not None:
                resident.stop = self._chunk_stop(req, start, start + count)
            growth.append((resident, pages, start + count))
        self.residents.prepare([(r, len(pages), length) for r, pages, length in growth])
        history = []
        for resident, pages, length in growth:
            history.append(self.planner.history(resident))
            self.residents.extend(resident, pages, length)
        self.counters.prefill_batches += 1
        self.metrics.publish(idle=False)
        tokens = [req.full_untruncated_fill_ids for req in batch.reqs]
        grown = [resident for resident, _, _ in growth]
        plan = self.planner.extend(grown, list(batch.prefix_lens), history, tokens)
        if self.served.freezer is not None:
            plan.reports.extend(self.report_of(req) for req in batch.reqs)
        if reads_table(self.served.kernel):
            for req, resident in zip(batch.reqs, grown, strict=True):
                resident.slot = req.kv.req_pool_idx
            self.ledger.fall_behind()
        return plan

    def _chunk_stop(self, req: Req, start: int, end: int) -> int:
        """Where later requests may resume what this chunk computes, with recurrent layers."""
        freeze = req.raggedkv.freeze
        if freeze is not None and start >= freeze.prompt:
            return 0  # computed after a freeze: nobody else's
        return self.snapshots.of_chunk(start, end, req.mamba_branching_seqlen)

    def after_forward(self, plan: ExtendPlan) -> None:
        """The forward of a prefill batch was launched: freeze the prompts that ended in it.

        Side effects: chooses and copies what they keep (on the device, in order), then lets the
        rest of their full-history pages go.
        """
        ended = [c for c in plan.observed if c is not None and c.pages is not None]
        for chunk in ended:
            self.served.freezer.run(chunk)
        freezes = {chunk.freeze for chunk in ended}
        for resident in list(self.residents.running):
            if resident.freeze in freezes:
                freezing.settle(self.residents, resident)
                if self.served.frozen_store is not None:
                    self.served.frozen_store.add(resident.slot, resident.freeze)
                self.counters.freezes += 1
                self.counters.freeze_prompt_tokens += resident.freeze.prompt
                self._note_kept(resident)

    def _note_kept(self, resident: Resident) -> None:
        kept = freezing.trim(self.residents, resident)
        if kept is not None:
            units = len(self.served.freezer.layers)
            self.counters.freeze_kept_tokens += -(-kept // units)

    def decode_batch(self, batch: ScheduleBatch) -> DecodePlan:
        """Slide every request of a decode batch by one token. Arguments as ``extend_batch``."""
        self.attach(batch.tree_cache)
        self.ledger.lift_fence()
        residents = [self.resident_of(req) for req in batch.reqs]
        crossing = [i for i, r in enumerate(residents) if r.length % self.page_size == 0]
        fresh = dict.fromkeys(range(len(residents)))
        fresh.update(zip(crossing, self._fresh_pages, strict=True))
        for i, resident in enumerate(residents):
            self._note_kept(resident)
            self.residents.decode(resident, fresh[i])
            if self.snapshots is not None and self.snapshots.of_decode(resident.length):
                self.residents.track(resident)
        self.counters.decode_batches += 1
        self.metrics.publish(idle=False)
        if reads_table(self.served.kernel):
            self.ledger.fall_behind()
            return DecodePlan.empty()
        return self.planner.decode(residents)

    # -- requests ------------------------------------------------------------------------------

    def resident_of(self, req: Req) -> Resident:
        """The request's resident pages; starts them on its prefix hit if admission did not."""
        if getattr(req, "raggedkv", None) is None:
            self.start(req)
        return req.raggedkv

    def hit_pages(self, req: Req) -> list[int]:
        """Logical pages of the request's prefix hit."""
        tokens = req.full_untruncated_fill_ids[: req.prefix_len]
        return self.tree_pages(req, tokens, lambda: self.tree_cache.prefix_device_indices(req))

    def tree_pages(
        self, space: Req | RadixKey, tokens: array, slots: Callable[[], torch.Tensor]
    ) -> list[int]:
        """Logical pages that the prefix tree keeps for ``tokens``, which it has, all of them.

        Args:
            space: names what the tree keeps apart: ``extra_key`` and ``cache_salt``.
            slots: their slots [tokens] on the device, in case the host does not know them.
        """
        return self.host.pages(namespace(space), tokens, slots)

    def start(self, req: Req) -> Resident:
        """Hold the request's prefix hit. Sets ``req.raggedkv``."""
        pages = self.hit_pages(req)
        if longest_valid_hit(self.ledger, pages, self.page_size) != len(pages):
            raise RuntimeError(f"{req.rid}: its prefix hit lost pages before it was admitted")
        branch = getattr(req, "raggedkv_branch", 0)
        req.raggedkv = self.residents.admit(pages, branch=branch, freeze=self.freeze_of(req))
        self.counters.admitted += 1
        return req.raggedkv

    def freeze_of(self, req: Req) -> Freeze | None:
        """A fresh plan for the end of the request's prompt; None if it keeps everything."""
        if self.served.freezer is None:
            return None
        return self.served.freezer.plan(len(req.origin_input_ids), self._wish(req))

    def _wish(self, req: Req) -> Wish:
        try:
            return self.served.wish(req.sampling_params.custom_params)
        except BudgetError:  # where it bypassed the front end's check (--tokenizer-worker-num)
            return Wish(self.served.request.budget)

    def hit_limit(self, req: Req | None) -> int | None:
        """Most tokens of a prefix hit that the request may use; None for all of them."""
        freeze = None if req is None else self.freeze_of(req)
        return None if freeze is None else freeze.hit_limit // self.page_size * self.page_size

    def report_of(self, req: Req) -> FreezeReport:
        """What the request's answer says about its prompt."""
        if req.raggedkv is not None and req.raggedkv.freeze is not None:
            return req.raggedkv.freeze.report
        prompt, wish = len(req.origin_input_ids), self._wish(req)
        if wish.budget is None:
            return FreezeReport(prompt, reason="no budget")
        return FreezeReport(prompt, wish.budget.of(prompt), reason="the prompt fits its budget")

    def note_hit(self, req: Req | None, found: MatchResult, valid: int) -> None:
        """Count a prefix match, of which ``valid`` tokens are usable.

        Side effect: the request remembers where more was cached than it can use, so that its
        prefill leaves the windows of that branch point behind for the next one. (Where recurrent
        layers lack a state SGLang names the point, and ``of_chunk`` says whether it gets one.)
        """
        length = found.device_prefix_len
        if length:
            self.counters.prefix_hits += 1
        if valid < length:
            self.counters.prefix_hits_shortened += 1
            self.counters.hit_tokens_given_up += length - valid
        if req is not None:
            req.raggedkv_branch = length if valid < length else 0

    def follow_tree(self, req: Req, row: torch.Tensor) -> None:
        """The prefix tree now owns ``row`` [tokens] of the request's slots; move pages there."""
        own = req.raggedkv.pages[: len(row) // self.page_size]
        tokens = req.full_untruncated_fill_ids[: len(row)]
        pages = self.host.inserted(namespace(req), tokens, own, row)
        self.residents.replace_pages(req.raggedkv, pages)

    @contextmanager
    def ending(self, req: Req) -> Iterator[None]:
        """Inside, the request's slots go to the tree or the free list; then it holds nothing."""
        with self.residents.drops_deferred():
            self._ending = req.raggedkv
            try:
                yield
            finally:
                self._ending = None
            self.finish(req)

    def finish(self, req: Req) -> None:
        """Let go of everything the request holds."""
        self.counters.retractions += not req.finished()
        resident = req.raggedkv
        if self.served.frozen_store is not None and resident.freeze and resident.freeze.done:
            self.ledger.on_device(self.served.frozen_store.remove(resident.slot))
        self.residents.release(resident)
        req.raggedkv = None

    # -- internals -----------------------------------------------------------------------------

    @contextmanager
    def considering(self, req: Req) -> Iterator[None]:
        """Inside, ``max_new_tokens_for_memory`` is asked about this request."""
        self._considered = self.freeze_of(req)
        try:
            yield
        finally:
            self._considered = None

    def _peak(self, prompt: int, max_new: int) -> int:
        """Most pages that a request on its own holds, frozen or not."""
        prompt, freeze = max(1, prompt), self._considered
        if freeze is None:
            return peak_pages(self.ledger.levels, prompt, max_new, self.page_size)
        compact = freezing.compact_ahead(self.residents, freeze)
        before = peak_pages(self.ledger.levels, prompt, 0, self.page_size) + compact
        last = peak_length(prompt + max_new, self.page_size)
        new = max(0, last - prompt)
        kept = freeze.budget if freeze.unit_budgets is None else freeze.unit_budgets
        return max(before, frozen_pages(self.ledger.levels, prompt, new, kept, self.page_size))


def namespace(space: Req | RadixKey) -> tuple[str | None, str | None]:
    """What keeps equal tokens apart in the prefix tree."""
    return space.extra_key, space.cache_salt or None

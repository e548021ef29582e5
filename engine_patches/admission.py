"""Admission in pages: a request starts only if its peak and everybody else's still fit."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from sglang.srt.runtime_context import get_schedule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from engine_patches.allocator import RaggedAllocator


class RaggedPrefillAdder(PrefillAdder):
    """SGLang's adder, with a second budget beside the logical one: physical pages.

    The estimate of what running requests will still generate is SGLang's own (its new-token
    ratio); only its unit changes. Reservations include everything a request may come to hold, so
    a prompt that is admitted is never short of pages in a later chunk.
    """

    token_to_kv_pool_allocator: RaggedAllocator

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        allocator = self.token_to_kv_pool_allocator
        allocator.attach(self.tree_cache)
        self._unfinished: Req | None = None
        self.residents = allocator.residents
        for req in self.running_batch.reqs if self.running_batch is not None else ():
            if getattr(req, "raggedkv", None) is not None:
                ahead = self._get_running_request_total_token_offset(req)
                req.raggedkv.target = req.raggedkv.length + max(1, int(ahead))

    # -- the physical budget -------------------------------------------------------------------

    def target_of(self, req: Req) -> int:
        """Tokens the request may come to hold: prompt, output so far, and what it may add."""
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        return len(req.full_untruncated_fill_ids) + min(max(left, 0), CLIP_MAX_NEW_TOKENS)

    def committed(self) -> int:
        """Pages pinned now plus what the running requests may still need."""
        future = sum(
            self.residents.future_pages(resident, resident.target)
            for resident in self.residents.running
        )
        return self.residents.ledger.pinned + future

    def shortage(self, req: Req) -> int:
        """Pages that are missing to admit the request now (<= 0: it fits)."""
        hit = self.token_to_kv_pool_allocator.hit_pages(req)
        freeze = self.token_to_kv_pool_allocator.freeze_of(req)
        cost = self.residents.prefix_cost(hit, self.target_of(req), freeze)
        return self.committed() + cost - self.residents.ledger.capacity

    # -- SGLang's adder ------------------------------------------------------------------------

    def _check_prefill_budget(self, req: Req, **budget):
        fits, chunk_limit = super()._check_prefill_budget(req, **budget)
        if fits and self.shortage(req) > 0:
            return False, None
        return fits, chunk_limit

    def _commit_prefill_admission(self, req: Req, admission, mamba_gap_reserve: int) -> None:
        super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
        self._start(req)

    def add_one_req(self, req: Req, *args, **kwargs) -> AddReqResult:
        """As upstream, but a shortage that this batch's own freezes may end is not the batch's end.

        After NO_TOKEN SGLang admits nobody until some request finishes; after OTHER it asks again.
        """
        result = super().add_one_req(req, *args, **kwargs)
        if result is AddReqResult.NO_TOKEN and self._pages_will_come():
            return AddReqResult.OTHER
        return result

    def _pages_will_come(self) -> bool:
        """Whether some prompt now in prefill is going to be frozen."""
        plans = (resident.freeze for resident in self.residents.running)
        return any(freeze is not None and not freeze.done for freeze in plans)

    def add_one_req_ignore_eos(self, req: Req) -> AddReqResult:
        if self.shortage(req) > 0:
            return AddReqResult.NO_TOKEN
        left = self._left_of_prompt(req, req.prefix_len)
        whole = len(req.full_untruncated_fill_ids) - req.prefix_len
        limit = self.rem_chunk_tokens
        chunked = left is not None or (limit is not None and whole > limit)
        if chunked and self._chunk_pending:
            return AddReqResult.OTHER
        with self._chunks_within(left):
            result = super().add_one_req_ignore_eos(req)
        if self.can_run_list and self.can_run_list[-1] is req:
            self._start(req)
        return result

    # -- a retracted request's prompt is frozen again before its output follows ------------------

    def _left_of_prompt(self, req: Req, prefix: int) -> int | None:
        """Prompt tokens after ``prefix`` if the next chunk must stop where the prompt ends."""
        prompt, total = len(req.origin_input_ids), len(req.full_untruncated_fill_ids)
        if not prefix < prompt < total:
            return None
        freezes = self.token_to_kv_pool_allocator.freeze_of(req) is not None
        return prompt - prefix if freezes else None

    @contextmanager
    def _chunks_within(self, left: int | None):
        """Let no chunk be longer than ``left`` tokens (None: as SGLang says)."""
        limit = self.rem_chunk_tokens
        if left is None or (limit is not None and limit <= left):
            yield
            return
        self.rem_chunk_tokens = left
        try:
            yield
        finally:
            used = left - self.rem_chunk_tokens
            self.rem_chunk_tokens = None if limit is None else limit - used

    def _select_prefill_admission(self, req: Req, **kwargs):
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        left = self._left_of_prompt(req, admission.prefix_len)
        if left is not None and admission.extend_len > left:
            admission = replace(admission, extend_len=left, max_new_tokens=0, is_chunked=True)
        if admission.is_chunked and self._chunk_pending:
            return AddReqResult.OTHER
        return admission

    @property
    def _chunk_pending(self) -> bool:
        """Whether some request already ends this batch unfinished: SGLang tracks one only.

        In stock SGLang such a request has always used up the chunk; one that stops where its
        prompt freezes has not.
        """
        return self.new_chunked_req is not None or self._unfinished is not None

    def add_chunked_req(self, req: Req) -> Req | None:
        whole = len(req.full_untruncated_fill_ids) - req.prefix_len
        left = self._left_of_prompt(req, req.prefix_len)
        with self._chunks_within(whole if left is None else left):
            self._unfinished = super().add_chunked_req(req)
        return self._unfinished

    def _start(self, req: Req) -> None:
        resident = self.token_to_kv_pool_allocator.start(req)
        resident.target = self.target_of(req)

    def preempt_to_schedule(self, req: Req) -> bool:
        """Retract lower-priority requests until ``req`` fits in pages.

        Returns:
            True if some were retracted and ``req`` can be scheduled. Side effect as upstream:
            they leave the running batch and join ``preempt_list``.
        """
        victims = self._victims(req)
        if not victims:
            return False
        keep, released = [], 0
        for i, running in enumerate(self.running_batch.reqs):
            if running not in victims:
                keep.append(i)
                continue
            ahead = self._get_running_request_total_token_offset(running)
            self.memory_budget.total_offset -= ahead
            released += 1
            self.running_batch.release_req(i, len(self.running_batch.reqs) - released)
        self.running_batch.filter_batch(keep_indices=keep)
        self.preempt_list.extend(victims)
        return True

    def _victims(self, req: Req) -> list[Req]:
        """Fewest lowest-priority running requests whose pages make room for ``req``."""
        sign = 1 if get_schedule().schedule_low_priority_values_first else -1
        running = [
            r for r in self.running_batch.reqs if r not in self.preempt_list and not r.finished()
        ]
        running.sort(key=lambda r: (-r.priority * sign, -r.time_stats.wait_queue_entry_time))
        short, victims = self.shortage(req), []
        for candidate in running:
            lower = (req.priority - candidate.priority) * -sign
            if lower <= self.priority_scheduling_preemption_threshold:
                break
            victims.append(candidate)
            resident = candidate.raggedkv
            short -= self.residents.exclusive_pages(resident)
            short -= self.residents.future_pages(resident, resident.target)
            if short <= 0:
                return victims
        return []

"""The Triton kernels: decode reads the page table on the device, so its steps fit a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_patches import serving
from engine_patches.frozen_store import FrozenStore
from engine_patches.kernels.base import Kernel
from engine_patches.kernels.extend_batch import extend_batch
from engine_patches.plan import ExtendPlan
from engine_patches.pool import RaggedKVPool
from flashinfer_ext.contract import DecodeBatch, LayerHeads, PageTable
from flashinfer_ext.triton_decode import TritonDecode
from flashinfer_ext.triton_extend import extend
from flashinfer_ext.triton_store import store

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

INTERPRETED_ITEMS = 4
"""Work items beyond one per row where the interpreter runs them one after the other."""


class TritonKernel(Kernel):
    """Ragged attention of ``flashinfer_ext`` over the pool's arena.

    Args:
        requests: SGLang's request table.
        group: query heads of a kv head.

    Side effect: hands ``served`` the store through which frozen prompts are read.
    """

    def __init__(
        self,
        served: serving.Serving,
        pool: RaggedKVPool,
        requests: ReqToTokenPool,
        layers: dict[int, int | None],
        group: int,
    ) -> None:
        super().__init__(served, pool)
        slots = requests.req_to_token
        self._row_of = {layer: i for i, layer in enumerate(sorted(self.levels))}
        self.heads = layer_heads(pool, layers, self._row_of)
        self.table = PageTable(pool.ledger.table, slots)
        self._group = group
        self._frozen = None
        if served.freezer is not None:
            full = next(k for k, level in enumerate(pool.ledger.levels) if level.is_full)
            served.frozen_store = FrozenStore(pool.ledger, pool.ledger.rows(full), len(slots))
            self._frozen = served.frozen_store.arrays
        self.resize(len(slots))

    def resize(self, rows: int) -> None:
        """Allocate for decode batches of up to ``rows`` requests. Not while a graph is in use."""
        device = self.pool.arena.device
        self._rows = rows
        self._requests = torch.zeros(rows, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._build(rows)

    @property
    def rows(self) -> int:
        """Most requests of a decode batch."""
        return self._rows

    def begin(self, batch, plan) -> None:
        """Take a batch. For decode everything is done on the device, at fixed addresses."""
        self._plan = plan
        if batch.forward_mode.is_decode():
            count = len(batch.seq_lens)
            self._requests[:count].copy_(batch.req_pool_indices)
            self._lengths[:count].copy_(batch.seq_lens)
            self._batch = DecodeBatch(self._requests[:count], self._lengths[:count])
            self._plan_decode()
        elif batch.forward_mode.is_extend():
            lengths = batch.extend_seq_lens_cpu if plan is None else plan.lengths
            self._chunks = extend_batch(self.pool, plan, list(lengths))
            self._plan_extend()

    def extend(self, layer, q, k, v, out, batch) -> None:
        row, plan = self._row_of[layer.layer_id], self._plan
        self._attend_chunks(row, q.flatten(1, 2), k, v, out.flatten(1, 2), layer)
        if plan is None:
            return
        self._observe_chunks(layer, q, k, plan)
        self._store(row, k, v, batch)

    def decode(self, layer, q, k, v, out, batch) -> None:
        row = self._row_of[layer.layer_id]
        self._store(row, k, v, batch)
        self._decode.run(
            q.flatten(1, 2), self.pool.arena, self.table, row, self._batch,
            out.flatten(1, 2), layer.scaling, layer.logit_cap, self._frozen,
        )  # fmt: skip

    # -- internals: what another kernel over the same page table replaces ----------------------

    def _build(self, rows: int) -> None:
        """Make what attends decode batches of up to ``rows`` requests."""
        device = self.pool.arena.device
        target = None if device.type == "cuda" else INTERPRETED_ITEMS
        self._decode = TritonDecode(
            self.pool.layout, self.heads, self._group, rows, device, target=target
        )

    def _plan_decode(self) -> None:
        self._decode.plan(self._batch, self._frozen)

    def _plan_extend(self) -> None:
        pass

    def _attend_chunks(self, row: int, q, k, v, out, layer) -> None:
        extend(
            q, k, v, self.pool.arena, self.pool.layout, self.heads, row, self._chunks, out,
            layer.scaling, layer.logit_cap,
        )  # fmt: skip

    # -- internals -----------------------------------------------------------------------------

    def _store(self, row: int, k, v, batch) -> None:
        """Tokens outside every window have no page of theirs: they go to the sink page."""
        store(
            k, v, self.pool.arena, self.pool.layout, self.table.pages, self.heads, row,
            batch.out_cache_loc,
        )  # fmt: skip

    def _observe_chunks(self, layer, q, k, plan: ExtendPlan) -> None:
        begin = 0
        for r, (start, length) in enumerate(zip(plan.starts, plan.lengths, strict=True)):
            rows = slice(begin, begin + length)
            begin += length
            if plan.observed[r] is None:
                continue
            for level, units, heads in self.levels[layer.layer_id]:
                if self.pool.ledger.levels[level].is_full:
                    old = self.history(plan.history[r][level], units)[0]
                    mine = q[rows][:, heads], k[rows][:, heads]
                    self.observe(layer, level, units, *mine, old, start, plan, r)


def layer_heads(
    pool: RaggedKVPool, native: dict[int, int | None], row_of: dict[int, int]
) -> LayerHeads:
    """Table row, window and sinks of every kv head, one row per attention layer.

    Args:
        native: layer id -> the layer's own sliding window in tokens, None without one.
        row_of: layer id -> its row.
    """
    shape = (len(row_of), pool.head_num)
    units, windows, sinks = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    for layer, members in pool.heads_of_level.items():
        for level, rows, heads in members:
            policy = pool.ledger.levels[level]
            at = row_of[layer], np.asarray(heads)
            units[at] = pool.ledger.rows(level).start + np.asarray(rows)
            windows[at] = min(policy.window, native.get(layer) or policy.window)
            sinks[at] = policy.sinks
    return LayerHeads(*(torch.from_numpy(x).to(pool.arena.device) for x in (units, windows, sinks)))

"""The extend kernel's view of a prefill batch: every unit's history as flat lists."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from engine_patches.plan import ExtendPlan, LevelHistory
from engine_patches.pool import RaggedKVPool
from flashinfer_ext.contract import ExtendBatch
from flashinfer_ext.upload import upload


class _Lists:
    """Page ids and positions, one after the other, and where each unit's begin."""

    def __init__(self, pool: RaggedKVPool, requests: int) -> None:
        self.pool = pool
        shape = (pool.ledger.table.shape[0], requests)
        self.page_starts = np.zeros(shape, dtype=np.int64)
        self.position_starts = np.zeros(shape, dtype=np.int64)
        self.counts = np.zeros(shape, dtype=np.int32)
        self.pages: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self._num_pages = self._num_positions = 0

    def add(self, level: int, request: int, past: LevelHistory) -> None:
        """List what one request reads on one level."""
        units = np.arange(past.pages.shape[0])
        rows = self.pool.ledger.rows(level)
        pages, positions = past.pages, past.positions[None, :]
        if past.frozen is not None:
            kept = past.frozen.kept_positions
            pages = torch.cat([past.frozen.pages.ids, pages], dim=1)
            positions = torch.cat([kept, positions.expand(len(kept), -1)], dim=1)
        shared = len(positions) == 1
        self.page_starts[rows, request] = self._num_pages + units * pages.shape[1]
        self.position_starts[rows, request] = self._num_positions + (
            0 if shared else units * positions.shape[1]
        )
        self.counts[rows, request] = positions.shape[1]
        self.pages.append(pages.flatten())
        self.positions.append(positions.flatten().int())
        self._num_pages += pages.numel()
        self._num_positions += positions.numel()

    def flat(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """int32 on the device, never empty."""
        blank = torch.zeros(1, dtype=torch.int32, device=self.pool.arena.device)
        return torch.cat([*parts, blank])


def extend_batch(pool: RaggedKVPool, plan: ExtendPlan | None, lengths: list[int]) -> ExtendBatch:
    """Lists for ``flashinfer_ext.triton_extend``; without a plan nothing is resident.

    Args:
        lengths: tokens of each chunk.

    Side effect: copies small arrays to the device.
    """
    device, requests = pool.arena.device, len(lengths)
    lists = _Lists(pool, requests)
    starts = [0] * requests
    if plan is not None:
        starts = plan.starts
        for r, levels in enumerate(plan.history):
            for level, past in enumerate(levels):
                lists.add(level, r, past)

    return ExtendBatch(
        offsets=upload(np.array([0, *accumulate(lengths)], dtype=np.int32), device),
        begins=upload(np.array(starts, dtype=np.int32), device),
        page_starts=upload(lists.page_starts, device),
        position_starts=upload(lists.position_starts, device),
        counts=upload(lists.counts, device),
        pages=lists.flat(lists.pages),
        positions=lists.flat(lists.positions),
        longest=max(lengths, default=0),
    )

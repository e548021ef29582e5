"""What one forward reads and writes, fixed at allocation.

The table may change while a forward is in flight (overlap scheduling), so a forward never looks
at it: it gets these snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_patches.residents import Resident, Residents


@dataclass(frozen=True)
class LevelWrite:
    """Where one level stores the batch's new tokens.

    Fields: ``tokens`` int64 [n], rows of the batch's K and V that stay resident; ``pages``
    int32 [units, n] physical page per unit; ``slots`` int64 [n] slot in the page.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class LevelHistory:
    """What one prefill chunk reads on one level.

    Fields: ``pages`` int32 [units, m]; ``positions`` int64 [m * P], ascending.
    """

    pages: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class LevelDecode:
    """What a decode batch reads on one level.

    Fields: ``pages`` int32 [units, R, m], padded with the sink page; ``positions`` int64
    [R, m * P], -1 in padded pages.
    """

    pages: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class ExtendPlan:
    """A prefill batch: ``history[r][k]`` and token bounds per request, ``writes[k]`` per level."""

    starts: list[int]
    lengths: list[int]
    history: list[list[LevelHistory]]
    writes: list[LevelWrite]


@dataclass(frozen=True)
class DecodePlan:
    """A decode batch: one new token per request at ``query_positions`` int64 [R]."""

    query_positions: torch.Tensor
    reads: list[LevelDecode]
    writes: list[LevelWrite]


class Planner:
    """Reads the ledger's table into plans. No side effects."""

    def __init__(self, residents: Residents) -> None:
        self.residents = residents
        self.ledger = residents.ledger
        self.page_size = residents.page_size
        self.device = self.ledger.device

    def history(self, resident: Resident) -> list[LevelHistory]:
        """What the next chunk of a request reads. Call before ``Residents.extend``."""
        levels = []
        for k in range(len(self.residents.levels)):
            sinks, first = self.residents.reads(k, resident.length)
            index = [*range(sinks), *range(first, len(resident.pages))]
            pages = self._pages(k, self.residents.ids(resident, index))
            levels.append(LevelHistory(pages, self._positions(np.asarray(index)).flatten()))
        return levels

    def extend(
        self,
        residents: Sequence[Resident],
        starts: Sequence[int],
        history: list[list[LevelHistory]],
    ) -> ExtendPlan:
        """Plan of a prefill batch. Call after every ``Residents.extend`` of the batch."""
        lengths = [r.length - s for r, s in zip(residents, starts, strict=True)]
        writes = self._writes(residents, starts, lengths)
        return ExtendPlan(list(starts), lengths, history, writes)

    def decode(self, residents: Sequence[Resident]) -> DecodePlan:
        """Plan of a decode batch. Call after every ``Residents.decode`` of the batch."""
        starts = [r.length - 1 for r in residents]
        reads = [self._decode_level(k, residents) for k in range(len(self.residents.levels))]
        writes = self._writes(residents, starts, [1] * len(residents))
        return DecodePlan(self._tensor(np.asarray(starts)), reads, writes)

    # -- internals -----------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device, non_blocking=True)

    def _pages(self, k: int, logical: Sequence[int] | np.ndarray) -> torch.Tensor:
        return self.ledger.table[self.ledger.rows(k), self._tensor(np.asarray(logical, np.int64))]

    def _positions(self, index: np.ndarray) -> torch.Tensor:
        """Positions [n, P] of the tokens in pages with these indices; -1 for index -1."""
        grid = index[:, None] * self.page_size + np.arange(self.page_size)
        return self._tensor(np.where(index[:, None] < 0, -1, grid))

    def _writes(
        self, residents: Sequence[Resident], starts: Sequence[int], lengths: Sequence[int]
    ) -> list[LevelWrite]:
        size = self.page_size
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        )
        logical = np.concatenate(
            [
                np.asarray(r.pages, np.int64)[np.arange(s, s + n) // size]
                for r, s, n in zip(residents, starts, lengths, strict=True)
            ]
        )
        writes = []
        for k in range(len(self.residents.levels)):
            tokens = np.flatnonzero(self.ledger.live[k, logical])
            pages = self._pages(k, logical[tokens])
            slots = self._tensor(positions[tokens] % size)
            writes.append(LevelWrite(self._tensor(tokens), pages, slots))
        return writes

    def _decode_level(self, k: int, residents: Sequence[Resident]) -> LevelDecode:
        rows = [self._read_index(k, r) for r in residents]
        width = max(len(row) for row in rows)
        index = np.full((len(rows), width), -1, dtype=np.int64)
        logical = np.zeros((len(rows), width), dtype=np.int64)
        for i, (row, resident) in enumerate(zip(rows, residents, strict=True)):
            index[i, : len(row)] = row
            logical[i, : len(row)] = np.asarray(resident.pages, np.int64)[row]
        pages = self._pages(k, logical.reshape(-1)).view(-1, *logical.shape)
        positions = self._positions(index.reshape(-1)).view(len(rows), -1)
        return LevelDecode(pages, positions)

    def _read_index(self, k: int, resident: Resident) -> np.ndarray:
        """Page indices that the query at ``length - 1`` reads: sinks below the window, window."""
        sinks, first = self.residents.reads(k, resident.length - 1)
        return np.concatenate([np.arange(sinks), np.arange(first, len(resident.pages))])

"""What one forward reads and writes, fixed at allocation.

The table may change while a forward is in flight (overlap scheduling), so a forward never looks
at it: it gets these snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine_patches.freeze import Freeze, FreezeReport, ObservedChunk
from engine_patches.freezing import full_level
from engine_patches.ledger import SINK_PAGE
from engine_patches.residents import Resident, Residents
from flashinfer_ext.upload import upload


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

    Fields: ``pages`` int32 [units, m]; ``positions`` int64 [m * P], ascending, -1 where the slot
    is not read; ``frozen`` the compact pages read as well, if the prompt was frozen.
    """

    pages: torch.Tensor
    positions: torch.Tensor
    frozen: Freeze | None = None


@dataclass(frozen=True)
class LevelDecode:
    """What a decode batch reads on one level.

    Fields: ``pages`` int32 [units, R, m], padded with the sink page; ``positions`` int64
    [R, m * P], -1 in padded pages and frozen prompts' tokens; ``frozen`` (row, compact pages read
    as well) of the frozen requests.
    """

    pages: torch.Tensor
    positions: torch.Tensor
    frozen: tuple[tuple[int, Freeze], ...] = ()

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages [units, R, M], positions [R or units, R, M * P]) with the compact pages in.

        Reads what freezes wrote, so it belongs to the forward, not to its planning.
        """
        if not self.frozen:
            return self.pages, self.positions
        units, rows, own = self.pages.shape
        size = self.positions.shape[-1] // own
        width = own + max(freeze.pages.ids.shape[1] for _, freeze in self.frozen)
        pages = self.pages.new_full((units, rows, width), SINK_PAGE)
        positions = self.positions.new_full((units, rows, width * size), -1)
        pages[..., :own], positions[..., : own * size] = self.pages, self.positions
        for row, freeze in self.frozen:
            end = own + freeze.pages.ids.shape[1]
            pages[:, row, own:end] = freeze.pages.ids
            positions[:, row, own * size : end * size] = freeze.kept_positions
        return pages, positions


@dataclass(frozen=True)
class ExtendPlan:
    """A prefill batch: ``history[r][k]`` and token bounds per request, ``writes[k]`` per level.

    ``observed[r]`` is what the request's chunk adds to its freeze, None if nothing; ``reports``
    what each request's answer says about its prompt, where prompts can be frozen.
    """

    starts: list[int]
    lengths: list[int]
    history: list[list[LevelHistory]]
    writes: list[LevelWrite]
    observed: list[ObservedChunk | None]
    reports: list[FreezeReport] = field(default_factory=list)


@dataclass(frozen=True)
class DecodePlan:
    """A decode batch: one new token per request at ``query_positions`` int64 [R].

    A kernel that reads the page table itself needs none of it: ``DecodePlan.empty``.
    """

    query_positions: torch.Tensor
    reads: list[LevelDecode]
    writes: list[LevelWrite]

    @classmethod
    def empty(cls) -> DecodePlan:
        """Plan of a batch whose kernel looks everything up on the device."""
        return cls(torch.empty(0), [], [])


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
            index = self._read_index(k, resident, resident.length)
            frozen = self._frozen(k, resident)
            pages = self._pages(k, self.residents.ids(resident, index))
            positions = self._positions(index, frozen.prompt if frozen else 0)
            levels.append(LevelHistory(pages, positions.flatten(), frozen))
        return levels

    def extend(
        self,
        residents: Sequence[Resident],
        starts: Sequence[int],
        history: list[list[LevelHistory]],
        tokens: Sequence[Sequence[int]],
    ) -> ExtendPlan:
        """Plan of a prefill batch. Call after every ``Residents.extend`` of the batch.

        Args:
            tokens: each request's token ids, at least one beyond its chunk unless it ends there.
        """
        lengths = [r.length - s for r, s in zip(residents, starts, strict=True)]
        writes = self._writes(residents, starts, lengths)
        observed = [
            self._observed(r, s, ids) for r, s, ids in zip(residents, starts, tokens, strict=True)
        ]
        return ExtendPlan(list(starts), lengths, history, writes, observed)

    def decode(self, residents: Sequence[Resident]) -> DecodePlan:
        """Plan of a decode batch. Call after every ``Residents.decode`` of the batch."""
        starts = [r.length - 1 for r in residents]
        reads = [self._decode_level(k, residents) for k in range(len(self.residents.levels))]
        writes = self._writes(residents, starts, [1] * len(residents))
        return DecodePlan(self._tensor(np.asarray(starts)), reads, writes)

    # -- internals -----------------------------------------------------------------------------

    def _frozen(self, k: int, resident: Resident) -> Freeze | None:
        """The request's freeze if it is done and level ``k`` was frozen by it."""
        freeze = resident.freeze
        return freeze if freeze and freeze.done and self.residents.levels[k].is_full else None

    def _observed(self, resident: Resident, start: int, ids: Sequence[int]) -> ObservedChunk | None:
        freeze, end = resident.freeze, resident.length
        if freeze is None or freeze.done or end <= max(0, freeze.first_observed - 1):
            return None
        begin = max(freeze.first_observed, start)
        # the token at position p is predicted at p - 1
        first = max(start, freeze.first_observed - 1, 0)
        last = min(end, freeze.prompt - 1)
        targets = self._tensor(np.asarray(ids[first + 1 : last + 1], np.int64))
        pages = None
        if end == freeze.prompt:
            pages = self._pages(full_level(self.ledger), resident.pages)
        bounds = (first - start, max(first, last) - start)
        return ObservedChunk(freeze, min(begin, end) - start, bounds, targets, pages)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return upload(array.astype(np.int64), self.device)

    def _pages(self, k: int, logical: Sequence[int] | np.ndarray) -> torch.Tensor:
        return self.ledger.table[self.ledger.rows(k), self._tensor(np.asarray(logical, np.int64))]

    def _positions(self, index: np.ndarray, least: int | np.ndarray = 0) -> torch.Tensor:
        """Positions [n, P] of the tokens in pages with these indices.

        -1 for index -1, and below ``least`` (one number, or [n, 1]).
        """
        grid = index[:, None] * self.page_size + np.arange(self.page_size)
        return self._tensor(np.where((index[:, None] < 0) | (grid < least), -1, grid))

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
        rows = [self._read_index(k, r, r.length - 1) for r in residents]
        frozen = [self._frozen(k, r) for r in residents]
        width = max(len(row) for row in rows)
        index = np.full((len(rows), width), -1, dtype=np.int64)
        logical = np.zeros((len(rows), width), dtype=np.int64)
        for i, (row, resident) in enumerate(zip(rows, residents, strict=True)):
            index[i, : len(row)] = row
            logical[i, : len(row)] = np.asarray(resident.pages, np.int64)[row]
        pages = self._pages(k, logical.reshape(-1)).view(-1, *logical.shape)
        least = np.repeat([freeze.prompt if freeze else 0 for freeze in frozen], width)[:, None]
        positions = self._positions(index.reshape(-1), least).view(len(rows), -1)
        compact = tuple((i, freeze) for i, freeze in enumerate(frozen) if freeze)
        return LevelDecode(pages, positions, compact)

    def _read_index(self, k: int, resident: Resident, position: int) -> np.ndarray:
        """Page indices that the query at ``position`` reads: sinks below the window, window.

        Of a frozen level only the pages from the prompt's end on.
        """
        if self._frozen(k, resident):
            return np.arange(resident.first[k], len(resident.pages))
        sinks, first = self.residents.reads(k, position)
        return np.concatenate([np.arange(sinks), np.arange(first, len(resident.pages))])

"""The data layout every kernel here agrees on.

An *arena* holds pages; a page is P tokens of one unit (one kv head of one layer): first the P keys,
then the P values. With equal head dims it reads as ``[NP, 2, P, D]``. Page 0 is the write sink.
All arrays here are contiguous but ``PageTable``'s, whose rows may be apart.
A row's keys are given by a list of pages and the logical page index of each, so that the token at
slot i of a page with index g sits at position ``g * P + i``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK_STEP = 64
"""Decode work items are multiples of so many tokens: a whole number of key tiles."""

ITEMS_PER_PROCESSOR = 4
"""Decode work items beyond one per row, for each of a GPU's multiprocessors: enough that the last
ones end close together (``python -m flashinfer_ext balance``)."""


@dataclass(frozen=True)
class ArenaLayout:
    """Shape of one arena.

    Fields: ``num_pages`` with the sink page; ``page_size`` tokens; head dims in elements.
    """

    num_pages: int
    page_size: int
    head_dim: int
    v_head_dim: int

    @property
    def page_elements(self) -> int:
        """Elements of K and V in one page."""
        return self.page_size * (self.head_dim + self.v_head_dim)

    def allocate(self, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
        """A zeroed arena, [NP, P * (D + Dv)]."""
        return torch.zeros((self.num_pages, self.page_elements), dtype=dtype, device=device)

    def keys(self, arena: torch.Tensor) -> torch.Tensor:
        """View [NP, P, D] of the keys."""
        return arena[:, : self.page_size * self.head_dim].unflatten(1, (self.page_size, -1))

    def values(self, arena: torch.Tensor) -> torch.Tensor:
        """View [NP, P, Dv] of the values."""
        return arena[:, self.page_size * self.head_dim :].unflatten(1, (self.page_size, -1))


@dataclass(frozen=True)
class HeadWindow:
    """What the queries of a row may read: keys ``[0, sinks)`` and ``[max(0, t-window+1), t]``.

    ``window`` counts the query's own token; 2**31 - 1 means unlimited.
    """

    window: int
    sinks: int

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query at position ``query`` reads the key at ``key`` (broadcast, bool)."""
        return (key <= query) & ((key > query - self.window) | (key < self.sinks))


@dataclass(frozen=True)
class PageTable:
    """Where tokens lie. Read by the kernels while they run: update it in stream order only.

    Fields: ``pages`` int32 [U, G], physical page of each unit's logical page, the write sink
    where it has none; ``slots`` int32 [S, C], logical slot of each position of each request slot
    (logical page = slot // P, and position t lies in slot t % P of its page).
    """

    pages: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class FrozenPrompts:
    """Compact pages of frozen prompts, read instead of the prompt's own pages.

    Fields: ``prompts`` int32 [S], tokens of the frozen prompt, 0 where a request slot is not
    frozen; ``counts`` int32 [S, U] kept tokens of each unit; ``starts`` int64 [S, U] index in
    ``pages`` of the unit's first compact page; ``pages`` int32 [N] physical pages. Only units with
    unlimited history are ever frozen: ``counts`` and ``starts`` of others are not read.
    """

    prompts: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    pages: torch.Tensor


@dataclass(frozen=True)
class LayerHeads:
    """The kv heads of L layers, H each: a row of ``pages`` and a window per head.

    Fields, all int32 [L, H]: ``units`` row of ``PageTable.pages``; ``windows`` (2**31 - 1 means
    unlimited, which is what a frozen prompt's units have); ``sinks``.
    """

    units: torch.Tensor
    windows: torch.Tensor
    sinks: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(layers L, kv heads H of a layer)."""
        return tuple(self.units.shape)


@dataclass(frozen=True)
class DecodeBatch:
    """One new token per row, already stored. Fixed addresses make it fit for a CUDA graph.

    Fields: ``requests`` int32 [R], each row's request slot; ``lengths`` int32 [R], its tokens with
    the new one, at position ``length - 1``; 0 marks a padded row, which reads nothing and gets
    zeros.
    """

    requests: torch.Tensor
    lengths: torch.Tensor

    @property
    def rows(self) -> int:
        """R, padded rows included."""
        return len(self.lengths)


@dataclass(frozen=True)
class ReadRange:
    """What one (row, kv head) reads: ``frozen`` tokens of its compact pages, then positions
    ``[0, gap_at)`` and ``[gap_at + gap, gap_at + gap + rest)``."""

    frozen: int
    gap_at: int
    gap: int
    rest: int

    @property
    def length(self) -> int:
        """Tokens read in all."""
        return self.frozen + self.gap_at + self.rest


def read_range(length: int, window: int, sinks: int, prompt: int = 0, kept: int = 0) -> ReadRange:
    """What the query at ``length - 1`` of one kv head reads.

    Args:
        window, sinks: the head's, in tokens.
        prompt, kept: of a frozen prompt, its tokens and how many of them the head kept; a prompt
            of 0 is not frozen.
    """
    if prompt:
        return ReadRange(kept, 0, prompt, length - prompt)
    first = max(0, length - window)
    gap_at = min(sinks, first)
    return ReadRange(0, gap_at, first - gap_at, length - first)


@dataclass(frozen=True)
class ExtendBatch:
    """Prefill chunks of R requests: fresh tokens, and the history that is resident.

    Fields: ``offsets`` int32 [R + 1], first row of each chunk in the batch's tokens; ``begins``
    int32 [R], position of each chunk's first token. Per unit and request, in slots of whole
    pages: ``page_starts`` int64 [U, R], first of its pages in ``pages`` int32 [N];
    ``position_starts`` int64 [U, R], where its positions begin in ``positions`` int32 [N'], -1
    where a slot is not read; ``counts`` int32 [U, R] slots, a multiple of P. ``longest`` is the
    longest chunk, in tokens, known on the host.
    """

    offsets: torch.Tensor
    begins: torch.Tensor
    page_starts: torch.Tensor
    position_starts: torch.Tensor
    counts: torch.Tensor
    pages: torch.Tensor
    positions: torch.Tensor
    longest: int

    @property
    def requests(self) -> int:
        """R."""
        return len(self.begins)

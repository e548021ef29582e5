"""The data layout every kernel here agrees on.

An *arena* holds pages; a page is P tokens of one unit (one kv head of one layer): first the P keys,
then the P values. With equal head dims it reads as ``[NP, 2, P, D]``. Page 0 is the write sink.
A row's keys are given by a list of pages and the logical page index of each, so that the token at
slot i of a page with index g sits at position ``g * P + i``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

"""Where the decode kernels find the compact pages of frozen prompts: fixed device arrays.

A request slot's entries say how many tokens each unit kept and where its compact page ids begin in
one flat list. Regions of the list are dealt out on the host; as no physical page is listed twice,
the list never overflows once it is packed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine_patches.freeze import Freeze
from engine_patches.ledger import PageLedger
from flashinfer_ext.contract import FrozenPrompts
from flashinfer_ext.upload import upload


class FrozenStore:
    """Compact pages by request slot.

    Args:
        ledger: owner of the pages; its table's rows are the units.
        rows: table rows of the units that freeze, in their order.
        request_slots: rows of SGLang's request table.

    Attributes: ``arrays`` what the kernels read.
    """

    def __init__(self, ledger: PageLedger, rows: slice, request_slots: int) -> None:
        device, units = ledger.device, ledger.table.shape[0]
        self._rows = rows
        self._regions: dict[int, tuple[int, Freeze]] = {}
        self.arrays = FrozenPrompts(
            torch.zeros(request_slots, dtype=torch.int32, device=device),
            torch.zeros(request_slots, units, dtype=torch.int32, device=device),
            torch.zeros(request_slots, units, dtype=torch.int64, device=device),
            torch.zeros(2 * ledger.num_pages, dtype=torch.int32, device=device),
        )

    def add(self, slot: int, freeze: Freeze) -> None:
        """The request in ``slot`` reads its compact pages from the next forward on.

        Preconditions: ``freeze`` was run. Side effect: writes the arrays, in stream order.
        """
        total = freeze.pages.total
        start = self._gap(total)
        if start is None:
            others = list(self._regions.items())
            self._regions.clear()
            for other, (_, held) in others:
                self._write(other, self._gap(held.pages.total), held)
            start = self._gap(total)
        self._write(slot, start, freeze)
        self.arrays.counts[slot, self._rows] = freeze.report.counts
        self.arrays.prompts[slot] = freeze.prompt

    def remove(self, slot: int) -> Callable[[], None]:
        """The request in ``slot`` is over, its region free for the next freeze.

        Returns:
            what marks the slot as not frozen, to be called when no forward reads it any more.
        """
        self._regions.pop(slot)
        return lambda: self.arrays.prompts[slot].zero_()

    def clear(self) -> None:
        """Forget every request."""
        self._regions.clear()
        self.arrays.prompts.zero_()

    def _gap(self, total: int) -> int | None:
        """Start of the first free stretch of ``total`` entries; None if there is none."""
        start = 0
        for begin, freeze in sorted(self._regions.values(), key=lambda region: region[0]):
            if begin - start >= total:
                break
            start = begin + freeze.listed
        return start if start + total <= len(self.arrays.pages) else None

    def _write(self, slot: int, start: int, freeze: Freeze) -> None:
        counts, ids = freeze.pages.counts, freeze.pages.ids
        column = np.arange(ids.shape[1])[None, :] < counts[:, None]
        cells = tuple(upload(axis, ids.device) for axis in np.nonzero(column))
        freeze.listed = int(counts.sum())
        self.arrays.pages[start : start + freeze.listed] = ids[cells]
        starts = upload(start + np.cumsum(counts) - counts, ids.device)
        self.arrays.starts[slot, self._rows] = starts
        self._regions[slot] = (start, freeze)

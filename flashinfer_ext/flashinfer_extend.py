"""Ragged extend through FlashInfer's FA2 prefill template, in up to three runs that are merged.

The chunk's keys are in activations, its history in pages, so no single run reads both. The chunk on
itself is one run, its history another. A third is for sinks inside the chunk: the first run starts
at a query tile's window, which skips them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashinfer_ext.contract import ArenaLayout, ExtendBatch, LayerHeads
from flashinfer_ext.flashinfer_build import load_module
from flashinfer_ext.flashinfer_decode import (
    NHD,
    NO_WINDOW,
    cache_views,
    check_dtypes,
    spec_of,
)
from flashinfer_ext.flashinfer_rows import (
    ExtendRows,
    extend_rows,
    flat_places,
    on_host,
)
from flashinfer_ext.flashinfer_workspace import Workspace, processors
from flashinfer_ext.upload import upload

CAUSAL, CUSTOM = 1, 2
"""FlashInfer's mask modes: the variant's mask on edge tiles only, or on every tile."""
HISTORY, CHUNK, SINKS = 0, 1, 2
"""Parts of the prefill variant."""
LARGEST_QUERY_TILE = 128


@dataclass(frozen=True)
class _Planned:
    """A planned run: number of its plan buffers, FlashInfer's plan, its places (pages of the
    history, rows of the fresh sinks) and the row starts in them."""

    pair: int
    info: object
    places: torch.Tensor
    indptr: torch.Tensor


class FlashInferExtend:
    """Extend of a fixed set of layers.

    Args:
        layout, heads, group, device, dtype, module: as ``FlashInferDecode``; any group.

    Raises:
        VariantError: not supported by FlashInfer's template, or the module cannot be had.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        heads: LayerHeads,
        group: int,
        device: str | torch.device,
        dtype: torch.dtype = torch.bfloat16,
        module=None,
    ) -> None:
        device = torch.device(device)
        spec = spec_of("prefill", layout, dtype)
        self._module = load_module(spec, device) if module is None else module
        self.layout, self.heads, self.group, self.dtype = layout, heads, group, dtype
        self._host_heads, self._device = on_host(heads), device
        # A run is cut only where its tiles do not fill two blocks on each multiprocessor.
        partial = 2 * processors(device) * LARGEST_QUERY_TILE * (layout.v_head_dim + 1)
        self._work = Workspace(4 * (partial + group * (layout.v_head_dim + 1)) + 256, 0, device)
        self._rows: ExtendRows | None = None
        self._host_q: torch.Tensor | None = None
        self._chunk: _Planned | None = None
        self._history: list[_Planned | None] = []
        self._sinks: list[_Planned | None] = []

    def plan(self, batch: ExtendBatch, host_batch: ExtendBatch | None = None) -> None:
        """Plan every layer's runs for ``batch``; call it before ``run`` of any layer.

        Args:
            host_batch: the same on the CPU; its ``pages`` and ``positions`` are not read.

        Side effects: synchronises with the device if ``host_batch`` is not given, and waits for
        the copies of the last plan.
        """
        host = on_host(batch) if host_batch is None else host_batch
        self._work.wait()
        rows = extend_rows(self.layout.page_size, self._host_heads, host)
        self._host_q = rows.q_indptr
        self._rows = ExtendRows(**{k: upload(v, self._device) for k, v in vars(rows).items()})
        self._work.grow(self._plan_bytes(rows))
        self._history, self._sinks, self._chunk = [], [], None
        if int(rows.q_indptr[-1]) == 0:
            return
        # A run of its own row windows may not be cut: see PREFILL_VARIANT.
        info = self._plan_run(0, rows.q_indptr, 1, disable_split=True)
        self._chunk = _Planned(0, info, self._rows.q_indptr, self._rows.q_indptr)
        known: dict[bytes, tuple[int, object]] = {}
        starts = self._rows.q_indptr[:-1]
        for layer in range(self.heads.shape[0]):
            pages = self._planned(
                known, rows.indptr[layer], self._rows.indptr[layer],
                self._rows.page_starts[layer], self.layout.page_size,
            )  # fmt: skip
            self._history.append(pages and self._with_pages(pages, batch))
            self._sinks.append(self._planned(
                known, rows.sink_indptr[layer], self._rows.sink_indptr[layer], starts, 1
            ))  # fmt: skip
        self._work.record()

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        arena: torch.Tensor,
        layer: int,
        batch: ExtendBatch,
        out: torch.Tensor,
        scale: float,
        logit_cap: float = 0.0,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of prefill chunks, as ``extend_reference.extend``. No sync.

        Args:
            q: [T, Hq, D]; k: [T, H, D]; v: [T, H, Dv]; copied head by head.
            arena: [NP, P * (D + Dv)]; see ``flashinfer_source`` on masked slots.
            layer: row of ``heads``.
            out: [T, Hq, Dv], written.
            lse: float32 [T, Hq], written if given.

        Returns:
            ``out``.

        Raises:
            ValueError: tensors of another dtype than the runner's.

        Preconditions: ``plan`` was called for this batch.
        """
        check_dtypes(self.dtype, q, k, v, arena)
        if self._chunk is None:
            return out
        count = self.heads.shape[1]
        queries = q.unflatten(1, (count, self.group)).transpose(0, 1).flatten(0, 1)
        keys = k.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        values = v.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        extras = (layer, batch, scale, logit_cap)
        parts = [self._ragged(CHUNK, self._chunk, queries, keys, values, *extras)]
        if self._history[layer] is not None:
            parts.append(self._paged(self._history[layer], queries, arena, *extras))
        if self._sinks[layer] is not None:
            places = self._sinks[layer].places
            sink_k, sink_v = keys[places], values[places]
            parts.append(self._ragged(SINKS, self._sinks[layer], queries, sink_k, sink_v, *extras))
        result, total = merge(parts)
        shape = (count, len(q), self.group)
        out.copy_(result.view(*shape, -1).transpose(0, 1).flatten(1, 2))
        if lse is not None:
            lse.copy_(total.view(shape).transpose(0, 1).flatten(1, 2))
        return out

    def warm_up(self) -> None:
        """Run one token once, so that the first request does not wait for the driver.

        Side effect: forgets the last plan.
        """
        device, units = self._device, int(self._host_heads.units.max()) + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        size, count = self.layout.page_size, self.heads.shape[1]
        starts = zeros(units, 1, dtype=torch.int64)
        batch = ExtendBatch(
            torch.tensor([0, 1], dtype=torch.int32, device=device), zeros(1) + size, starts, starts,
            zeros(units, 1) + size, zeros(1), torch.arange(size, device=device).int(), 1,
        )  # fmt: skip
        self.plan(batch)
        layout = ArenaLayout(1, size, self.layout.head_dim, self.layout.v_head_dim)
        k = zeros(1, count, layout.head_dim, dtype=self.dtype)
        q = zeros(1, count * self.group, layout.head_dim, dtype=self.dtype)
        arena = layout.allocate(self.dtype, device)
        self.run(q, k, torch.zeros_like(k), arena, 0, batch, torch.empty_like(q), 1.0)

    def _plan_bytes(self, rows: ExtendRows) -> int:
        """An upper bound of a plan's size: the smallest query tile holds 16 queries."""
        total, count = int(rows.q_indptr[-1]), len(rows.begins)
        tiles = total * self.group // 16 + count + 4 * processors(self._device)
        return 12 * tiles + 4 * (total + 2 * count) + 1024

    def _plan_run(self, pair: int, indptr: torch.Tensor, page_size: int, disable_split: bool):
        """FlashInfer's plan of one run; ``indptr`` on the host, in pages or tokens."""
        layout, (ints, pinned) = self.layout, self._work.pair(pair)
        queries = self._host_q
        return self._module.plan(
            self._work.floats, ints, pinned, queries, indptr, indptr.diff() * page_size,
            int(queries[-1]), len(queries) - 1, self.group, 1, page_size, False,
            layout.head_dim, layout.v_head_dim, disable_split, NO_WINDOW, -1, disable_split, 0, 0,
        )  # fmt: skip

    def _planned(
        self,
        known: dict[bytes, tuple[int, object]],
        host_indptr: torch.Tensor,
        indptr: torch.Tensor,
        starts: torch.Tensor,
        page_size: int,
    ) -> _Planned | None:
        """A run over parts of a flat list, planned once for equal row lengths; None if empty."""
        total = int(host_indptr[-1])
        if not total:
            return None
        key = host_indptr.numpy().tobytes() + b"%d" % page_size
        if key not in known:
            pair = 1 + len(known)
            known[key] = pair, self._plan_run(pair, host_indptr, page_size, disable_split=False)
        return _Planned(*known[key], flat_places(starts, indptr, total), indptr)

    @staticmethod
    def _with_pages(planned: _Planned, batch: ExtendBatch) -> _Planned:
        return _Planned(planned.pair, planned.info, batch.pages[planned.places], planned.indptr)

    def _results(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(queries.shape[:2], device=queries.device)
        return queries.new_empty(*queries.shape[:2], self.layout.v_head_dim), lse

    def _extras(self, layer: int, batch: ExtendBatch, scale: float, logit_cap: float, part: int):
        rows = self._rows
        return (
            rows.begins, rows.windows[layer], rows.sinks[layer], rows.position_starts[layer],
            batch.positions, float(scale), float(logit_cap), part,
        )  # fmt: skip

    def _ragged(self, part: int, run: _Planned, queries, keys, values, *extras):
        out, lse = self._results(queries)
        self._module.ragged_run(
            self._work.floats, self._work.pair(run.pair)[0], run.info, queries, keys, values,
            self._rows.q_indptr, run.indptr, out, lse, CAUSAL if part == CHUNK else CUSTOM, NHD,
            NO_WINDOW, False, *self._extras(*extras, part),
        )  # fmt: skip
        return out, lse

    def _paged(self, run: _Planned, queries, arena, *extras):
        out, lse = self._results(queries)
        whole = torch.full_like(self._rows.begins, self.layout.page_size)
        self._module.paged_run(
            self._work.floats, self._work.pair(run.pair)[0], run.info, queries,
            *cache_views(self.layout, arena), self._rows.q_indptr, run.indptr, run.places, whole,
            out, lse, CUSTOM, NHD, NO_WINDOW, False, *self._extras(*extras, HISTORY),
        )  # fmt: skip
        return out, lse


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets.

    Args:
        parts: (out [N, G, Dv], base-2 lse float32 [N, G]) of each set; some set of each query is
            not empty, an empty one has out 0 and lse -inf.

    Returns:
        (out in the parts' dtype, lse float32 [N, G] in base e).
    """
    lses = torch.stack([lse for _, lse in parts]) * math.log(2)
    total = lses.logsumexp(0)
    if len(parts) == 1:
        return parts[0][0], total
    weights = (lses - total).exp()[..., None]
    mixed = sum(out.float() * weight for (out, _), weight in zip(parts, weights, strict=True))
    return mixed.to(parts[0][0].dtype), total

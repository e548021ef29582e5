"""Ragged decode through FlashInfer's CUDA-core template: rows of one kv head, planned on the host.

An alternative to ``triton_decode``, which needs no host planning; this one reads the lengths on the
host at every step, plans every layer whose lengths differ, and writes every layer's page list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashinfer_ext.contract import ArenaLayout, DecodeBatch, FrozenPrompts, LayerHeads, PageTable
from flashinfer_ext.flashinfer_build import load_module
from flashinfer_ext.flashinfer_rows import DecodeRows, decode_pages, decode_rows, on_host
from flashinfer_ext.flashinfer_source import DECODE_GROUPS, DTYPES, HEAD_DIMS, ModuleSpec
from flashinfer_ext.flashinfer_store import VariantError
from flashinfer_ext.flashinfer_workspace import (
    BLOCKS_PER_PROCESSOR,
    Workspace,
    processors,
)
from flashinfer_ext.upload import upload

NHD = 0
"""FlashInfer's code for caches [NP, P, heads, D]."""
NO_WINDOW = -1


@dataclass(frozen=True)
class _LayerPlan:
    """What ``run`` of a layer needs: plan buffers' number, FlashInfer's plan, the page list."""

    pair: int
    info: object
    pages: torch.Tensor


def spec_of(kind: str, layout: ArenaLayout, dtype: torch.dtype) -> ModuleSpec:
    """The module for an arena. Raises VariantError: no template is for it."""
    names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
    if dtype not in names:
        raise VariantError(f"FlashInfer variants take {' and '.join(names.values())}, not {dtype}")
    if layout.head_dim != layout.v_head_dim or layout.head_dim not in HEAD_DIMS:
        raise VariantError(
            f"FlashInfer variants take equal head dims of {HEAD_DIMS}, "
            f"not {layout.head_dim} and {layout.v_head_dim}"
        )
    return ModuleSpec(kind, layout.head_dim, names[dtype])


def cache_views(layout: ArenaLayout, arena: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as FlashInfer's NHD caches with one head, views [NP, P, 1, D] of equal
    strides."""
    return layout.keys(arena).unsqueeze(2), layout.values(arena).unsqueeze(2)


def check_dtypes(expected: torch.dtype, *tensors: torch.Tensor) -> None:
    """The compiled modules take bare pointers. Raises ValueError: a tensor of another dtype."""
    for tensor in tensors:
        if tensor.dtype != expected:
            raise ValueError(f"planned for {expected}, given {tensor.dtype}")


class FlashInferDecode:
    """Decode of a fixed set of layers.

    Args:
        layout, heads, group, max_rows, device: as ``TritonDecode``.
        dtype: of the arena and the queries, bf16 or fp16.
        page_capacity: most pages of one layer's list; needed for CUDA graphs. With it all buffers
            are allocated here and stay in place, and every layer is planned on its own.
        module: the compiled module; loaded, or built for minutes, if None.

    Raises:
        VariantError: not supported by FlashInfer's template, or the module cannot be had.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        heads: LayerHeads,
        group: int,
        max_rows: int,
        device: str | torch.device,
        dtype: torch.dtype = torch.bfloat16,
        page_capacity: int | None = None,
        module=None,
    ) -> None:
        spec = spec_of("decode", layout, dtype)
        if group not in DECODE_GROUPS:
            raise VariantError(
                f"FlashInfer's decode takes {DECODE_GROUPS} query heads of a kv head, not {group}"
            )
        device = torch.device(device)
        self._module = load_module(spec, device) if module is None else module
        self.layout, self.heads, self.group, self.dtype = layout, heads, group, dtype
        self._host_heads, self._device = on_host(heads), device
        layers, count = heads.shape
        self.max_rows, self._graph = max_rows, page_capacity is not None
        rows = max_rows * count
        blocks = max(rows, BLOCKS_PER_PROCESSOR * processors(device))
        partial = BLOCKS_PER_PROCESSOR * processors(device) * group * (layout.v_head_dim + 1)
        self._work = Workspace(4 * partial + 256, 14 * (blocks + rows) + 256, device)
        self._lse = torch.empty(rows, group, device=device)
        self._packed = torch.empty(7 * layers * (rows + 1), dtype=torch.int32, device=device)
        self._lists = None
        if page_capacity is not None:
            self._lists = torch.empty(layers, page_capacity, dtype=torch.int32, device=device)
        self._rows: DecodeRows | None = None
        self._plans: list[_LayerPlan] = []

    def plan(
        self,
        batch: DecodeBatch,
        table: PageTable,
        frozen: FrozenPrompts | None = None,
        host_batch: DecodeBatch | None = None,
        host_frozen: FrozenPrompts | None = None,
    ) -> None:
        """Plan every layer for ``batch`` and write its page lists.

        Call it once a step, after lengths or table have changed, before ``run`` of any layer; with
        CUDA graphs before every replay, outside the graph, with the captured batch's row count.

        Args:
            host_batch, host_frozen: the same on the CPU; of the latter only ``prompts`` and
                ``counts`` are read.

        Raises:
            ValueError: more rows or pages than the buffers hold.

        Side effects: synchronises with the device for each host copy that is not given, and waits
        for the copies of the last plan. About ten launches and a plan on the host per layer.
        """
        count, layers = self.heads.shape[1], self.heads.shape[0]
        if batch.rows > self.max_rows:
            raise ValueError(f"{batch.rows} rows, the buffers hold {self.max_rows}")
        host_batch = on_host(batch) if host_batch is None else host_batch
        if frozen is not None and host_frozen is None:
            prompts, counts = frozen.prompts.cpu(), frozen.counts.cpu()
            host_frozen = FrozenPrompts(prompts, counts, frozen.starts, frozen.pages)
        self._work.wait()
        size = self.layout.page_size
        rows = decode_rows(
            size, self._host_heads, host_batch, None if frozen is None else host_frozen
        )
        self._rows = self._upload(rows, batch.rows * count)
        self._plans = []
        known: dict[bytes, tuple[int, object]] = {}
        for layer in range(layers):
            total = rows.pages(layer)
            pages = decode_pages(self._rows, layer, total, size, table, self.heads, batch, frozen)
            key = b"%d" % layer if self._graph else rows.indptr[layer].numpy().tobytes()
            if key not in known:
                known[key] = len(known), self._plan_layer(len(known), rows.indptr[layer])
            self._plans.append(_LayerPlan(*known[key], self._keep(layer, pages)))
        self._work.record()

    def run(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        table: PageTable,
        layer: int,
        batch: DecodeBatch,
        out: torch.Tensor,
        scale: float,
        logit_cap: float = 0.0,
        frozen: FrozenPrompts | None = None,
        lse: torch.Tensor | None = None,
        may_split: bool = True,
    ) -> torch.Tensor:
        """Attention of one layer, as ``decode_reference.decode``, with ``TritonDecode.run``'s
        arguments: ``table``, ``frozen`` and ``may_split`` were settled by ``plan``.

        Args:
            q: [R, Hq, D]; copied where its rows are not evenly spaced.
            arena: [NP, P * (D + Dv)]; see ``flashinfer_source`` on masked slots.
            layer: row of ``heads``.
            out: [R, Hq, Dv], contiguous, written; zeros where a row is padded.
            lse: float32 [R, Hq], written if given.

        Returns:
            ``out``.

        Raises:
            ValueError: tensors of another dtype than the runner's.

        Preconditions: ``plan`` was called for this batch. No sync; fit for a CUDA graph if
        ``page_capacity`` was given.
        """
        check_dtypes(self.dtype, q, arena, out)
        rows, planned = self._rows, self._plans[layer]
        queries = q.reshape(-1, self.group, self.layout.head_dim)
        base2 = None if lse is None else self._lse[: len(queries)]
        keys, values = cache_views(self.layout, arena)
        self._module.run(
            self._work.floats, self._work.pair(planned.pair)[0], planned.info, queries, keys,
            values, rows.indptr[layer], planned.pages, rows.last_page_len[layer],
            out.view(queries.shape), base2, NHD, NO_WINDOW, False,
            rows.hole_at[layer], rows.hole_end[layer], float(scale), float(logit_cap),
        )  # fmt: skip
        if lse is not None:
            torch.mul(base2.view(lse.shape), math.log(2), out=lse)
        return out

    def warm_up(self) -> None:
        """Run one row once, so that the first request does not wait for the driver.

        Side effect: forgets the last plan.
        """
        device, units = self._device, int(self._host_heads.units.max()) + 1

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        table = PageTable(zeros(units, 1), zeros(1, 1))
        batch = DecodeBatch(zeros(1), zeros(1) + 1)
        arena = ArenaLayout(1, self.layout.page_size, self.layout.head_dim, self.layout.v_head_dim)
        q = torch.zeros(
            1, self.heads.shape[1] * self.group, self.layout.head_dim,
            dtype=self.dtype, device=device,
        )  # fmt: skip
        self.plan(batch, table)
        store = arena.allocate(self.dtype, device)
        self.run(q, store, table, 0, batch, torch.empty_like(q), 1.0)

    def _upload(self, rows: DecodeRows, count: int) -> DecodeRows:
        packed = rows.pack()
        place = self._packed[: packed.numel()].view(packed.shape)
        place.copy_(upload(packed, self._device))
        return DecodeRows.unpack(place, count)

    def _plan_layer(self, pair: int, indptr: torch.Tensor):
        layout, (ints, pinned) = self.layout, self._work.pair(pair)
        empty = torch.empty(0, dtype=self.dtype)
        return self._module.plan(
            self._work.floats, ints, pinned, indptr, len(indptr) - 1, self.group, 1,
            layout.page_size, self._graph, NO_WINDOW, 0.0, layout.head_dim, layout.v_head_dim,
            empty, empty,
        )  # fmt: skip

    def _keep(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """The page list at its lasting place, if there is one."""
        if self._lists is None:
            return pages
        if len(pages) > self._lists.shape[1]:
            raise ValueError(f"{len(pages)} pages of a layer, room for {self._lists.shape[1]}")
        self._lists[layer, : len(pages)] = pages
        return self._lists[layer]

"""Ragged decode in Triton: one new token per row over per-head pages (design section 6).

Two stages. The first runs the work list of ``triton_work``: a program reads one chunk of one
(request, kv head) and writes the output itself if the row is one chunk, else a partial result. The
second merges the rows that were cut; where none was, its programs end at once, and ``may_split``
spares the launch where no row can be long enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashinfer_ext.contract import (
    CHUNK_STEP,
    ITEMS_PER_PROCESSOR,
    ArenaLayout,
    DecodeBatch,
    FrozenPrompts,
    LayerHeads,
    PageTable,
)
from flashinfer_ext.triton_tiles import UNLIMITED, absorb, block_of, finish, load_tile, scores_of
from flashinfer_ext.triton_work import WorkList, span_of

MERGED = 16
"""Partial results that the merge takes at once."""


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes: ``block`` keys a tile, ``warps`` and ``stages`` of the pipeline."""

    block: int
    warps: int
    stages: int


def decode_config(head_dim: int, itemsize: int, group: int = 1) -> DecodeConfig:
    """What ``python -m flashinfer_ext aot`` found free of spills for this head dim and GQA group.

    A tile's keys hang on two loads before them, so Triton holds one tile of K and V in shared
    memory up to 6 stages, and another for every 3 more.
    """
    if itemsize > 2:
        return DecodeConfig(16, 4, 2)
    if group > 16:
        return DecodeConfig(32, 8, 7)
    return DecodeConfig(64, 4, 7) if head_dim <= 128 else DecodeConfig(16, 8, 13)


class TritonDecode:
    """Decode of a fixed set of layers: all buffers are allocated here, none while serving.

    Args:
        layout: of the arena.
        heads: all layers' kv heads.
        group: query heads of a kv head, G.
        max_rows: most requests of a batch, padded ones included.
        device: of the arena.
        target: items beyond one per row; None takes four per multiprocessor (64 on a CPU).

    Raises:
        ValueError: G above 64.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        heads: LayerHeads,
        group: int,
        max_rows: int,
        device: str | torch.device,
        target: int | None = None,
    ) -> None:
        if not 1 <= group <= 64:
            raise ValueError(f"{group} query heads of a kv head: 1 to 64 are supported")
        self.layout, self.heads, self.group = layout, heads, group
        target = _default_target(device) if target is None else target
        layers, count = heads.shape
        self.work = WorkList.allocate(layers, max_rows * count, target, device)
        items = self.work.items(max_rows * count)
        self._partial = torch.zeros(items, group, layout.v_head_dim, device=device)
        self._partial_lse = torch.zeros(items, group, device=device)

    def plan(self, batch: DecodeBatch, frozen: FrozenPrompts | None = None) -> None:
        """Write every layer's work list for ``batch``. One launch, no sync, no allocation.

        Call once a step after the lengths have changed, before ``run`` of any layer.
        """
        self.work.fill(batch, self.heads, frozen)

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
        """Attention of one layer, as ``decode_reference.decode``.

        Args:
            q: [R, Hq, D]; each head's D elements are contiguous.
            arena: [NP, P * (D + Dv)].
            layer: row of ``heads``.
            out: [R, Hq, Dv], written; zeros where a row is padded.
            lse: float32 [R, Hq], written if given.
            may_split: False only if no row reads more than ``CHUNK_STEP`` tokens: the merge is
                then not launched.

        Returns:
            ``out``.

        Preconditions: ``plan`` was called for this batch with the same ``frozen``.
        """
        layout, work = self.layout, self.work
        count = self.heads.shape[1]
        rows = batch.rows * count
        config = decode_config(layout.head_dim, arena.element_size(), self.group)
        none = work.chunks
        shape = {
            "HEADS": count, "GROUP": self.group, "BLOCK_G": block_of(self.group),
            "DV": layout.v_head_dim, "BLOCK_DV": block_of(layout.v_head_dim),
            "HAS_LSE": lse is not None, "num_warps": config.warps,
        }  # fmt: skip
        out_lse = lse if lse is not None else self._partial_lse
        _decode_kernel[(work.items(rows),)](
            q, arena, out, out_lse, self._partial, self._partial_lse,
            table.pages, table.slots, batch.requests, batch.lengths,
            self.heads.units, self.heads.windows, self.heads.sinks,
            frozen.prompts if frozen else none, frozen.counts if frozen else none,
            frozen.starts if frozen else none, frozen.pages if frozen else none,
            frozen.counts.shape[1] if frozen else 0,
            work.item_rows, work.item_parts, work.row_firsts, work.row_parts, work.chunks, layer,
            work.item_rows.shape[1], work.row_parts.shape[1],
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), out_lse.stride(0),
            table.pages.stride(0), table.slots.stride(0), scale,
            PAGE=layout.page_size, PAGE_ELEMENTS=layout.page_elements, D=layout.head_dim,
            BLOCK_D=block_of(layout.head_dim), BLOCK_N=config.block, CAP=float(logit_cap),
            FROZEN=frozen is not None, num_stages=config.stages, **shape,
        )  # fmt: skip
        if may_split:
            _merge_kernel[(rows, self.group)](
                self._partial, self._partial_lse, out, out_lse, work.row_firsts, work.row_parts,
                layer, work.row_parts.shape[1], out.stride(0), out.stride(1), out_lse.stride(0),
                MERGED=MERGED, **shape,
            )  # fmt: skip
        return out


def _default_target(device: str | torch.device) -> int:
    if torch.device(device).type != "cuda":
        return CHUNK_STEP
    return ITEMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["num_units", "layer", "item_stride", "row_stride"])
def _decode_kernel(
    q, arena, out, out_lse, partial, partial_lse,
    pages, slots, requests, lengths, units, windows, sinks,
    prompts, counts, starts, compact, num_units,
    item_rows, item_parts, row_firsts, row_parts, chunks, layer,
    item_stride, row_stride,
    stride_qr, stride_qh, stride_or, stride_oh, stride_lr,
    stride_page, stride_slot, scale,
    PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, CAP: tl.constexpr, FROZEN: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row = tl.load(item_rows + layer * item_stride + item)
    if row < 0:
        return
    part = tl.load(item_parts + layer * item_stride + item)
    parts = tl.load(row_parts + layer * row_stride + row)
    chunk = tl.load(chunks + layer)
    r, h = row // HEADS, row % HEADS
    length = tl.load(lengths + r)
    head = layer * HEADS + h
    unit = tl.load(units + head)
    window = tl.load(windows + head)
    prompt = 0
    kept = 0
    first_compact = tl.zeros([], tl.int64)
    request = tl.where(length > 0, tl.load(requests + r), 0).to(tl.int64)
    if FROZEN:  # noqa: SIM102 - a constant: without it the loads are not compiled at all
        if (window == UNLIMITED) & (length > 0):
            prompt = tl.load(prompts + request)
            kept = tl.load(counts + request * num_units + unit)
            first_compact = tl.load(starts + request * num_units + unit)
    frozen, gap_at, gap, rest = span_of(length, window, tl.load(sinks + head), prompt, kept)
    reads = tl.where(length > 0, frozen + gap_at + rest, 0)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    queries = q + r.to(tl.int64) * stride_qr + (h * GROUP + g)[:, None] * stride_qh + d[None, :]
    tile_q = tl.load(queries, mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    end = tl.minimum((part + 1) * chunk, reads)
    unit_pages = pages + unit.to(tl.int64) * stride_page
    request_slots = slots + request * stride_slot
    for start in range(part * chunk, end, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        live = index < end
        own = index - frozen
        position = own + tl.where(own < gap_at, 0, gap)
        in_compact = index < frozen
        logical = tl.load(request_slots + position, mask=live & ~in_compact, other=0)
        page = tl.load(unit_pages + logical // PAGE, mask=live & ~in_compact, other=0)
        slot = position % PAGE
        if FROZEN:
            held = tl.load(compact + first_compact + index // PAGE, mask=live & in_compact, other=0)
            page = tl.where(in_compact, held, page)
            slot = tl.where(in_compact, index % PAGE, slot)
        k = load_tile(arena, page, slot, live, 0, PAGE, PAGE_ELEMENTS, D, BLOCK_D)
        v = load_tile(arena, page, slot, live, PAGE * D, PAGE, PAGE_ELEMENTS, DV, BLOCK_DV)
        s = scores_of(tile_q, k, scale, CAP)
        top, mass, acc = absorb(s, live[None, :], v, top, mass, acc)
    result, lse = finish(top, mass, acc)
    columns = (g < GROUP)[:, None] & (dv < DV)[None, :]
    if parts == 1:
        target = out + r.to(tl.int64) * stride_or + (h * GROUP + g)[:, None] * stride_oh
        tl.store(target + dv[None, :], result.to(out.dtype.element_ty), mask=columns)
        if HAS_LSE:
            tl.store(out_lse + r * stride_lr + h * GROUP + g, lse, mask=g < GROUP)
    else:
        place = (tl.load(row_firsts + layer * row_stride + row) + part) * GROUP + g
        tl.store(partial + place[:, None] * DV + dv[None, :], result, mask=columns)
        tl.store(partial_lse + place, lse, mask=g < GROUP)


@triton.jit(do_not_specialize=["layer", "row_stride"])
def _merge_kernel(
    partial, partial_lse, out, out_lse, row_firsts, row_parts, layer, row_stride,
    stride_or, stride_oh, stride_lr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LSE: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    row, g = tl.program_id(0), tl.program_id(1)
    parts = tl.load(row_parts + layer * row_stride + row)
    if parts == 1:
        return
    first = tl.load(row_firsts + layer * row_stride + row)
    r, h = row // HEADS, row % HEADS
    dv = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    mass = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, parts, MERGED):
        part = start + tl.arange(0, MERGED)
        live = part < parts
        place = (first + part) * GROUP + g
        value = tl.load(
            partial + place[:, None] * DV + dv[None, :],
            mask=live[:, None] & (dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        lse = tl.load(partial_lse + place, mask=live, other=float("-inf"))
        new = tl.maximum(top, tl.max(lse, 0))
        decay, weights = tl.exp(top - new), tl.exp(lse - new)
        mass = mass * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(value * weights[:, None], 0)
        top = new
    target = out + r.to(tl.int64) * stride_or + (h * GROUP + g) * stride_oh
    tl.store(target + dv, (acc / mass).to(out.dtype.element_ty), mask=dv < DV)
    if HAS_LSE:
        tl.store(out_lse + r * stride_lr + h * GROUP + g, top + tl.log(mass))

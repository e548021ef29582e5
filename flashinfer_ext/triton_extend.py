"""Ragged extend in Triton: prefill chunks over resident pages and their own fresh K and V.

A program takes a block of queries of one request and kv head, with the head's query heads packed
beside them, and reads first the resident history, then the chunk up to the diagonal. What a window
hides is skipped in the chunk tile by tile; of the history only what is resident is listed at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashinfer_ext.contract import ArenaLayout, ExtendBatch, LayerHeads
from flashinfer_ext.triton_tiles import absorb, block_of, finish, load_tile, scores_of


@dataclass(frozen=True)
class ExtendConfig:
    """Tile sizes: ``rows`` of packed queries, ``block`` keys a tile, warps, pipeline stages."""

    rows: int
    block: int
    warps: int
    stages: int


def extend_config(head_dim: int, itemsize: int, capability: int) -> ExtendConfig:
    """What ``python -m flashinfer_ext aot`` found free of spills for this head dim and GPU.

    ``capability``: 80, 90, 100; 0 for the CPU's interpreter.
    """
    if itemsize > 2:
        return ExtendConfig(32, 16, 4 if head_dim <= 64 else 8, 1)
    if head_dim > 128:
        return ExtendConfig(64, 32, 8, 2)
    if capability and capability < 90:
        return ExtendConfig(64, 32, 4 if head_dim <= 64 else 8, 2)
    return ExtendConfig(64, 64, 4, 2)


def capability_of(device: torch.device) -> int:
    """10 * major + minor of a CUDA device, 0 for another."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layout: ArenaLayout,
    heads: LayerHeads,
    layer: int,
    batch: ExtendBatch,
    out: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of prefill chunks, as ``extend_reference.extend``. No sync.

    Args:
        q: [T, Hq, D]; k: [T, H, D]; v: [T, H, Dv]; the last dim contiguous.
        layer: row of ``heads``.
        out: [T, Hq, Dv], written.
        lse: float32 [T, Hq], written if given.

    Returns:
        ``out``.

    Raises:
        ValueError: more query heads of a kv head than a tile has rows.
    """
    count = k.shape[1]
    group = q.shape[1] // count
    config = extend_config(layout.head_dim, arena.element_size(), capability_of(q.device))
    queries = config.rows // group
    if not queries:
        raise ValueError(f"{group} query heads of a kv head: 1 to {config.rows} are supported")
    if not batch.longest:
        return out
    out_lse = lse if lse is not None else q
    _extend_kernel[(triton.cdiv(batch.longest, queries), batch.requests, count)](
        q, k, v, arena, out, out_lse, batch.offsets, batch.begins, batch.page_starts,
        batch.position_starts, batch.counts, batch.pages, batch.positions,
        heads.units, heads.windows, heads.sinks, layer * count, batch.requests,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        out.stride(0), out.stride(1), out_lse.stride(0), scale,
        GROUP=group, QUERIES=queries, PAGE=layout.page_size, PAGE_ELEMENTS=layout.page_elements,
        D=layout.head_dim, BLOCK_D=block_of(layout.head_dim), DV=layout.v_head_dim,
        BLOCK_DV=block_of(layout.v_head_dim), BLOCK_M=config.rows, BLOCK_N=config.block,
        CAP=float(logit_cap), HAS_LSE=lse is not None,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


@triton.jit
def _fresh_tile(x, rows, live, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[n, BLOCK] vectors of the chunk's own tokens; zeros where ``live`` is false."""
    dims = tl.arange(0, BLOCK)
    mask = live[:, None]
    if BLOCK != DIM:
        mask = mask & (dims < DIM)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["first_head", "requests"])
def _extend_kernel(
    q, k, v, arena, out, out_lse, offsets, begins, page_starts, position_starts, counts,
    pages, positions, units, windows, sinks, first_head, requests,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lt, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    r, h = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(offsets + r)
    length = tl.load(offsets + r + 1) - first_row
    # the latest queries read most: they go first, so that the launch ends evenly
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first >= length:
        return
    begin = tl.load(begins + r)
    head = first_head + h
    unit = tl.load(units + head)
    window, sink = tl.load(windows + head), tl.load(sinks + head)

    m = tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    own, query_head = first + m // GROUP, h * GROUP + m % GROUP
    valid = (m < QUERIES * GROUP) & (own < length)
    query = begin + own
    row = (first_row + own).to(tl.int64)
    tile_q = tl.load(
        q + row[:, None] * stride_qt + query_head[:, None] * stride_qh + d[None, :],
        mask=valid[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    cell = unit.to(tl.int64) * requests + r
    slots = tl.load(counts + cell)
    list_pages = pages + tl.load(page_starts + cell)
    list_positions = positions + tl.load(position_starts + cell)
    oldest = begin + first - window  # at or before it, only sinks are read by this block
    for start in range(0, slots, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        position = tl.load(list_positions + index, mask=index < slots, other=-1)
        live = (position >= 0) & (position < begin) & ((position > oldest) | (position < sink))
        page = tl.load(list_pages + index // PAGE, mask=live, other=0)
        slot = index % PAGE
        old_k = load_tile(arena, page, slot, live, 0, PAGE, PAGE_ELEMENTS, D, BLOCK_D)
        old_v = load_tile(arena, page, slot, live, PAGE * D, PAGE, PAGE_ELEMENTS, DV, BLOCK_DV)
        seen = (position[None, :] > query[:, None] - window) | (position < sink)[None, :]
        s = scores_of(tile_q, old_k, scale, CAP)
        top, mass, acc = absorb(s, seen & live[None, :], old_v, top, mass, acc)

    last = tl.minimum(first + QUERIES, length)
    nearest = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    sink_end = tl.minimum(tl.maximum(sink - begin, 0), nearest)
    for pass_ in tl.static_range(2):  # sinks of this very chunk, then the window up to the diagonal
        low = 0 if pass_ == 0 else nearest
        high = sink_end if pass_ == 0 else last
        for start in range(low, high, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            live = index < high
            new_k = _fresh_tile(k + h * stride_kh, first_row + index, live, stride_kt, D, BLOCK_D)
            new_v = _fresh_tile(v + h * stride_vh, first_row + index, live, stride_vt, DV, BLOCK_DV)
            position = begin + index
            seen = (position[None, :] > query[:, None] - window) | (position < sink)[None, :]
            seen = seen & (position[None, :] <= query[:, None]) & live[None, :]
            s = scores_of(tile_q, new_k, scale, CAP)
            top, mass, acc = absorb(s, seen, new_v, top, mass, acc)

    result, lse = finish(top, mass, acc)
    target = out + row[:, None] * stride_ot + query_head[:, None] * stride_oh + dv[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=valid[:, None] & (dv < DV)[None, :])
    if HAS_LSE:
        tl.store(out_lse + row * stride_lt + query_head, lse, mask=valid)

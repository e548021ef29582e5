"""Stores fresh K and V into the pages that the table names: one launch a layer, no host plan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashinfer_ext.contract import ArenaLayout, LayerHeads

TOKENS = 16


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layout: ArenaLayout,
    pages: torch.Tensor,
    heads: LayerHeads,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """Write each token to its slot on every kv head of ``layer``.

    Args:
        k: [T, H, D]; v: [T, H, Dv]; the last dim contiguous. Converted to the arena's dtype.
        pages: int32 [U, G] of ``PageTable``: where a unit has no page, the sink page is written.
        slots: int [T], logical slot of each token (logical page = slot // P).

    Side effect: changes ``arena``. Two tokens of one unit never share a slot but the sink's.
    """
    tokens, count = k.shape[0], k.shape[1]
    if not tokens:
        return
    _store_kernel[(triton.cdiv(tokens, TOKENS), count)](
        k, v, arena, pages, heads.units, slots, layer * count, tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), pages.stride(0),
        PAGE=layout.page_size, PAGE_ELEMENTS=layout.page_elements,
        D=layout.head_dim, BLOCK_D=triton.next_power_of_2(layout.head_dim),
        DV=layout.v_head_dim, BLOCK_DV=triton.next_power_of_2(layout.v_head_dim),
        TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_head", "tokens"])
def _store_kernel(
    k, v, arena, pages, units, slots, first_head, tokens,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_page,
    PAGE: tl.constexpr, PAGE_ELEMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    unit = tl.load(units + first_head + h).to(tl.int64)
    slot = tl.load(slots + token, mask=live, other=0)
    page = tl.load(pages + unit * stride_page + slot // PAGE, mask=live, other=0).to(tl.int64)
    place = page * PAGE_ELEMENTS
    offset = slot % PAGE
    row = token.to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    in_k = live[:, None] & (d < D)[None, :]
    in_v = live[:, None] & (dv < DV)[None, :]
    fresh_k = tl.load(k + row[:, None] * stride_kt + h * stride_kh + d[None, :], mask=in_k)
    fresh_v = tl.load(v + row[:, None] * stride_vt + h * stride_vh + dv[None, :], mask=in_v)
    dtype = arena.dtype.element_ty
    to_k = arena + (place + offset * D)[:, None] + d[None, :]
    to_v = arena + (place + PAGE * D + offset * DV)[:, None] + dv[None, :]
    tl.store(to_k, fresh_k.to(dtype), mask=in_k)
    tl.store(to_v, fresh_v.to(dtype), mask=in_v)

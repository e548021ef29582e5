"""Torch reference of ragged decode over the page table: row by row, in float32."""

from __future__ import annotations

import torch

from flashinfer_ext.contract import (
    ArenaLayout,
    DecodeBatch,
    FrozenPrompts,
    LayerHeads,
    PageTable,
    ReadRange,
    read_range,
)


def decode(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: ArenaLayout,
    table: PageTable,
    heads: LayerHeads,
    layer: int,
    batch: DecodeBatch,
    scale: float,
    logit_cap: float = 0.0,
    frozen: FrozenPrompts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token per row. Synchronises with the device: a reference only.

    Args:
        q: [R, Hq, D]; kv head h serves query heads [h * G, (h + 1) * G).
        arena: [NP, P * (D + Dv)].
        layer: row of ``heads``.
        scale: applied to q.k; ``logit_cap`` c makes scores c * tanh(scores / c), 0 is off.

    Returns:
        (out [R, Hq, Dv] in q's dtype, lse float32 [R, Hq], natural log of the sum of exponentials;
        0 and -inf for padded rows).
    """
    count = heads.shape[1]
    grouped = q.unflatten(1, (count, -1)).float()
    out = grouped.new_zeros(*grouped.shape[:3], layout.v_head_dim)
    lse = grouped.new_full(grouped.shape[:3], float("-inf"))
    for r in range(batch.rows):
        for h in range(count):
            span = row_range(table, heads, layer, batch, r, h, frozen)
            if span is None:
                continue
            k, v = gather(arena, layout, table, heads, layer, batch, r, h, span, frozen)
            scores = grouped[r, h] @ k.float().T * scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            lse[r, h] = scores.logsumexp(-1)
            out[r, h] = scores.softmax(-1) @ v.float()
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def row_range(
    table: PageTable,
    heads: LayerHeads,
    layer: int,
    batch: DecodeBatch,
    row: int,
    head: int,
    frozen: FrozenPrompts | None,
) -> ReadRange | None:
    """What one (row, kv head) reads; None for a padded row."""
    length, request = int(batch.lengths[row]), int(batch.requests[row])
    if not length:
        return None
    window, unit = int(heads.windows[layer, head]), int(heads.units[layer, head])
    prompt = kept = 0
    if frozen is not None and window == 2**31 - 1:
        prompt, kept = int(frozen.prompts[request]), int(frozen.counts[request, unit])
    return read_range(length, window, int(heads.sinks[layer, head]), prompt, kept)


def gather(
    arena: torch.Tensor,
    layout: ArenaLayout,
    table: PageTable,
    heads: LayerHeads,
    layer: int,
    batch: DecodeBatch,
    row: int,
    head: int,
    span: ReadRange,
    frozen: FrozenPrompts | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(K [n, D], V [n, Dv]) of everything that one (row, kv head) reads, in reading order."""
    size, unit = layout.page_size, int(heads.units[layer, head])
    request = int(batch.requests[row])
    index = torch.arange(span.gap_at + span.rest, device=arena.device)
    positions = index + torch.where(index < span.gap_at, 0, span.gap)
    slots = table.slots[request, positions].long()
    pages, offsets = table.pages[unit, slots // size].long(), positions % size
    if span.frozen:
        index = torch.arange(span.frozen, device=arena.device)
        first = int(frozen.starts[request, unit])
        compact = frozen.pages[first + index // size].long()
        pages, offsets = torch.cat([compact, pages]), torch.cat([index % size, offsets])
    return layout.keys(arena)[pages, offsets], layout.values(arena)[pages, offsets]

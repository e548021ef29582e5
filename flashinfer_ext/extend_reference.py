"""Torch reference of ragged extend over flat page lists: request by request, in float32."""

from __future__ import annotations

import torch

from flashinfer_ext.contract import ArenaLayout, ExtendBatch, HeadWindow, LayerHeads


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layout: ArenaLayout,
    heads: LayerHeads,
    layer: int,
    batch: ExtendBatch,
    scale: float,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of prefill chunks over resident history and themselves. Synchronises.

    Args:
        q: [T, Hq, D]; k: [T, H, D]; v: [T, H, Dv], the batch's fresh tokens.
        arena: [NP, P * (D + Dv)].
        layer: row of ``heads``.

    Returns:
        (out [T, Hq, Dv] in q's dtype, lse float32 [T, Hq]).
    """
    count = k.shape[1]
    grouped = q.unflatten(1, (count, -1))
    out = grouped.new_zeros(*grouped.shape[:3], layout.v_head_dim)
    lse = torch.zeros(grouped.shape[:3], device=q.device)
    for r in range(batch.requests):
        rows = slice(int(batch.offsets[r]), int(batch.offsets[r + 1]))
        begin, length = int(batch.begins[r]), rows.stop - rows.start
        query = torch.arange(begin, begin + length, device=q.device)
        for h in range(count):
            window = HeadWindow(int(heads.windows[layer, h]), int(heads.sinks[layer, h]))
            old_k, old_v, old = _history(arena, layout, batch, int(heads.units[layer, h]), r)
            stored = (old >= 0) & (old < begin)
            keys = torch.cat([old_k[stored], k[rows, h]]).float()
            values = torch.cat([old_v[stored], v[rows, h]]).float()
            positions = torch.cat([old[stored], query])
            scores = grouped[rows, h].float().transpose(0, 1) @ keys.T * scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            seen = window.visible(query[:, None], positions[None, :])
            scores = scores.masked_fill(~seen, float("-inf")).transpose(0, 1)
            lse[rows, h] = scores.logsumexp(-1)
            out[rows, h] = (scores.softmax(-1) @ values).to(q.dtype)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _history(arena: torch.Tensor, layout: ArenaLayout, batch: ExtendBatch, unit: int, r: int):
    """(keys [S, D], values [S, Dv], positions [S]) of one unit's history slots."""
    slots = int(batch.counts[unit, r])
    first, start = int(batch.page_starts[unit, r]), int(batch.position_starts[unit, r])
    pages = batch.pages[first : first + slots // layout.page_size].long()
    positions = batch.positions[start : start + slots].long()
    return (
        layout.keys(arena)[pages].flatten(0, 1),
        layout.values(arena)[pages].flatten(0, 1),
        positions,
    )

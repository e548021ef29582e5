"""Torch reference of ragged paged attention: right on any device, fast on none.

Slots that a query may not read are zeroed before they enter an arithmetic operation, so stale or
NaN bytes in unowned slots cannot reach an output.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from flashinfer_ext.contract import HeadWindow

QUERY_BLOCK = 256
"""Queries of one block in ``extend``: bounds the score matrix at 256 x (window + 256)."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Softmax attention of the G query heads of each kv head.

    Args:
        q: [H, G, T, D]; k: [H, L, D]; v: [H, L, Dv], all of one floating dtype.
        mask: bool, broadcastable to [H, 1, T, L]; True is read. Each query reads at least one key.
        scale: applied to q.k.
        logit_cap: soft-cap c, scores become c * tanh(scores / c); 0 is off.

    Returns:
        [H, G, T, Dv] in q's dtype.
    """
    k, v = k.unsqueeze(1), v.unsqueeze(1)
    if not logit_cap:
        groups = q.shape[1]
        k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    scores = logit_cap * torch.tanh(scores / logit_cap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.matmul(weights, v.float()).to(q.dtype)


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    key_positions: torch.Tensor,
    query_positions: torch.Tensor,
    window: HeadWindow,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """One query token per request over the pages of several kv heads with one window.

    Args:
        q: [R, H, G, D] for R requests.
        keys, values: arena views [NP, P, D], [NP, P, Dv].
        pages: int [H, R, M] physical pages, padded with the sink page.
        key_positions: int64 [R, M * P], or [H, R, M * P] where it differs between the heads;
            negative where a slot holds no token of the request.
        query_positions: int64 [R].
        window: what each query reads.

    Returns:
        [R, H, G, Dv].
    """
    heads, requests, _ = pages.shape
    readable = window.visible(query_positions[:, None], key_positions) & (key_positions >= 0)
    readable = readable.expand(heads, -1, -1)
    index = pages.long()
    k = keys[index].reshape(heads, requests, -1, keys.shape[-1])
    v = values[index].reshape(heads, requests, -1, values.shape[-1])
    hidden = ~readable[..., None]
    k, v = k.masked_fill_(hidden, 0), v.masked_fill_(hidden, 0)
    rows = q.transpose(0, 1).flatten(0, 1).unsqueeze(2)
    mask = readable.reshape(heads * requests, 1, 1, -1)
    out = attend(rows, k.flatten(0, 1), v.flatten(0, 1), mask, scale, logit_cap)
    return out.view(heads, requests, *out.shape[1:]).squeeze(3).transpose(0, 1)


def extend(
    q: torch.Tensor,
    history_k: torch.Tensor,
    history_v: torch.Tensor,
    history_positions: torch.Tensor,
    chunk_k: torch.Tensor,
    chunk_v: torch.Tensor,
    start: int,
    window: HeadWindow,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """A prefill chunk of one request: queries ``start..start+T`` over history and the chunk.

    Args:
        q: [T, H, G, D].
        history_k, history_v: [H, S, D], [H, S, Dv], slots of resident pages in position order.
        history_positions: int64 [S]; only slots with 0 <= position < start hold tokens.
        chunk_k, chunk_v: [T, H, D], [T, H, Dv], fresh from the projections.
        window: what each query reads.

    Returns:
        [T, H, G, Dv].
    """
    length = q.shape[0]
    device = q.device
    stored = ((history_positions >= 0) & (history_positions < start)).nonzero().squeeze(1)
    history_positions = history_positions[stored]
    positions = torch.cat([history_positions, torch.arange(start, start + length, device=device)])
    k = torch.cat([history_k[:, stored], chunk_k.transpose(0, 1)], dim=1)
    v = torch.cat([history_v[:, stored], chunk_v.transpose(0, 1)], dim=1)
    heads_first = q.permute(1, 2, 0, 3)
    out = q.new_empty(*heads_first.shape[:3], v.shape[-1])
    for begin in range(0, length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, length)
        query = torch.arange(start + begin, start + end, device=device)
        reach = (positions < start + end) & (
            (positions > start + begin - window.window) | (positions < window.sinks)
        )
        seen = reach.nonzero().squeeze(1)
        mask = window.visible(query[:, None], positions[seen][None, :])
        out[:, :, begin:end] = attend(
            heads_first[:, :, begin:end], k[:, seen], v[:, seen], mask, scale, logit_cap
        )
    return out.permute(2, 0, 1, 3)

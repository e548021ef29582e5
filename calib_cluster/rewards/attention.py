"""Attention of continuation tokens that read a frozen prompt and themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from calib_cluster.attention import HeadInputs


@dataclass(frozen=True, eq=False)
class Visible:
    """Prompt keys that n rows of C continuation queries read, gathered.

    ``keys`` [n, H, S, D] and ``values`` [n, H, S, Dv], n may be 1 for all rows; ``seen`` bool
    [n, H, C, S], each of n, H and C may be 1; ``own`` bool [C, C], which of the continuation's
    keys (columns) its queries read.
    """

    keys: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True, eq=False)
class History:
    """One layer's cache of a prompt of T tokens, after RoPE: ``keys`` [H, S, D], ``values``
    [H, S, Dv] of its last S tokens; ``window`` of a native layer, else 0 (then S is T)."""

    keys: torch.Tensor
    values: torch.Tensor
    window: int = 0

    @classmethod
    def of(cls, inputs: HeadInputs, length: int, window: int) -> History:
        """From a layer's inputs of ``length`` prompt tokens and more; copies what it keeps."""
        first = max(0, length - window + 1) if window else 0
        part = slice(first, length)
        return cls(inputs.k[:, part].clone(), inputs.v[:, part].clone(), window)

    def whole(self, count: int) -> Visible:
        """What ``count`` continuation tokens read in a native layer: nothing is ever dropped."""
        stored = self.keys.shape[1]
        at = torch.arange(count, device=self.keys.device)
        behind = stored + at[:, None] - torch.arange(stored, device=self.keys.device)
        gap = at[:, None] - at
        window = self.window or stored + count
        seen = (behind < window)[None, None]
        return Visible(self.keys[None], self.values[None], seen, (gap >= 0) & (gap < window))

    def frozen(self, positions: torch.Tensor, count: int) -> Visible:
        """What ``count`` continuation tokens read of a frozen layer.

        ``positions`` int64 [n, H, width], kept prompt positions, -1 where there is none.
        """
        heads = torch.arange(self.keys.shape[0], device=self.keys.device)[:, None]
        at = positions.clamp_min(0)
        own = torch.ones(count, count, dtype=torch.bool, device=self.keys.device).tril()
        seen = (positions >= 0)[:, :, None]
        return Visible(self.keys[heads, at], self.values[heads, at], seen, own)


def attend_continuation(inputs: HeadInputs, visible: Visible) -> torch.Tensor:
    """Softmax attention of n rows of C continuation tokens, row after row along T.

    ``inputs``: q [Hq, n * C, D], k and v of the same tokens. Every query reads itself. Returns
    [n * C, Hq, Dv] in q's dtype, computed in float32.
    """
    heads, count = inputs.k.shape[0], visible.own.shape[0]
    q = inputs.q.unflatten(0, (heads, -1)).unflatten(2, (-1, count)).float() * inputs.scaling
    k, v = (x.unflatten(1, (-1, count)).transpose(0, 1).float() for x in (inputs.k, inputs.v))
    group, rows = q.shape[1], q.shape[2]
    q = q.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [n, H, G * C, D]
    parts = [q @ visible.keys.float().transpose(-1, -2), q @ k.transpose(-1, -2)]
    logits = torch.cat(parts, dim=-1).unflatten(2, (group, count))
    if inputs.softcap is not None:
        logits = torch.tanh(logits / inputs.softcap) * inputs.softcap
    stored = visible.keys.shape[2]
    seen = visible.seen.expand(-1, -1, count, -1)[:, :, None]
    logits[..., :stored].masked_fill_(~seen, float("-inf"))
    logits[..., stored:].masked_fill_(~visible.own, float("-inf"))
    weights = logits.softmax(-1).flatten(2, 3)
    out = weights[..., :stored] @ visible.values.float() + weights[..., stored:] @ v
    out = out.reshape(rows, heads, group, count, -1).permute(0, 3, 1, 2, 4)
    return out.flatten(0, 1).flatten(1, 2).to(inputs.q.dtype)

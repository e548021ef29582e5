"""Taking the fused input projection of a Gated DeltaNet apart.

Both give ``mixed_qkv`` [T, H K + H K + Hv V] (all queries, all keys, all values), z [T, Hv, V], and
b, a [T, Hv].
"""

from __future__ import annotations

import torch

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> Parts:
    """Qwen3-Next's layout: for every key head its q, k, values, z; and its b, a."""
    group = num_heads_v // num_heads_qk
    sizes = [head_qk, head_qk, group * head_v, group * head_v]
    parts = mixed_qkvz.unflatten(1, (num_heads_qk, sum(sizes))).split(sizes, 2)
    b, a = mixed_ba.unflatten(1, (num_heads_qk, 2 * group)).split(group, 2)
    q, k, v, z = (part.flatten(1) for part in parts)
    z = z.unflatten(1, (num_heads_v, head_v)).contiguous()
    return torch.cat([q, k, v], 1), z, b.flatten(1).contiguous(), a.flatten(1).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> Parts:
    """Qwen3.5's layout: all q, all k, all values, all z; and all b, all a."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([mixed_qkvz.shape[1] - values, values], 1)
    b, a = mixed_ba.split(num_heads_v, 1)
    z = z.unflatten(1, (num_heads_v, head_v)).contiguous()
    return mixed_qkv.contiguous(), z, b.contiguous(), a.contiguous()

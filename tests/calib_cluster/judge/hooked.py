"""kvpress by itself: a press's own hooks on transformers' forward, with transformers' cache."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from calib_cluster.judge import Case


def keys_of(model, ids: torch.Tensor, press=None) -> list[torch.Tensor]:
    """[H, n, D] of each layer's cache after a forward of ``ids``, under a press's own hooks."""
    cache = DynamicCache()
    with torch.inference_mode():
        if press is None:
            model(ids, past_key_values=cache)
        else:
            with press(model):  # its hooks want the positions that transformers 5 has left out
                model(ids, past_key_values=cache, cache_position=torch.arange(ids.shape[1]))
    return [layer.keys[0] for layer in cache.layers]


def kvpress_positions(model, case: Case, press) -> list[set[int]]:
    """Positions that every unit keeps when kvpress runs by itself."""
    ids = torch.tensor([case.prompt])
    whole, found = keys_of(model, ids), []
    for layer, kept in enumerate(keys_of(model, ids, press)):
        module = model.model.layers[layer].self_attn
        mask = getattr(module, "masked_key_indices", None)
        if mask is not None:
            gone = set(zip(mask[1].tolist(), mask[2].tolist(), strict=True))
            heads, length = kept.shape[:2]
            found += [{t for t in range(length) if (h, t) not in gone} for h in range(heads)]
            module.masked_key_indices = None
            continue
        near = torch.cdist(kept, whole[layer]).argmin(-1)
        found += [set(row.tolist()) for row in near]
    return found

"""Which units a freeze touches."""

from __future__ import annotations

import numpy as np

from kvpolicy.geometry import LayerKind
from kvpolicy.windows import FULL, WindowPolicy


def retention_units(policy: WindowPolicy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Units of global layers with an unlimited window: the only ones that are frozen.

    Returns:
        (units, layers, heads): int64 [U] each, in unit order: unit number, row of the policy's
        window matrix (attention layers in execution order), KV head.
    """
    windows = policy.windows
    is_global = [layer.kind is LayerKind.GLOBAL for layer in policy.geometry.attention_layers]
    layers, heads = np.nonzero((windows == FULL) & np.array(is_global)[:, None])
    counts = [layer.num_kv_heads for layer in policy.geometry.attention_layers]
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return (first[layers] + heads).astype(np.int64), layers, heads

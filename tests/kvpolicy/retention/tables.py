"""Made-up compiled tables, and their comparison."""

from __future__ import annotations

import numpy as np

from kvpolicy.manifest import CalibrationRecord
from kvpolicy.retention import RULES, RetentionRule, RetentionTables

COMPILED = CalibrationRecord("cql", {"kjv": "0" * 64}, 5, 10240, 7, "abc", {"alpha": 0.75})


def compiled(geom, rule: RetentionRule = RULES["paper"], seed: int = 0) -> RetentionTables:
    """Random tables of 2 budgets and 4 x 3 bins."""
    rng = np.random.default_rng(seed)
    layers, heads = len(geom.attention_layers), geom.max_kv_heads
    return RetentionTables(
        rule=rule,
        head_weights=rng.uniform(0.8, 1.5, size=(layers, heads)).astype(np.float32),
        budgets=(128, 512),
        gate=rng.uniform(0.8, 1.0, size=(2, layers, 4, 3)).astype(np.float32),
        entropy_edges=np.array([0.2, 0.5, 0.8], np.float32),
        perplexity_edges=np.array([4, 30], np.float32),
    )


def same(a: RetentionTables, b: RetentionTables) -> bool:
    tensors = b.to_tensors()
    return (a.rule, a.budgets) == (b.rule, b.budgets) and all(
        np.array_equal(array, tensors[name]) and array.dtype == tensors[name].dtype
        for name, array in a.to_tensors().items()
    )

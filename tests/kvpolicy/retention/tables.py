"""Made-up compiled tables, and their comparison."""

from __future__ import annotations

import numpy as np

from kvpolicy.manifest import CalibrationRecord
from kvpolicy.retention import RULES, MixTables, RetentionRule, RetentionTables

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


def compiled_mix(geom, budgets: tuple[int, ...] = (64, 256), seed: int = 0) -> RetentionTables:
    """Random shares, three mixtures and few query heads that retrieve; other at every budget."""
    rng = np.random.default_rng(seed)
    shape = len(budgets), len(geom.attention_layers), geom.max_kv_heads
    queries = max(layer.num_q_heads for layer in geom.attention_layers)
    shares = np.exp2(rng.uniform(-2, 2, size=shape))
    quotas = np.array(MIXTURES)[rng.integers(0, len(MIXTURES), size=shape)]
    weights = rng.uniform(0, 1, size=(shape[1], queries)) ** 8
    return RetentionTables(
        rule=RULES["mix"],
        head_weights=np.ones(shape[1:], np.float32),
        budgets=budgets,
        gate=np.ones((0, shape[1], 1, 1), np.float32),
        entropy_edges=np.zeros(0, np.float32),
        perplexity_edges=np.zeros(0, np.float32),
        mix=MixTables(*(x.astype(np.float32) for x in (shares, quotas, weights))),
    )


MIXTURES = ((0.4, 0.3, 0.3), (2.0, 0.0, 0.0), (0.0, 0.3, 0.7))


def same(a: RetentionTables, b: RetentionTables) -> bool:
    tensors = b.to_tensors()
    return (a.rule, a.budgets) == (b.rule, b.budgets) and all(
        np.array_equal(array, tensors[name]) and array.dtype == tensors[name].dtype
        for name, array in a.to_tensors().items()
    )

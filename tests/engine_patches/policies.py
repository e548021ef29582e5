"""Policies made for the serving tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.geometry import LayerKind, read_geometry
from kvpolicy.retention import SOURCES, MixTables, RetentionRule, RetentionTables
from kvpolicy.windows import FULL, WindowPolicy

SIZES = (24, 64, 100, 256, FULL)
"""Below a page and a half, page-aligned, crossing page borders, and unlimited."""


def mixed(model_dir: Path, sinks: int, sizes: Sequence[int] = SIZES, seed: int = 0) -> WindowPolicy:
    """A window drawn from ``sizes`` for every global head; local layers keep their own."""
    geometry = read_geometry(model_dir)
    windows = WindowPolicy.native(geometry).windows.copy()
    rng = np.random.default_rng(seed)
    for row, layer in zip(windows, geometry.attention_layers, strict=True):
        if layer.kind is LayerKind.GLOBAL:
            row[: layer.num_kv_heads] = rng.choice(sizes, size=layer.num_kv_heads)
    return WindowPolicy(geometry, windows, sinks)


def write(
    policy: WindowPolicy, root: Path, name: str = "mixed", retention: RetentionTables | None = None
) -> Path:
    """Write the policy as an artifact under ``root``; returns its folder."""
    points = [PointSpec("default", policy)]
    return write_artifact(root, model_name="m", name=name, points=points, retention=retention)


def tables(model_dir: Path, rule: RetentionRule, seed: int = 0) -> RetentionTables:
    """Tables that differ between heads, layers, budgets and risk bins."""
    geometry = read_geometry(model_dir)
    rng = np.random.default_rng(seed)
    plain = RetentionTables.uniform(geometry, rule)
    weights = rng.choice(np.arange(0.8, 1.51, 0.1), size=plain.head_weights.shape)
    plain = replace(plain, head_weights=weights.astype(np.float32))
    if rule.mixes:
        return replace(plain, budgets=(64, 256), mix=_mix(plain, rng))
    if rule.gate == "off":
        return plain
    budgets, edges = (64, 256), (np.array([0.5, 0.6, 0.7]), np.array([8.0, 20.0]))
    gate = rng.uniform(0.2, 1.0, size=(2, len(geometry.attention_layers), 4, 3))
    return replace(
        plain,
        budgets=budgets,
        gate=gate.astype(np.float32),
        entropy_edges=edges[0].astype(np.float32),
        perplexity_edges=edges[1].astype(np.float32),
    )


def _mix(plain: RetentionTables, rng: np.random.Generator) -> MixTables:
    """Shares from 0.25 to 4; a third of the quotas and of the query weights are 0."""
    cells = (2, *plain.head_weights.shape)
    shares = np.exp(rng.uniform(np.log(0.25), np.log(4), size=cells))
    quotas, weights = (
        rng.uniform(0.1, 1, size=shape) * (rng.random(shape) < 2 / 3)
        for shape in ((*cells, len(SOURCES)), plain.mix.query_weights.shape)
    )
    quotas[..., 0] += quotas.sum(-1) == 0
    return MixTables(*(x.astype(np.float32) for x in (shares, quotas, weights)))

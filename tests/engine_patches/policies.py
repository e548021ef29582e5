"""Policies made for the serving tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.geometry import LayerKind, read_geometry
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


def write(policy: WindowPolicy, root: Path, name: str = "mixed") -> Path:
    """Write the policy as an artifact under ``root``; returns its folder."""
    return write_artifact(root, model_name="m", name=name, points=[PointSpec("default", policy)])

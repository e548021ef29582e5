"""A policy with two points for the tests of flags that choose one."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.geometry import LayerKind, read_geometry
from kvpolicy.windows import FULL, WindowPolicy


def two_points(model_dir: Path, root: Path, name: str = "made", window: int = 16) -> Path:
    """Write a policy without sinks: ``tau-0.9`` (the default) gives every global head ``window``,
    ``tau-0.99`` leaves every second one full. Returns its folder."""
    geometry = read_geometry(model_dir)
    low = WindowPolicy.uniform(geometry, window)
    windows = low.windows.copy()
    cells = [
        (row, head)
        for row, layer in enumerate(geometry.attention_layers)
        for head in range(layer.num_kv_heads)
        if layer.kind is LayerKind.GLOBAL
    ]
    for row, head in cells[::2]:
        windows[row, head] = FULL
    points = [
        PointSpec("tau-0.9", low, tau=0.9),
        PointSpec("tau-0.99", WindowPolicy(geometry, windows), tau=0.99),
    ]
    return write_artifact(root, model_name="m", name=name, points=points)

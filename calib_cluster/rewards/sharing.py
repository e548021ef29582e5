"""Draws that keep the same are one computation, layer by layer.

Two draws whose kept sets agree in the layers so far have the same hidden states: such rows are
carried once and part where the sets first differ. Draws that agree everywhere never part, which
is how duplicates are evaluated once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Branch:
    """How the rows of one freezing layer follow from those of the layer before.

    ``parents`` int64 [n]: row of the layer before (0 where there is none). ``draws`` int64 [n]: a
    draw whose kept sets each row has.
    """

    parents: np.ndarray
    draws: np.ndarray


def set_keys(positions: np.ndarray, layers: Iterable[slice]) -> np.ndarray:
    """int64 [N, L]: equal numbers in a column mean equal kept sets in that layer.

    ``positions`` int [N, U, width]; ``layers`` the units of each of L layers.
    """
    columns = []
    for units in layers:
        known: dict[bytes, int] = {}
        part = np.ascontiguousarray(positions[:, units])
        columns.append([known.setdefault(row.tobytes(), len(known)) for row in part])
    return np.array(columns, dtype=np.int64).reshape(len(columns), len(positions)).T


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(draws int64 [M], inverse int64 [N]): one draw of each distinct row of ``keys`` [N, L].

    Sorted so that neighbours agree in as many first layers as possible; ``inverse`` maps a draw
    to its row.
    """
    _, draws, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return draws, inverse.reshape(-1)


def branches(keys: np.ndarray) -> tuple[list[Branch], np.ndarray]:
    """The rows of every layer for draws with ``keys`` [N, L], and each draw's last row [N]."""
    found, before = [], np.zeros(len(keys), dtype=np.int64)
    for layer in range(keys.shape[1]):
        pairs = np.stack([before, keys[:, layer]], axis=1)
        _, draws, rows = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        found.append(Branch(before[draws], draws))
        before = rows.reshape(-1)
    return found, before

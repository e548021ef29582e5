"""Which arm loses least everywhere: how far each falls behind the best one, at its worst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from calib_cluster.judge.arms import FULL
from calib_cluster.judge.items import TEXT
from calib_cluster.judge.results import Cell, Loss
from calib_cluster.judge.summary import ANSWERS


def losses(cells: Sequence[Cell]) -> list[Loss]:
    """Every arm but the full cache, the smallest worst loss first.

    A loss is relative to the best arm of the same length, protocol, task and budget, in [0, 1]: the
    part of its right answer tokens that this one gets wrong, ``1 - accuracy / best``; of text the
    part of this one's divergence that the best avoids, ``1 - best / kl``. ``ANSWERS`` is left out,
    it repeats its tasks.
    """
    columns: dict[tuple, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.arm != FULL and cell.task != ANSWERS:
            columns[cell.length, cell.protocol, cell.task, cell.budget].append(cell)
    found: dict[str, list[tuple[float, Cell]]] = defaultdict(list)
    for members in columns.values():
        for cell, loss in zip(members, _of_column(members), strict=True):
            found[cell.arm].append((loss, cell))
    ranked = []
    for arm, own in found.items():
        worst, cell = max(own, key=lambda pair: pair[0])
        mean = fmean(loss for loss, _ in own)
        ranked.append(
            Loss(arm, worst, mean, cell.length, cell.protocol, cell.task, cell.budget, len(own))
        )
    return sorted(ranked, key=lambda loss: (loss.worst, loss.mean))


def _of_column(cells: Sequence[Cell]) -> list[float]:
    if cells[0].task == TEXT:
        best = min(cell.kl for cell in cells)
        return [1 - best / cell.kl if cell.kl > 0 else 0.0 for cell in cells]
    best = max(cell.accuracy for cell in cells)
    return [1 - cell.accuracy / best if best > 0 else 0.0 for cell in cells]

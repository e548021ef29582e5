"""What a contender hands over, and how its output is checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

WORST = 0.02
"""Largest error allowed of one query head's output, over the norm of what it should be. Half
precision alone makes about 0.004; the tests marked ``gpu`` are the sharp ones."""


class Unavailable(Exception):
    """A contender cannot be had here; one line says why."""


@dataclass(frozen=True)
class Prepared:
    """A contender on one batch.

    Fields: ``run`` launches it; ``check`` gives the worst error of some requests' outputs after a
    run; ``bytes`` read and written, by the formula; ``flops``; ``plan`` what the host must do
    again when lengths change, if anything.
    """

    run: Callable[[], None]
    check: Callable[[list[int]], float]
    bytes: int | None = None
    flops: int | None = None
    plan: Callable[[], object] | None = None


def worst_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Largest norm of an error over the norm of what was wanted, over the last dim's vectors.

    Not a number anywhere counts as infinite.
    """
    size = want.float().norm(dim=-1).clamp(min=1e-6)
    error = (out.float() - want.float()).norm(dim=-1) / size
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query token in float32. q [H, G, D]; k, v [n, H, D]. Returns [H, G, D]."""
    scores = torch.einsum("hgd,nhd->hgn", q.float(), k.float()) * scale
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v.float())


def some_rows(lengths: torch.Tensor) -> list[int]:
    """A few requests to check: first and last, shortest and longest."""
    chosen = {0, len(lengths) - 1, int(lengths.argmin()), int(lengths.argmax())}
    return sorted(chosen)

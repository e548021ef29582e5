"""Which query heads retrieve: measured where the text copies itself.

A query head retrieves if, where a token of the continuation was said in the prompt, it looks there
just before that token comes. Its copy score is the attention it pays to those places, a mean over
all such tokens; common tokens, said too often to mean a place, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from calib_cluster.attention import HeadInputs

MOST = 3
"""A token said more often in the prompt is no copy of any one place."""


@dataclass(frozen=True, eq=False)
class CopyScores:
    """``sums`` float64 [U, G] over ``count`` copied tokens of one or several prompts."""

    sums: np.ndarray
    count: int

    def __add__(self, other: CopyScores) -> CopyScores:
        return CopyScores(self.sums + other.sums, self.count + other.count)


class Copied:
    """Copied tokens of one continuation: ``rows`` int64 [n], the continuation queries that come
    just before them, and ``places`` bool [n, T], where in the prompt they were said."""

    def __init__(self, prompt: Sequence[int], continuation: Sequence[int], scored: int) -> None:
        said = np.array(prompt)[None] == np.array(continuation[scored:])[:, None]
        often = said.sum(axis=1)
        chosen = np.flatnonzero((often > 0) & (often <= MOST))
        self.rows = torch.from_numpy(chosen + scored - 1)  # the prompt's last query is row -1
        self.places = torch.from_numpy(said[chosen])
        self._length = len(prompt)

    def scores(self, inputs: HeadInputs) -> torch.Tensor:
        """float64 [H, G]: attention that each query head of a layer pays to the places, summed.

        ``inputs`` of prompt and continuation, position by position.
        """
        heads = inputs.k.shape[0]
        at = self.rows + self._length
        q = inputs.q[:, at].float() * inputs.scaling
        logits = q.unflatten(0, (heads, -1)) @ inputs.k[:, None].float().transpose(-1, -2)
        if inputs.softcap is not None:
            logits = torch.tanh(logits / inputs.softcap) * inputs.softcap
        later = torch.arange(inputs.k.shape[1], device=q.device) > at[:, None].to(q.device)
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)[..., : self._length]
        return (weights * self.places.to(q.device)).sum(dim=(-1, -2)).double()


def query_weights(scores: CopyScores) -> np.ndarray:
    """float32 [U, G]: squared copy scores, the highest 1; all 1 where nothing was copied.

    Squared, because many heads look back a little and few retrieve.
    """
    best = float(scores.sums.max()) if scores.count else 0.0
    if best <= 0:
        return np.ones(scores.sums.shape, np.float32)
    return ((scores.sums / best) ** 2).astype(np.float32)

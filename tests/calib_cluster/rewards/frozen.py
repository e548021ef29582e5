"""What a continuation costs under kept sets, from transformers with a dense mask per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from calib_cluster.rewards.model import RewardModel
from tests.calib_cluster.tiny_models import VOCAB
from tests.harness.frozen_reference import FrozenReference, FrozenRule

LENGTH, CONTINUATION = 90, 12


@dataclass(frozen=True)
class Pair:
    """A model under test and its independent reference."""

    model: RewardModel
    reference: FrozenReference

    def masked_losses(self, prompt: list[int], continuation: list[int], kept) -> np.ndarray:
        """float32 [C]: -log p of the continuation after ``prompt``, whose later readers see only
        ``kept`` (a list of positions for every unit)."""
        reference = self.reference
        heads = reference.model.config.get_text_config().num_key_value_heads
        seen = torch.ones(len(reference._layers), heads, len(prompt), dtype=torch.bool)
        units = zip(self.model.units.layers, self.model.units.heads, kept, strict=True)
        for layer, head, positions in units:
            seen[layer, head] = False
            seen[layer, head, list(positions)] = True
        plain = reference._rules
        reference._rules = [FrozenRule(None, rows) for rows in seen]
        try:
            return -reference.token_logprobs([*prompt, *continuation])[len(prompt) - 1 :]
        finally:
            reference._rules = plain


def text(
    rng: np.random.Generator, length: int = LENGTH, continuation: int = CONTINUATION
) -> tuple[list[int], list[int]]:
    """Random token ids of a prompt and what follows it."""
    return (
        rng.integers(0, VOCAB, length).tolist(),
        rng.integers(0, VOCAB, continuation).tolist(),
    )


def random_sets(rng: np.random.Generator, units: int, length: int) -> list[list[int]]:
    """A random kept set of its own size for every unit, sometimes only the last token."""
    sizes = rng.integers(1, length, units)
    sizes[0] = 1
    chosen = (rng.choice(length - 1, size - 1, replace=False) for size in sizes)
    return [sorted([*some.tolist(), length - 1]) for some in chosen]


def padded(draws: Sequence[Sequence[Sequence[int]]]) -> torch.Tensor:
    """int64 [N, U, width] of kept sets, -1 behind each."""
    width = max(len(row) for draw in draws for row in draw)
    rows = [[[*row, *[-1] * (width - len(row))] for row in draw] for draw in draws]
    return torch.tensor(rows)

"""What a frozen request must answer: transformers in fp32, attention masked to the kept set.

The kept set comes from the model's own dense attention and a literal transcription of the paper;
neither shares code with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvpolicy.retention import RetentionTables
from tests.harness.reference import KeyRule, MaskedReference
from tests.kvpolicy.retention import literal

Kept = list[list[int]]
"""Kept positions of every freezing unit, ascending."""


@dataclass(frozen=True)
class FrozenRule:
    """``base`` for prompt queries; later ones read of the prompt only ``kept`` bool [heads, T]."""

    base: KeyRule | None
    kept: torch.Tensor

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        prompt = self.kept.shape[1]
        visible = torch.ones(len(self.kept), len(keys), dtype=torch.bool)
        visible[:, :prompt] = self.kept[:, : len(keys)]
        allowed = (queries[:, None] < prompt) | visible[:, None, :]
        return allowed if self.base is None else allowed & self.base.allowed(queries, keys)


@dataclass
class Observed:
    """Per freezing unit: attention ``mass`` f64 [U, T] and value ``norms`` f64 [U, T]; ``nlls``.

    ``focus``: squared attention of the last ``focus`` queries, of each unit (f64 [U, T], the mean
    of its query heads) and, where the rule mixes, weighted over all their query heads (f64 [T]).
    """

    mass: np.ndarray
    norms: np.ndarray
    nlls: list[float]
    focus: tuple[np.ndarray, np.ndarray]


class FrozenReference(MaskedReference):
    """A model whose units without a window keep only part of a prompt once it has ended.

    Args:
        model_dir, windows, sinks: as ``MaskedReference``.
        units: (layers, heads) int [U] of the freezing units, in the policy's order.
        tables: the retention tables.
    """

    def __init__(
        self,
        model_dir: Path,
        windows: np.ndarray | None,
        sinks: int,
        units: tuple[np.ndarray, np.ndarray],
        tables: RetentionTables,
    ) -> None:
        super().__init__(model_dir, windows, sinks)
        self.unit_layers, self.unit_heads = units
        self.tables = tables
        self._plain_rules = list(self._rules)
        self._watch = None
        self._known: dict[tuple, literal.Outcome] = {}

    def observe(self, prompt: Sequence[int]) -> Observed:
        """Dense attention of the prompt's last ``observe`` queries, and their tokens' loss."""
        length = len(prompt)
        window = min(self.tables.rule.observe, length)
        self._rules = list(self._plain_rules)
        heads = self.model.config.get_text_config().num_key_value_heads
        mass = np.zeros((len(self._layers), heads, length))
        norms = np.zeros((len(self._layers), heads, length))
        hard: dict[tuple[int, int], np.ndarray] = {}  # of (layer, query head): f64 [T]

        def observer(layer: int):
            def see(queries, weights, value):
                rows = queries >= length - window
                seen = weights[:, :, rows].double().mean(1).sum(1)
                mass[layer][:, : seen.shape[1]] += seen.numpy()
                norms[layer] = value.double().norm(dim=-1).numpy()
                last = weights[:, :, queries >= length - self.tables.rule.focus].double()
                for head, squares in enumerate(last.square().sum(2).flatten(0, 1).numpy()):
                    one = hard.setdefault((layer, head), np.zeros(length))
                    one[: len(squares)] += squares

            return see

        self._watch = observer
        try:
            hidden = self._hidden(prompt)
        finally:
            self._watch = None
        first = max(1, length - window)
        blocks = torch.cat(list(self._logprob_blocks(hidden[first - 1 : length - 1])))
        targets = torch.tensor(list(prompt[first:]))
        nlls = (-blocks.double().gather(1, targets[:, None])[:, 0]).tolist()
        units = self.unit_layers, self.unit_heads
        return Observed(mass[units], norms[units], nlls, self._focus(hard, length))

    def _focus(self, hard: dict, length: int) -> tuple[np.ndarray, np.ndarray]:
        config, mix = self.model.config.get_text_config(), self.tables.mix
        group = config.num_attention_heads // config.num_key_value_heads
        own = np.zeros((len(self.unit_layers), length))
        retrieval = np.zeros(length)
        for u, (layer, head) in enumerate(zip(self.unit_layers, self.unit_heads, strict=True)):
            for query_head in range(head * group, (head + 1) * group):
                squares = hard[layer, query_head]
                own[u] += squares / group
                if mix is not None:
                    retrieval += float(mix.query_weights[layer, query_head]) * squares
        return own, retrieval

    def _observer(self, layer: int):
        return None if self._watch is None else self._watch(layer)

    def kept(self, prompt: Sequence[int], budget: int) -> literal.Outcome:
        """What Algorithm 1 keeps of the prompt. Remembered, because it is slow."""
        key = (tuple(prompt), budget)
        if key not in self._known:
            seen = self.observe(prompt)
            units = self.unit_layers, self.unit_heads
            self._known[key] = literal.retain(
                seen.mass, seen.norms, *units, self.tables, budget, seen.nlls, seen.focus
            )
        return self._known[key]

    def check_frozen(self, prompt, output_ids, logprobs, kept: Kept, atol: float = 1e-4) -> float:
        """As ``check_greedy`` for a prompt of which only ``kept`` is read after its end."""
        rows = torch.ones(len(self._layers), self._heads, len(prompt), dtype=torch.bool)
        for layer, head, positions in zip(self.unit_layers, self.unit_heads, kept, strict=True):
            rows[layer, head] = False
            rows[layer, head, positions] = True
        self._rules = [
            FrozenRule(base, row) for base, row in zip(self._plain_rules, rows, strict=True)
        ]
        try:
            return self.check_greedy(prompt, output_ids, logprobs, atol=atol)
        finally:
            self._rules = list(self._plain_rules)

    @property
    def _heads(self) -> int:
        return self.model.config.get_text_config().num_key_value_heads

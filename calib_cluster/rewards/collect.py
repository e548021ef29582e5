"""From a prompt to its reward records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ActionGrid, Draws
from calib_cluster.rewards.behaviour import (
    BEHAVIOURS,
    draw_generator,
    factorial,
    mixed,
    one_at_a_time,
    prompt_id,
)
from calib_cluster.rewards.evaluate import BATCH, Evaluation, evaluate
from calib_cluster.rewards.model import Prefill, RewardModel
from calib_cluster.rewards.records import COLUMNS, RecordHeader, RewardRecords, numpy_type
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.retention import RetentionRule, RetentionTables


@dataclass(frozen=True)
class Task:
    """A prompt of T tokens, the C that follow it, and the corpus both come from; the continuation's
    first ``scored`` tokens are given and do not count."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    corpus: str
    scored: int = 0

    @property
    def name(self) -> str:
        """``behaviour.prompt_id``."""
        return prompt_id(self.prompt, self.continuation)


class Collector:
    """Evaluates draws on prompts and writes down what came out.

    Args:
        model: in float32.
        header: rule, actions and risk cells of the records.
        seed: of the draws; together with prompt and budget it decides them.
        tables: what ``one-at-a-time`` varies around; None: weights 1 and thresholds .9.
        base: share and mixture indices [U] that draws of a rule that mixes vary around; None:
            shares nearest to 1 and the grid's first mixture.
        batch: distinct kept sets scored at once.

    Raises:
        CalibrationError: an unknown behaviour, or units that are not the model's.
    """

    def __init__(
        self,
        model: RewardModel,
        header: RecordHeader,
        seed: int = 0,
        tables: RetentionTables | None = None,
        batch: int = BATCH,
        base: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        if header.behaviour not in BEHAVIOURS:
            raise CalibrationError(
                f"behaviour {header.behaviour!r} is not accepted: give {' or '.join(BEHAVIOURS)}"
            )
        if header.layers != tuple(model.units.layers) or header.heads != tuple(model.units.heads):
            raise CalibrationError("reward records are for other units than the model's")
        self._model, self._header = model, header
        self._seed, self._tables, self._batch = seed, tables, batch
        self._mix_base = base
        weights = np.array(header.query_weights, np.float32)
        self._query_weights = torch.from_numpy(weights) if header.rule.mixes else None

    @staticmethod
    def header(
        model: RewardModel,
        rule: RetentionRule,
        grid: ActionGrid,
        behaviour: str,
        risk: RiskGrid,
        query_weights: tuple[tuple[float, ...], ...] = (),
    ) -> RecordHeader:
        """The header of records of ``model``; ``query_weights`` [U][G] of a rule that mixes."""
        return RecordHeader(
            model_config=model.geometry.config_hash,
            rule=rule,
            grid=grid,
            behaviour=behaviour,
            layers=tuple(model.units.layers.tolist()),
            heads=tuple(model.units.heads.tolist()),
            entropy_edges=risk.entropy_edges,
            perplexity_edges=risk.perplexity_edges,
            query_weights=query_weights,
        )

    def prefill(self, task: Task) -> Prefill:
        """Run the prompt once: its risks, and all that ``collect`` needs of it."""
        rule = self._header.rule
        focus = rule.focus if rule.mixes else 0
        return self._model.prefill(task.prompt, task.continuation, rule.observe, focus)

    def collect(
        self, task: Task, prefill: Prefill, budget: int, count: int, part: int = 0
    ) -> RewardRecords:
        """``count`` evaluations of ``task`` at ``budget``.

        ``part`` numbers calls for more draws of the same prompt and budget. The same arguments
        give the same records, whatever was collected before.
        """
        risks = np.float32(prefill.entropy), np.float32(prefill.perplexity)
        bins = self._header.risk.bins(*risks)
        draws = self._draw(task, budget, count, part, (int(bins[0]), int(bins[1])))
        found = evaluate(
            self._model, prefill, self._header.rule, budget, draws, self._header.grid, self._batch,
            task.scored, self._query_weights,
        )  # fmt: skip
        return self._records(task, prefill, budget, draws, found)

    def _draw(self, task: Task, budget: int, count: int, part: int, cell: tuple[int, int]) -> Draws:
        units, grid = self._model.units, self._header.grid
        rng = draw_generator(self._seed, task.name, budget, part)
        if self._header.rule.mixes:
            return mixed(rng, count, len(units.layer_ids), *self._mixtures(), grid)
        if self._header.behaviour == "factorial":
            return factorial(rng, count, len(units), len(units.layer_ids), grid)
        return one_at_a_time(rng, count, *self._base(budget, cell), grid)

    def _mixtures(self) -> tuple[np.ndarray, np.ndarray]:
        """Share and mixture indices that draws vary around."""
        if self._mix_base is not None:
            return self._mix_base
        units = len(self._model.units)
        even = int(np.abs(np.array(self._header.grid.shares) - 1).argmin())
        return np.full(units, even), np.zeros(units, np.int64)

    def _base(self, budget: int, cell: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Action indices of the current tables: weights [U], and thresholds [L] of the cell."""
        units, grid, tables = self._model.units, self._header.grid, self._tables
        weights = np.ones(len(units), np.float32)
        thresholds = np.full(len(units.layer_ids), 0.9, np.float32)
        if tables is not None:
            weights = tables.head_weights[units.layers, units.heads]
            if tables.rule.gate == "table":
                thresholds = tables.gate_for(budget)[units.rows, cell[0], cell[1]]
        return (
            np.array([grid.nearest(weight, 0)[0] for weight in weights.tolist()]),
            np.array([grid.nearest(0, threshold)[1] for threshold in thresholds.tolist()]),
        )

    def _records(
        self, task: Task, prefill: Prefill, budget: int, draws: Draws, found: Evaluation
    ) -> RewardRecords:
        entropy, perplexity = np.float32(prefill.entropy), np.float32(prefill.perplexity)
        entropy_bin, perplexity_bin = self._header.risk.bins(entropy, perplexity)
        same = {
            "prompt": task.name,
            "corpus": task.corpus,
            "context": len(task.prompt),
            "continuation": len(task.continuation),
            "scored": task.scored,
            "budget": budget,
            "nll_full": found.nll_full,
            "entropy": entropy,
            "perplexity": perplexity,
            "entropy_bin": entropy_bin,
            "perplexity_bin": perplexity_bin,
        }
        own = {
            "varied": draws.varied,
            "weights": draws.weights,
            "thresholds": draws.thresholds,
            "shares": draws.shares,
            "mixtures": draws.mixtures,
            "kept": found.kept,
            "psi": found.psi,
            "kept_set": found.kept_set,
            "nll_compressed": found.nll_compressed,
            "divergence": found.divergence,
        }
        repeated = {
            name: np.full(len(draws), value, dtype=numpy_type(COLUMNS[name].kind))
            for name, value in same.items()
        }
        return RewardRecords(self._header, repeated | own)

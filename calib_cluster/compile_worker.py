"""The worker of ``compile``: a model that turns prompts into reward records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import PAPER_GRID, ActionGrid
from calib_cluster.rewards.collect import Collector, Task
from calib_cluster.rewards.copies import CopyScores
from calib_cluster.rewards.model import RewardModel
from calib_cluster.rewards.records import RewardRecords, concatenate
from calib_cluster.rewards.risk import RiskGrid
from calib_cluster.worker import ModelWorker, WorkerSpec
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RetentionRule

REWARD_DTYPE = "float32"  # one head's weight moves a loss by 1e-4 nats


class Drawing(msgspec.Struct, frozen=True):
    """What is evaluated on every prompt: ``draws`` of ``behaviour`` at each of ``budgets``.

    A prompt's draws come in numbered parts of that size, each with random numbers of its own, so
    that more can be asked for later. ``batch`` distinct kept sets are scored at once.
    ``query_weights`` [U][G] of a rule that mixes are known once its copies were measured.
    """

    rule: RetentionRule
    behaviour: str
    budgets: tuple[int, ...]
    draws: int
    seed: int
    batch: int
    grid: ActionGrid = PAPER_GRID
    query_weights: tuple[tuple[float, ...], ...] = ()


class RewardWorker(ModelWorker):
    """Evaluates draws on one prompt after another. Risk cells are the fit's: records have one."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._model: RewardModel | None = None
        self._collector: Collector | None = None
        self._drawing: Drawing | None = None

    def prepare(self, drawing: Drawing) -> None:
        """Load the model; ``collect`` will do as ``drawing`` says."""
        began = time.monotonic()
        model = self._load()
        header = Collector.header(
            model, drawing.rule, drawing.grid, drawing.behaviour, RiskGrid(), drawing.query_weights
        )
        self._collector = Collector(model, header, drawing.seed, batch=drawing.batch)
        self._drawing = drawing
        self._busy += time.monotonic() - began

    def _load(self) -> RewardModel:
        if self._model is None:
            spec = self._spec
            self._model = RewardModel(Path(spec.model), read_geometry(spec.model), self._device)
        return self._model

    def copies(self, task: Task) -> CopyScores:
        """Copy scores of every query head on one prompt. Loads the model."""
        began = time.monotonic()
        found = self._load().copies(task.prompt, task.continuation, task.scored)
        self._busy += time.monotonic() - began
        return found

    def collect(self, task: Task, parts: Sequence[int]) -> list[RewardRecords]:
        """Records of ``parts`` of a prompt's draws, each of every budget, after one prefill."""
        if self._collector is None or self._drawing is None:
            raise CalibrationError("a worker was asked for records before it was prepared")
        began = time.monotonic()
        collector, drawing = self._collector, self._drawing
        prefill = collector.prefill(task)
        found = [
            concatenate(
                [
                    collector.collect(task, prefill, budget, drawing.draws, part)
                    for budget in drawing.budgets
                ]
            )
            for part in parts
        ]
        self._busy += time.monotonic() - began
        return found

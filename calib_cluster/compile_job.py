"""Collecting the records of a compile: prompts go to whichever worker is free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from calib_cluster.cluster import Pool
from calib_cluster.compile_memory import estimate_reward_peak
from calib_cluster.compile_records import Collection, Draw, RecordState, Shard
from calib_cluster.compile_worker import Drawing, RewardWorker
from calib_cluster.errors import CalibrationError
from calib_cluster.memory import PeakEstimate, check_memory
from calib_cluster.progress import BAR, clock
from calib_cluster.rewards.collect import Task
from calib_cluster.rewards.copies import query_weights
from calib_cluster.rewards.records import RewardRecords
from calib_cluster.worker import Usage, WorkerSpec
from kvpolicy.geometry import ModelGeometry

Weights = tuple[tuple[float, ...], ...]
COPY_TASKS = 24  # more would not tell retrieving heads better: a few stand out
ADVICE = "fewer --workers, shorter --length or --continuation, smaller --budgets, or fewer --draws"


@dataclass(frozen=True)
class CollectPlan:
    """What to evaluate on which prompts: checked, tokenised, nothing loaded yet."""

    model: Path
    geometry: ModelGeometry
    drawing: Drawing
    spec: WorkerSpec
    workers: int
    tasks: tuple[Task, ...]

    @property
    def wants_weights(self) -> bool:
        """True if query weights are still to be measured."""
        return self.drawing.rule.mixes and not self.drawing.query_weights

    def weighted(self, weights: Weights) -> CollectPlan:
        """The plan with measured query weights (none: as it is)."""
        return replace(self, drawing=msgspec.structs.replace(self.drawing, query_weights=weights))

    def check(self, records: RewardRecords) -> None:
        """Raise CalibrationError unless a shard's records are what this plan would collect."""
        header, drawing = records.header, self.drawing
        wanted = {
            "model": (header.model_config, self.geometry.config_hash),
            "rule": (header.rule, drawing.rule),
            "behaviour": (header.behaviour, drawing.behaviour),
            "actions": (header.grid, drawing.grid),
            "query weights": (header.query_weights, drawing.query_weights),
            "evaluations": (_counts(records), dict.fromkeys(drawing.budgets, drawing.draws)),
        }
        for name, (found, asked) in wanted.items():
            if found != asked:
                raise CalibrationError(f"its {name} are {found}, this run's are {asked}")


def _counts(records: RewardRecords) -> dict[int, int]:
    budgets, counts = np.unique(records["budget"], return_counts=True)
    return dict(zip(budgets.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class CollectCost:
    """What this process's part of a collection took. ``usage`` is empty where there was nothing
    left to evaluate."""

    usage: list[Usage]
    estimate: PeakEstimate | None
    evaluations: int
    records: int
    restarts: int
    seconds: float


NOTHING = CollectCost([], None, 0, 0, 0, 0.0)


class CollectJob:
    """Has workers evaluate everything that a collection is missing, saving prompt by prompt.

    Needs a Ray connection. Making one starts the workers, and writes nothing.

    Args:
        plan: what to do.
        collection: what is wanted, and what is there.
        state: where query weights are kept.
        say: takes one line for the log.

    Raises:
        CalibrationError: the workers do not start, or do not fit in memory.
    """

    def __init__(
        self,
        plan: CollectPlan,
        collection: Collection,
        state: RecordState,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._collection, self._state, self._say = plan, collection, state, say
        self._began = time.monotonic()
        self._pool = Pool(plan.spec, plan.workers, say, RewardWorker)
        probes = self._pool.probe()
        self._estimate = estimate_reward_peak(
            plan.geometry,
            plan.model,
            length=max(len(task.prompt) for task in plan.tasks),
            continuation=max(len(task.continuation) for task in plan.tasks),
            drawing=plan.drawing,
            runtime=max(probe.resident for probe in probes),
        )
        check_memory(self._estimate, probes, plan.spec.gpus, ADVICE, say)

    def run(self) -> CollectCost:
        """Evaluate until nothing is missing. Raises CalibrationError if a worker fails for good."""
        if self._plan.wants_weights:
            self._plan = self._plan.weighted(self._measure_weights())
        self._pool.tell("prepare", [(self._plan.drawing,)] * self._pool.count)
        done: list[Shard] = []
        while missing := self._collection.missing():
            done += self._evaluate(missing)
            self._collection.find(self._plan.check)  # further parts of an earlier run
        return CollectCost(
            self._pool.usage(),
            self._estimate,
            sum(shard.evaluations for shard in done),
            sum(shard.records for shard in done),
            self._pool.restarts,
            time.monotonic() - self._began,
        )

    def _measure_weights(self) -> Weights:
        """Which query heads retrieve, on the first tasks; durable, since records depend on it."""
        tasks = self._plan.tasks[:COPY_TASKS]
        self._say(f"query heads that retrieve: measured on {len(tasks)} prompts")
        answers = self._pool.each("copies", [(task,) for task in tasks])
        found = [scores for _, scores in sorted(answers, key=lambda answer: answer[0])]
        weights = query_weights(sum(found[1:], found[0]))
        exact = tuple(tuple(row) for row in weights.tolist())
        self._state.save_query_weights(exact)
        return exact

    def _evaluate(self, missing: Sequence[Draw]) -> list[Shard]:
        """Evaluate ``missing``, the parts of one prompt together."""
        by_prompt = [list(draws) for _, draws in groupby(missing, lambda draw: draw.prompt)]
        if missing[0].part:
            self._say(f"more draws for {len(by_prompt)} prompts of risk cells that have few")
        progress = _Progress(len(by_prompt), self._say)
        tasks = self._collection.tasks
        items = [(tasks[draws[0].prompt], [d.part for d in draws]) for draws in by_prompt]
        done = []
        for index, answers in self._pool.each("collect", items):
            shards = [
                self._collection.add(draw, records)
                for draw, records in zip(by_prompt[index], answers, strict=True)
            ]
            progress.prompt_done(shards)
            done += shards
        return done


class _Progress:
    """One line a prompt: how far, what came of it, elapsed, and time left."""

    def __init__(self, prompts: int, say: Callable[[str], None]) -> None:
        self._prompts, self._say = prompts, say
        self._began, self._done = time.monotonic(), 0
        self._evaluations = self._distinct = self._records = 0

    def prompt_done(self, shards: Sequence[Shard]) -> None:
        """Tell that one more prompt is evaluated and saved."""
        self._done += 1
        self._evaluations += sum(shard.evaluations for shard in shards)
        self._distinct += sum(shard.distinct for shard in shards)
        self._records += sum(shard.records for shard in shards)
        elapsed = time.monotonic() - self._began
        left = elapsed / self._done * (self._prompts - self._done)
        bar = "#" * (BAR * self._done // self._prompts)
        self._say(
            f"[{bar:<{BAR}}] prompt {self._done} of {self._prompts} | {self._evaluations} "
            f"evaluations, {self._distinct} distinct kept sets | {self._records} records | "
            f"elapsed {clock(elapsed)}, ETA {clock(left)}"
        )

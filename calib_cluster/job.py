"""One calibration from prompts to artifact: the loop that the driver runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calib_cluster.cluster import Pool
from calib_cluster.errors import CalibrationError
from calib_cluster.memory import PeakEstimate, check_memory, estimate_peak
from calib_cluster.progress import LayerProgress
from calib_cluster.run_state import RunState
from calib_cluster.seqcalib import LayerRecord, SeqCalib, Settings, Sums, point_name
from calib_cluster.worker import PromptTally, Usage, WorkerSpec
from kvpolicy.evidence import HeldOut
from kvpolicy.geometry import ModelGeometry
from kvpolicy.windows import WindowPolicy

Ids = Sequence[int]


@dataclass(frozen=True)
class JobPlan:
    """What to calibrate: checked, tokenised, nothing loaded yet.

    ``prompts`` and ``held_out`` are token ids; ``held_out_corpora`` maps a name to its content's
    sha256 (empty without a held-out evaluation).
    """

    model: Path
    geometry: ModelGeometry
    settings: Settings
    spec: WorkerSpec
    workers: int
    prompts: tuple[Ids, ...]
    held_out: tuple[Ids, ...]
    held_out_corpora: dict[str, str]

    @property
    def length(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, (*self.prompts, *self.held_out)))

    def shard(self, items: Sequence[Ids]) -> list[list[tuple[int, Ids]]]:
        """Disjoint shards [(global index, ids)], one a worker, as equal as can be."""
        return [list(enumerate(items))[i :: self.workers] for i in range(self.workers)]


@dataclass(frozen=True)
class JobOutcome:
    """What a run gives: choices and evidence, held-out losses, and what it took."""

    seqcalib: SeqCalib
    held_out: HeldOut | None
    usage: list[Usage]
    estimate: PeakEstimate
    restarts: int
    seconds: float


class CalibrationJob:
    """Drives the workers through every layer, saving each before the next.

    Needs a Ray connection. Making one starts the workers, and writes nothing.

    Args:
        plan: what to do.
        state: where finished layers are (and will be) kept.
        say: takes one line for the log.

    Raises:
        CalibrationError: the workers do not start, or do not fit in memory.
    """

    def __init__(self, plan: JobPlan, state: RunState, say: Callable[[str], None]) -> None:
        self._plan, self._state, self._say = plan, state, say
        self._seqcalib = SeqCalib(plan.geometry, plan.settings, [*map(len, plan.prompts)])
        self._began = time.monotonic()
        self._pool = Pool(plan.spec, plan.workers, say)
        self._estimate = self._check_memory(self._pool)

    def run(self) -> JobOutcome:
        """Calibrate, going on after the last saved layer.

        Raises:
            CalibrationError: a worker fails for good.
        """
        pool = self._pool
        self._calibrate(pool)
        pool.forget()
        held_out = self._evaluate(pool)
        seconds = time.monotonic() - self._began
        return JobOutcome(
            self._seqcalib, held_out, pool.usage(), self._estimate, pool.restarts, seconds
        )

    def _check_memory(self, pool: Pool) -> PeakEstimate:
        plan = self._plan
        probes = pool.probe()
        estimate = estimate_peak(
            plan.geometry,
            plan.model,
            dtype=plan.spec.dtype,
            prompts=max(map(len, plan.shard(plan.prompts))),
            length=plan.length,
            trajectories=len(plan.settings.taus),
            codebook=len(plan.settings.codebook),
            runtime=max(probe.resident for probe in probes),
        )
        advice = (
            "fewer --workers or --prompts, a shorter --length, fewer --tau, or a smaller --dtype"
        )
        check_memory(estimate, probes, plan.spec.gpus, advice, self._say)
        return estimate

    def _calibrate(self, pool: Pool) -> None:
        done = self._state.layers()
        if len(done) == len(self._plan.geometry.layers):
            for record in done:
                self._seqcalib.record(record)
            self._say("every layer was calibrated before")
            return
        first = next(iter(self._seqcalib.trajectories))
        pool.tell("start", [(shard, first) for shard in self._plan.shard(self._plan.prompts)])
        progress = LayerProgress(self._plan.geometry, self._plan.length, len(done), self._say)
        if done:
            self._say(f"resumed after layer {len(done) - 1}; hidden states are computed again")
        for record in done:
            self._advance(pool, record)
        progress.start()
        while not self._seqcalib.done:
            record = self._seqcalib.decide(self._judge(pool))
            self._state.save_layer(record)
            self._advance(pool, record)
            progress.layer_done(self._seqcalib)

    def _judge(self, pool: Pool) -> dict[str, Sums]:
        layer = self._seqcalib.next_layer
        if not self._seqcalib.is_calibrated(layer):
            return {}
        settings = self._plan.settings
        answers = pool.call("judge", [(layer, settings.codebook, settings.sinks)] * pool.count)
        return {
            name: self._reduce(layer, [tally for answer in answers for tally in answer[name]])
            for name in self._seqcalib.trajectories
        }

    def _reduce(self, layer: int, tallies: list[PromptTally]) -> Sums:
        """Sums over all prompts. Raises CalibrationError if one is missing or not a number."""
        if sorted(t.prompt for t in tallies) != list(range(len(self._plan.prompts))):
            raise CalibrationError(f"layer {layer}: workers answered for other prompts than theirs")
        bad = [t.prompt for t in tallies if not np.isfinite(t.sums).all()]
        if bad:
            raise CalibrationError(
                f"layer {layer}: attention of prompt {bad[0]} is not finite in "
                f"{self._plan.spec.dtype}; give another --dtype"
            )
        return reduce_tallies(tallies)

    def _advance(self, pool: Pool, record: LayerRecord) -> None:
        """Run the layer with its windows; after the last layer there is nothing to run for."""
        self._seqcalib.record(record)
        if not self._seqcalib.done:
            moves = [(branch.name, branch.parent, branch.windows) for branch in record.branches]
            sinks = self._plan.settings.sinks
            pool.tell("advance", [(record.layer, moves, sinks)] * pool.count)

    def _evaluate(self, pool: Pool) -> HeldOut | None:
        plan = self._plan
        if not plan.held_out:
            return None
        if (known := self._state.held_out()) is not None:
            return known
        shards = plan.shard(plan.held_out)
        full = WindowPolicy.native(plan.geometry)
        policies = {"full": full} | {
            point_name(tau): self._seqcalib.policy(tau) for tau in plan.settings.taus
        }
        losses = {}
        for name, policy in policies.items():
            rows = layer_rows(policy)
            answers = pool.call("evaluate", [(s, rows, plan.settings.sinks) for s in shards])
            losses[name] = _mean_loss(answers, plan.held_out)
            if not np.isfinite(losses[name]):
                raise CalibrationError(
                    f"held-out loss of {name} is not finite in {plan.spec.dtype}; give another "
                    "--dtype"
                )
            self._say(f"held-out loss, {name}: {losses[name]:.4f} nats per token")
        tokens = sum(len(ids) - 1 for ids in plan.held_out)
        whole = losses.pop("full")
        found = HeldOut(plan.held_out_corpora, len(plan.held_out), tokens, whole, losses)
        self._state.save_held_out(found)
        return found


def layer_rows(policy: WindowPolicy) -> list[list[int] | None]:
    """Windows of every layer's kv heads, None for recurrent layers."""
    rows = iter(policy.windows)
    return [
        next(rows)[: layer.num_kv_heads].tolist() if layer.is_attention else None
        for layer in policy.geometry.layers
    ]


def reduce_tallies(tallies: Sequence[PromptTally]) -> Sums:
    """Sum over prompts in the order of their global index: the same bits for any sharding."""
    ordered = sorted(tallies, key=lambda tally: tally.prompt)
    sums = np.zeros(np.shape(ordered[0].sums))
    for tally in ordered:
        sums += np.array(tally.sums)
    positions = np.sum([tally.positions for tally in ordered], axis=0, dtype=np.int64)
    return Sums(sums, positions, ordered[0].group)


def _mean_loss(answers: Sequence[dict[int, float]], prompts: Sequence[Ids]) -> float:
    losses = {index: loss for answer in answers for index, loss in answer.items()}
    total = sum(losses[index] for index in range(len(prompts)))
    return round(total / sum(len(ids) - 1 for ids in prompts), 6)

"""The whole calibration job from a test: real workers without Ray, or a local Ray cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from calib_cluster import command, compile_command, compile_job, job
from calib_cluster.cluster import Pool, connected
from calib_cluster.job import CalibrationJob, JobOutcome, JobPlan
from calib_cluster.run_state import RunState
from calib_cluster.seqcalib import SeqCalib, Settings
from calib_cluster.worker import CalibrationWorker, ModelWorker, WorkerSpec, worker_spec
from kvpolicy.geometry import read_geometry

Ids = Sequence[int]


class InProcessPool(Pool):
    """A pool whose workers are plain objects of this process."""

    def __init__(
        self,
        spec: WorkerSpec,
        count: int,
        say: Callable[[str], None],
        kind: type[ModelWorker] = CalibrationWorker,
    ) -> None:
        self._workers = [kind(spec) for _ in range(count)]
        self._history = [[] for _ in range(count)]
        self._restarts = 0

    def call(
        self, method: str, arguments: Sequence[tuple] | None = None, timeout: float | None = None
    ) -> list[Any]:
        each = arguments if arguments is not None else [()] * self.count
        return [getattr(w, method)(*args) for w, args in zip(self._workers, each, strict=True)]

    def each(self, method: str, items: Sequence[tuple]) -> Iterator[tuple[int, Any]]:
        for i in reversed(range(len(items))):  # no order is promised
            yield i, getattr(self._workers[i % self.count], method)(*items[i])


@contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """Workers set these for their whole process, which is the tests' here."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


@contextmanager
def without_ray() -> Iterator[None]:
    """Commands that run in this process have plain objects of it as their workers."""
    with pytest.MonkeyPatch.context() as patch, _torch_settings_kept():
        for module in (job, compile_job):
            patch.setattr(module, "Pool", InProcessPool)
        for module in (command, compile_command):
            patch.setattr(module, "connected", lambda *_: nullcontext())
        yield


def make_plan(model: Path, prompts: Sequence[Ids], settings: Settings, workers: int = 1) -> JobPlan:
    """A float32 CPU job without a held-out evaluation."""
    geometry = read_geometry(model)
    spec = worker_spec(model, geometry, "float32")
    return JobPlan(model, geometry, settings, spec, workers, tuple(prompts), (), {})


def calibrate(
    model: Path, prompts: Sequence[Ids], settings: Settings, state: Path, workers: int = 1
) -> SeqCalib:
    """SeqCalib of ``prompts`` with ``workers`` workers; ``state`` is the run's (new) folder."""
    plan = make_plan(model, prompts, settings, workers)
    state.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, _torch_settings_kept():
        patch.setattr(job, "Pool", InProcessPool)
        return CalibrationJob(plan, RunState(state), lambda _line: None).run().seqcalib


def calibrate_on_ray(plan: JobPlan, state: Path) -> JobOutcome:
    """The real thing on a local Ray cluster; ``state`` is the run's folder, which exists.

    In a process of its own: Ray aborts a driver whose cluster fails, which must not be pytest.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(_drive, plan, state).result()


def _drive(plan: JobPlan, state: Path) -> JobOutcome:
    with connected(None, plan.workers, plan.spec.threads, plan.spec.gpus):
        return CalibrationJob(plan, RunState(state), lambda _line: None).run()

"""Runs cases: in this process, or in several at once, with the same results."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from calib_cluster.errors import CalibrationError
from calib_cluster.judge.arms import OWN_ARMS, Arm, Policy, PolicyArm
from calib_cluster.judge.items import Item
from calib_cluster.judge.model import DEFAULT_VIEW, JudgedModel, View
from calib_cluster.judge.peers import PeerArm
from calib_cluster.judge.results import CaseResult
from calib_cluster.judge.scoring import measure
from kvpolicy.geometry import ModelGeometry

Task = tuple[Item, str]  # an item and a protocol


@dataclass(frozen=True)
class BenchSpec:
    """What every process loads: a model, and the arms to judge on it at ``budgets``."""

    model: Path
    geometry: ModelGeometry
    policies: tuple[Policy, ...]
    peers: tuple[str, ...]
    budgets: tuple[int, ...]
    seed: int
    threads: int = 1


def view_of(policies: Sequence[Policy]) -> View:
    """How all ``policies`` look at a prompt's end. Raises CalibrationError if they differ."""
    rules = [policy.tables.rule for policy in policies]
    observe = {rule.observe for rule in rules} or {DEFAULT_VIEW.observe}
    focus = {rule.focus for rule in rules if rule.mixes} or {DEFAULT_VIEW.focus}
    if len(observe) > 1 or len(focus) > 1:
        told = ", ".join(f"{p.name} {p.tables.rule.options}" for p in policies)
        raise CalibrationError(
            f"--policies differ in observe or focus ({told}): judge them in two runs"
        )
    return View(observe.pop(), focus.pop())


class Bench:
    """A loaded model with its arms. Raises CalibrationError as JudgedModel, PeerArm."""

    def __init__(self, spec: BenchSpec) -> None:
        import torch

        torch.set_num_threads(spec.threads)
        self._spec, self._view = spec, view_of(spec.policies)
        self._model = JudgedModel(spec.model, spec.geometry)
        self._arms: dict[str, Arm] = {
            policy.name: PolicyArm(policy.tables, self._model.units, plain_mass=policy.plain_mass)
            for policy in spec.policies
        }
        for name in spec.peers:
            own = OWN_ARMS.get(name)
            self._arms[name] = own.arm if own else PeerArm(name, self._model)

    def run(self, item: Item, protocol: str) -> CaseResult:
        """Prefill once, then every arm at every budget. Raises CalibrationError."""
        began, case = time.monotonic(), item.case(protocol)
        judged = self._model.judge_case(case, self._seed(item, protocol), self._view)
        scores = measure(self._model, judged, self._arms, self._spec.budgets)
        return CaseResult(
            item.task, protocol, item.length, item.index, item.corpus, item.depth, item.digest,
            len(case.prompt), case.scored.stop - case.scored.start,
            round(time.monotonic() - began, 3), scores,
        )  # fmt: skip

    def _seed(self, item: Item, protocol: str) -> int:
        told = f"{self._spec.seed} {item.digest} {protocol}"
        return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")


def run_cases(spec: BenchSpec, tasks: Sequence[Task], workers: int) -> Iterator[CaseResult]:
    """Results in the order in which they are finished.

    Closing the iterator, or an interrupt, ends all processes at once.

    Raises:
        CalibrationError: a case fails, or a process is killed.
    """
    if workers == 1 or len(tasks) <= 1:
        bench = Bench(spec)
        yield from (bench.run(*task) for task in tasks)
    else:
        yield from _in_processes(spec, tasks, min(workers, len(tasks)))


def _in_processes(spec: BenchSpec, tasks: Sequence[Task], workers: int) -> Iterator[CaseResult]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(spec,))
    others = set(multiprocessing.active_children())
    try:
        futures = [pool.submit(_run, *task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
        pool.shutdown()
    except BrokenProcessPool as error:
        raise CalibrationError(
            "a worker died (out of memory?); finished cases are kept, --resume goes on"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
            child.join()


_bench: Bench | CalibrationError | None = None


def _start(spec: BenchSpec) -> None:
    """In a new process: load. What cannot be loaded is told by the first case."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _bench = Bench(spec)
    except CalibrationError as error:
        _bench = error


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # it was killed: nobody will take any result


def _run(item: Item, protocol: str) -> CaseResult:
    if isinstance(_bench, CalibrationError):
        raise _bench
    return _bench.run(item, protocol)

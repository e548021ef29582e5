"""Ray: connect, place workers, call them all, and replace the ones that die."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from calib_cluster.errors import CalibrationError
from calib_cluster.worker import CalibrationWorker, ModelWorker, Probe, Usage, WorkerSpec

REACH_TIMEOUT = 5.0
START_TIMEOUT = 600.0  # importing torch takes minutes on a machine that is busy
HEARTBEAT = 30.0  # seconds without news before the log says that work goes on
MAX_RESTARTS = 3  # of one worker within one call

_Errand = tuple[int, tuple]  # number of an answer, arguments of the call


@contextlib.contextmanager
def connected(address: str | None, workers: int, threads: int, gpus: float) -> Iterator[None]:
    """A Ray connection that has room for the workers.

    Args:
        address: ``host:port`` or ``auto``; None uses $RAY_ADDRESS (set inside ``ray job submit``),
            else starts a local cluster for as long as the context lasts.

    Raises:
        CalibrationError: the cluster cannot be reached or is too small.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        gpu = {"num_gpus": None if gpus else 0}
        # "local": a node that happens to run here is not joined
        options |= {"address": "local", "num_cpus": workers * threads, **gpu}
        options |= {"include_dashboard": False}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises a bare one when its processes start too slowly
        raise CalibrationError(f"Ray at {address or 'local'}: {_first_line(error)}") from error
    try:
        _check_room(workers, threads, gpus)
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise CalibrationError(
            f"--address {address!r} is not accepted: give host:port of a running head node "
            "(ray start --head prints it) or auto; http://... is for ray job submit"
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT).close()
    except OSError as error:
        raise CalibrationError(
            f"Ray is not reachable at {address} ({error.strerror or error}); start it with "
            "'ray start --head', or leave --address out for a local cluster"
        ) from error


def _check_room(workers: int, threads: int, gpus: float) -> None:
    has = ray.cluster_resources()
    wants = {"CPU": workers * threads, "GPU": workers * gpus}
    for kind, count in wants.items():
        if count > has.get(kind, 0):
            flag = "--threads-per-worker" if kind == "CPU" else "--gpus-per-worker"
            raise CalibrationError(
                f"--workers {workers} with {flag} {threads if kind == 'CPU' else f'{gpus:g}'} "
                f"take {count:g} {kind}s; the Ray cluster has {has.get(kind, 0):g}"
            )


class Pool:
    """Workers that are called together, or given work one item after another.

    A worker that dies is replaced, told everything the old one was told (``history``), and asked
    again: its answers are the same, since a worker's state follows from what it was told.

    Args:
        spec: what each worker loads.
        count: number of workers.
        say: takes one line for the log.
        kind: the workers' class.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        count: int,
        say: Callable[[str], None],
        kind: type[ModelWorker] = CalibrationWorker,
    ) -> None:
        self._spec, self._say = spec, say
        remote = ray.remote(kind)
        self._make = remote.options(
            num_cpus=spec.threads, num_gpus=spec.gpus, scheduling_strategy="SPREAD"
        ).remote
        self._workers = [self._make(spec) for _ in range(count)]
        self._history: list[list[tuple[str, tuple]]] = [[] for _ in range(count)]
        self._restarts = 0

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def probe(self) -> list[Probe]:
        """Where the workers are. Raises CalibrationError if they do not start in time."""
        return self.call("probe", timeout=START_TIMEOUT)

    def tell(self, method: str, arguments: Sequence[tuple]) -> None:
        """Change every worker's state: worker i gets ``arguments[i]``."""
        self.call(method, arguments)
        for history, args in zip(self._history, arguments, strict=True):
            history.append((method, args))

    def call(
        self, method: str, arguments: Sequence[tuple] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Ask every worker; worker i gets ``arguments[i]`` (default: none).

        Raises:
            CalibrationError: a worker refused, died too often, or (with ``timeout``, seconds) did
                not answer.
        """
        args = arguments if arguments is not None else [()] * self.count
        errands = [iter([(i, args[i])]) for i in range(self.count)]
        answers = dict(self._ask(method, errands, timeout))
        return [answers[i] for i in range(self.count)]

    def each(self, method: str, items: Sequence[tuple]) -> Iterator[tuple[int, Any]]:
        """Give every item of arguments to whichever worker is free; yields (index of the item,
        answer) as they come, in no order.

        Raises:
            CalibrationError: as ``call``.
        """
        waiting = iter(list(enumerate(items)))
        yield from self._ask(method, [waiting] * self.count)

    def _ask(
        self, method: str, errands: Sequence[Iterator[_Errand]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Worker i does what ``errands[i]`` still gives; yields (number, answer)."""
        pending: dict[ray.ObjectRef, tuple[int, _Errand]] = {}
        deaths: Counter[int] = Counter()

        def go_on(worker: int) -> None:
            if (errand := next(errands[worker], None)) is not None:
                pending[self._send(worker, method, errand[1])] = worker, errand

        for worker in range(self.count):
            go_on(worker)
        began = news = time.monotonic()
        while pending:
            ready, _ = ray.wait(list(pending), timeout=min(HEARTBEAT, timeout or HEARTBEAT))
            now = time.monotonic()
            if not ready and timeout is not None and now - began > timeout:
                raise CalibrationError(
                    f"{len(pending)} of {self.count} workers did not start within {timeout:.0f} s; "
                    "'ray status' shows what the cluster is short of"
                )
            if not ready:
                self._say(f"  {len(pending)} of {self.count} workers busy for {now - news:.0f} s")
            for reference in ready:
                worker, errand = pending.pop(reference)
                number, args = errand
                try:
                    answer = ray.get(reference)
                except (RayActorError, OutOfMemoryError) as error:
                    deaths[number] = self._replace(worker, method, deaths[number] + 1, error)
                    pending[self._send(worker, method, args)] = worker, errand
                    continue
                except RayTaskError as error:
                    raise _refusal(error) from error
                news = now
                go_on(worker)  # before the answer is dealt with: a worker should not wait for that
                yield number, answer

    def _send(self, i: int, method: str, args: tuple) -> ray.ObjectRef:
        return getattr(self._workers[i], method).remote(*args)

    def _replace(self, i: int, method: str, deaths: int, error: Exception) -> int:
        """Start worker i anew and repeat its history; returns its deaths so far.

        The history is queued, not awaited: a worker that fails at it refuses everything after.
        """
        why = "out of memory" if isinstance(error, OutOfMemoryError) else "died"
        if deaths > MAX_RESTARTS:
            raise CalibrationError(
                f"worker {i} {why} {deaths} times in '{method}' ({_first_line(error)}); what is "
                "done so far is kept, --resume continues it"
            ) from error
        self._restarts += 1
        self._say(f"  worker {i} {why} in '{method}'; replaced, its shard is computed again")
        self._workers[i] = self._make(self._spec)
        try:
            ray.get(self._send(i, "probe", ()), timeout=START_TIMEOUT)
        except GetTimeoutError:
            raise CalibrationError(
                f"no room for a new worker {i} within {START_TIMEOUT:.0f} s ('ray status' shows "
                "what the cluster has); --resume continues when there is"
            ) from None
        except (RayActorError, OutOfMemoryError) as again:
            return self._replace(i, method, deaths + 1, again)
        except RayTaskError as refused:
            raise _refusal(refused) from refused
        for past, args in self._history[i]:
            self._send(i, past, args)
        return deaths

    def forget(self) -> None:
        """Hidden states are no longer needed: a new worker need not compute them again."""
        self._history = [[] for _ in self._workers]

    def usage(self) -> list[Usage]:
        """What each (present) worker has used."""
        return self.call("usage")

    @property
    def restarts(self) -> int:
        """How often a worker was replaced."""
        return self._restarts


def _refusal(error: RayTaskError) -> Exception:
    """What a worker raised: its own CalibrationError, or a bug with its traceback."""
    cause = error.cause
    if isinstance(cause, CalibrationError):
        return CalibrationError(str(cause))
    is_memory = isinstance(cause, MemoryError) or "allocate memory" in str(cause)
    if is_memory or type(cause).__name__ == "OutOfMemoryError":
        return CalibrationError(f"a worker ran out of memory: {_first_line(cause)}")
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]


class NodeMemory(msgspec.Struct, frozen=True):
    """Workers of one node beside its free memory, in bytes."""

    node: str
    workers: int
    available: int


def memory_by_node(probes: Sequence[Probe]) -> list[NodeMemory]:
    """Free memory of every node or, with GPUs, of every GPU: workers may share one."""
    nodes: dict[str, list[Probe]] = {}
    for probe in probes:
        name = probe.node if probe.device == "cpu" else f"{probe.node} ({probe.device})"
        nodes.setdefault(name, []).append(probe)
    # what libraries already take is part of the estimate, so it counts as available
    return [
        NodeMemory(
            node, len(there), min(p.available for p in there) + sum(p.resident for p in there)
        )
        for node, there in nodes.items()
    ]

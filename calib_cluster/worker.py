"""Workers that hold a model; the one of SeqCalib, with a disjoint shard of prompts.

Plain classes; ``cluster.py`` makes Ray actors of them. What a worker answers follows from what it
was told, so a new worker that is told the same is an exact replacement.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import library_versions, sample_weights
from kvpolicy.errors import GeometryError
from kvpolicy.geometry import ModelGeometry, read_geometry

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class WorkerSpec(msgspec.Struct, frozen=True):
    """What every worker loads: ``model`` folder, its ``config_hash`` and a ``weights_sample``
    (``fingerprint.sample_weights``), ``libraries`` (name to version), ``dtype`` (torch name),
    ``gpus`` (0 means CPU) and ``threads`` of one worker."""

    model: str
    config_hash: str
    weights_sample: str
    libraries: dict[str, str]
    dtype: str
    gpus: float
    threads: int


def worker_spec(
    model: Path, geometry: ModelGeometry, dtype: str, gpus: float = 0, threads: int = 1
) -> WorkerSpec:
    """The spec of ``model`` as the driver sees it: workers must find the same.

    Raises CalibrationError if it has no weights.
    """
    return WorkerSpec(
        model=str(model),
        config_hash=geometry.config_hash,
        weights_sample=sample_weights(model),
        libraries=library_versions(),
        dtype=dtype,
        gpus=gpus,
        threads=threads,
    )


class Probe(msgspec.Struct, frozen=True):
    """A worker before it loads anything: where it is and what is free there, in bytes.

    ``resident`` is the process with its libraries; ``available`` is the node's free memory, or
    that of the worker's fullest GPU; ``device`` is ``cpu``, or name and id of the GPU (of the
    first one, where a worker has several).
    """

    node: str
    resident: int
    available: int
    device: str


class Usage(msgspec.Struct, frozen=True):
    """What a worker has used so far: CPU seconds, seconds of wall clock inside calls, and peak
    bytes (resident set, or allocated on the GPU)."""

    cpu_seconds: float
    busy_seconds: float
    peak_bytes: int


class PromptTally(msgspec.Struct, frozen=True):
    """Tally of one prompt and trajectory: ``prompt`` is its global index, ``sums`` float64
    [Hkv][W], ``positions`` [W], ``group`` query heads a kv head."""

    prompt: int
    sums: list[list[float]]
    positions: list[int]
    group: int


class ModelWorker:
    """What all workers are: a process for one model, that knows its node and what it used.

    Args:
        spec: what to load.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        import torch

        self._spec = spec
        torch.set_num_threads(spec.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._device = "cpu" if not spec.gpus else "auto" if spec.gpus > 1 else "cuda"
        self._busy = 0.0

    def probe(self) -> Probe:
        """Where this worker is and how much memory is free. Raises CalibrationError."""
        import calib_cluster.capture  # noqa: F401  so that the libraries are in what is resident

        self._check_same_as_driver()
        resident = psutil.Process().memory_info().rss
        if self._device == "cpu":
            return Probe(_node(), resident, _free_host_memory(), "cpu")
        return self._probe_gpu()

    def _check_same_as_driver(self) -> None:
        spec = self._spec
        try:
            found = read_geometry(spec.model).config_hash, sample_weights(Path(spec.model))
        except GeometryError as error:
            raise CalibrationError(f"node {_node()}: {error}") from error
        if found != (spec.config_hash, spec.weights_sample):
            raise CalibrationError(
                f"node {_node()}: {spec.model} is another model than the driver's"
            )
        if (libraries := library_versions()) != spec.libraries:
            raise CalibrationError(
                f"node {_node()} has {libraries}, the driver {spec.libraries}: install the same"
            )

    def _probe_gpu(self) -> Probe:
        import torch

        if not torch.cuda.is_available():
            raise CalibrationError(
                f"node {_node()}: --gpus-per-worker {self._spec.gpus:g}, but this worker sees no "
                "CUDA GPU"
            )
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
        first = torch.cuda.get_device_properties(0)
        return Probe(_node(), 0, free, f"{first.name} {first.uuid}")

    def usage(self) -> Usage:
        """CPU seconds, busy seconds and peak memory of this process so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        peak = used.ru_maxrss * 1024
        if self._device != "cpu":
            import torch

            count = torch.cuda.device_count()
            peak = sum(torch.cuda.max_memory_allocated(i) for i in range(count))
        return Usage(used.ru_utime + used.ru_stime, self._busy, peak)


class CalibrationWorker(ModelWorker):
    """Holds hidden states [1, T, hidden] of its prompts, one per trajectory.

    Args:
        spec: what to load.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._stepped = None
        self._hidden: dict[str, dict[int, torch.Tensor]] = {}
        self._next_layer = 0
        self._broken = "it was never started"

    def start(self, prompts: Sequence[tuple[int, Sequence[int]]], trajectory: str) -> None:
        """Load the model (once) and embed ``prompts`` [(global index, token ids)]."""
        with self._changing():
            self._load()
            embedded = {index: self._stepped.embed(ids) for index, ids in prompts}
            self._hidden = {trajectory: embedded}
            self._next_layer = 0

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """State changes whole or not at all: after a failed change nothing more is answered."""
        began = time.monotonic()
        self._broken = "an earlier call was interrupted"
        try:
            yield
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}".split("\n")[0]
            raise
        self._broken = ""
        self._busy += time.monotonic() - began

    def _check_at(self, layer: int) -> None:
        """Hidden states must be the inputs of ``layer``. Raises CalibrationError."""
        if self._broken or layer != self._next_layer:
            reason = self._broken or f"its states are those of layer {self._next_layer}"
            raise CalibrationError(f"a worker cannot go on at layer {layer}: {reason}")

    def _load(self) -> None:
        if self._stepped is None:
            import torch

            from calib_cluster.capture import SteppedModel

            spec = self._spec
            geometry = read_geometry(spec.model)
            dtype = getattr(torch, spec.dtype)
            self._stepped = SteppedModel(Path(spec.model), geometry, dtype, self._device)

    def judge(
        self, layer: int, codebook: Sequence[int], sinks: int
    ) -> dict[str, list[PromptTally]]:
        """Tallies of every trajectory and prompt at global layer ``layer``."""
        self._check_at(layer)
        began = time.monotonic()
        found = {
            name: [
                self._tally(index, self._stepped.judge(layer, hidden, codebook, sinks))
                for index, hidden in prompts.items()
            ]
            for name, prompts in self._hidden.items()
        }
        self._busy += time.monotonic() - began
        return found

    @staticmethod
    def _tally(index: int, tally) -> PromptTally:
        return PromptTally(index, tally.sums.tolist(), tally.positions.tolist(), tally.group)

    def advance(
        self, layer: int, branches: Sequence[tuple[str, str, Sequence[int] | None]], sinks: int
    ) -> None:
        """Run ``layer``; trajectories become ``branches`` [(name, parent, windows)].

        Prompt by prompt, so that parents and children are never all held at once.
        """
        self._check_at(layer)
        with self._changing():
            ahead: dict[str, dict] = {name: {} for name, _, _ in branches}
            for index in list(next(iter(self._hidden.values()))):
                inputs = {name: self._hidden[name].pop(index) for name in self._hidden}
                for name, parent, windows in branches:
                    ahead[name][index] = self._stepped.step(layer, inputs[parent], windows, sinks)
            self._hidden = ahead
            self._next_layer = layer + 1

    def evaluate(
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        windows: Sequence[Sequence[int] | None],
        sinks: int,
    ) -> dict[int, float]:
        """Summed next-token loss (nats) of each prompt with ``windows`` active.

        ``windows``: one entry a layer (all layers); None runs the layer unchanged.
        """
        began = time.monotonic()
        self._load()
        losses = {}
        for index, ids in prompts:
            hidden = self._stepped.embed(ids)
            for layer, row in enumerate(windows):
                hidden = self._stepped.step(layer, hidden, row, sinks)
            losses[index] = self._stepped.loss(hidden, ids)
        self._busy += time.monotonic() - began
        return losses


def _node() -> str:
    return os.uname().nodename


def _free_host_memory() -> int:
    """Bytes free for this process: the machine's, or its container's if that is less."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max", which is no number
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free

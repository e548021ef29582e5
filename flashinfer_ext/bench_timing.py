"""Timing of one launch sequence: CUDA graphs between events, with a cold L2 before each repeat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20
"""Written before each repeat: several times the L2 of any GPU so far."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, tenth and ninetieth percentile of ``repeats`` calls.
    ``graph`` is whether a captured graph was replayed, so that no host time is in them."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    graph: bool

    @classmethod
    def of(cls, samples: Sequence[float], graph: bool) -> Timing:
        """From samples in microseconds, at least one."""
        ordered = sorted(samples)

        def at(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))], 3)

        return cls(round(statistics.median(ordered), 3), at(0.1), at(0.9), len(ordered), graph)


class Timer:
    """Times calls on one device; on a CPU each call is made once and its time means nothing.

    Args:
        repeats: timed calls, after ``warmup`` ones that are not.
    """

    def __init__(self, device: str | torch.device, repeats: int = 30, warmup: int = 3) -> None:
        self.device = torch.device(device)
        self.repeats, self.warmup = repeats, warmup
        self._flush: torch.Tensor | None = None

    def time(self, work: Callable[[], object]) -> Timing:
        """Time ``work``, which launches on the current stream and is fit to run many times."""
        if self.device.type != "cuda":
            return self.host(work)
        for _ in range(self.warmup):
            work()
        torch.cuda.synchronize(self.device)
        call, graph = self._captured(work)
        return Timing.of([self._once(call) for _ in range(self.warmup + self.repeats)]
                         [self.warmup :], graph)  # fmt: skip

    def host(self, work: Callable[[], object]) -> Timing:
        """Time that the host spends in ``work``; what it launched is waited for in between."""
        cuda = self.device.type == "cuda"
        samples = []
        for _ in range(self.warmup + self.repeats if cuda else 1):
            began = time.perf_counter()
            work()
            samples.append((time.perf_counter() - began) * 1e6)
            if cuda:
                torch.cuda.synchronize(self.device)
        return Timing.of(samples[self.warmup :] if cuda else samples, graph=False)

    def _captured(self, work: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError:  # something in it cannot be captured: then with its host time
            torch.cuda.synchronize(self.device)
            return work, False
        return graph.replay, True

    def _once(self, call: Callable[[], object]) -> float:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def copy_bandwidth(timer: Timer, size: int) -> tuple[Timing, float]:
    """(timing, bytes per second read and written) of a device copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    timing = timer.time(lambda: target.copy_(source))
    return timing, 2 * size / (timing.median_us * 1e-6)

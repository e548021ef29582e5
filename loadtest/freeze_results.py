"""What ``python -m loadtest freeze`` measures, and its one statistic: a ratio of paired times."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
import numpy as np
import psutil

RESULT_FILE = "freeze.json"
BUSY_LOAD = 2.0
"""A load average above it says that other work ran: a server here keeps about one core busy."""

RESAMPLES = 2000
LEVEL = 0.95
PACKAGES = ("raggedkv", "sglang", "torch", "transformers")


class Batch(msgspec.Struct, frozen=True):
    """Requests sent to one server at once.

    ``peak_decoding`` of them decoded together, as ``/v1/loads`` reported; those ``withdrawn`` were
    still waiting once others decoded, and take no part in any figure;
    ``peak_frozen`` were frozen at once (None where nothing freezes). ``seconds``
    go from the first request sent to the last answer; ``decode_tokens_per_second`` counts only what
    came after the last first token. ``cpu_seconds`` are those of the server's processes.
    """

    sent: int
    finished: int
    withdrawn: int
    peak_decoding: int
    peak_frozen: int | None
    output_tokens: int
    seconds: float
    cpu_seconds: float
    tokens_per_second: float
    tokens_per_cpu_second: float
    decode_tokens_per_second: float


class Side(msgspec.Struct, frozen=True):
    """One server: ``equal`` and ``largest`` are its runs, the same one where their sizes agree.

    ``predicted`` requests decode together by ``kvpolicy``'s formulas; ``request_bytes`` of K and V
    is the most one of them holds while it decodes; ``kept_share`` of all frozen prompts' tokens
    stayed (None where nothing is frozen). ``flags`` are those of ``sglang.launch_server`` that
    differ from the other servers'.
    """

    name: str
    policy_id: str | None
    predicted: int
    request_bytes: int
    equal: Batch
    largest: Batch
    retractions: int
    kept_share: float | None
    start_seconds: float
    flags: list[str]


class Pair(msgspec.Struct, frozen=True):
    """One cold prompt without and with its freeze: seconds to the first token, CPU seconds."""

    off: float
    on: float
    off_cpu: float
    on_cpu: float


class Ratio(msgspec.Struct, frozen=True):
    """Median of ``n`` pairs' ratios and its 95 % percentile-bootstrap interval."""

    n: int
    median: float
    low: float
    high: float


class FirstToken(msgspec.Struct, frozen=True):
    """Time to the first token of single cold prompts, without and with the freeze, one server."""

    pairs: list[Pair]
    off_median: float
    on_median: float
    ratio: Ratio
    cpu_ratio: Ratio


class Machine(msgspec.Struct, frozen=True):
    """Where it ran; ``loads`` are one-minute load averages at each stage's start and at the end."""

    name: str
    cores: int
    loads: list[float]
    busy: bool
    versions: dict[str, str]


class Result(msgspec.Struct, frozen=True):
    """Contents of ``freeze.json``."""

    command: list[str]
    seed: int
    model: str
    kv_bytes: int
    prompt_tokens: int
    output_tokens: int
    budget_tokens: int
    sides: list[Side]
    first_token: FirstToken
    machine: Machine


def first_token(pairs: Sequence[Pair], seed: int) -> FirstToken:
    """Medians and ratios of ``pairs``. Raises ValueError if there are none."""
    return FirstToken(
        list(pairs),
        float(np.median([pair.off for pair in pairs])),
        float(np.median([pair.on for pair in pairs])),
        ratio([p.on for p in pairs], [p.off for p in pairs], seed),
        ratio([p.on_cpu for p in pairs], [p.off_cpu for p in pairs], seed),
    )


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int) -> Ratio:
    """Median of ours / theirs, pair by pair, resampling the pairs.

    A pair's two measurements follow each other, so what slows the machine for minutes cancels.
    Raises ValueError if there are no pairs.
    """
    ratios = np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64)
    if not ratios.size:
        raise ValueError("no pairs to compare")
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (tail, 1 - tail))
    return Ratio(len(ratios), float(np.median(ratios)), float(low), float(high))


def machine(loads: Sequence[float]) -> Machine:
    """This machine, with the load averages that were seen."""
    return Machine(
        platform.processor() or platform.machine(),
        psutil.cpu_count() or 0,
        [round(load, 2) for load in loads],
        max(loads) > BUSY_LOAD,
        {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    )


def load_now() -> float:
    """One-minute load average."""
    return os.getloadavg()[0]


def command() -> list[str]:
    """The command line that is running."""
    return ["python", "-m", "loadtest", *sys.argv[1:]]

"""Results as max-batch and max-context write them, with figures that can be told apart."""

from __future__ import annotations

from loadtest.capacity.results import (
    SCHEMA_VERSION,
    Attempt,
    BatchResult,
    BatchSide,
    ContextResult,
    ContextSide,
    Depths,
    Needles,
    Point,
    Probe,
    Server,
    Timed,
)
from loadtest.capacity.sides import NAMES, Role
from loadtest.freeze_results import Machine

WHAT = {
    Role.STOCK: "SGLang as it is",
    Role.FULL: "full",
    Role.WINDOWS: "seqcalib@b34b784ae412 tau-0.99",
    Role.FROZEN: "compiled@44ab17d96230, prompts frozen to 256 tokens",
}
LARGEST = {Role.STOCK: 3, Role.FULL: 3, Role.WINDOWS: 6, Role.FROZEN: 10}
RATES = {
    Role.STOCK: {1: 5.0, 3: 8.0},
    Role.FULL: {1: 4.5, 3: 6.6},
    Role.WINDOWS: {1: 4.4, 3: 7.2, 6: 9.9},
    Role.FROZEN: {1: 5.2, 3: 11.5, 10: 17.0},
}
FOUND = {Role.STOCK: 10, Role.FULL: 10, Role.WINDOWS: 8, Role.FROZEN: 9}
EACH = {Role.STOCK: 106_000_000, Role.FULL: 106_000_000, Role.WINDOWS: 52_000_000,
        Role.FROZEN: 23_600_000}  # fmt: skip
LONGEST = {Role.STOCK: 3200, Role.FULL: 3200, Role.WINDOWS: 8128, Role.FROZEN: 2944}
UNDERSTOOD = LONGEST | {Role.WINDOWS: 5120}
SLOPE = {Role.STOCK: 46_080, Role.FULL: 46_080, Role.WINDOWS: 16_000, Role.FROZEN: 50_000}


def machine(busy: bool = False) -> Machine:
    """Where it is said to have run."""
    return Machine("x86_64", 2, [1.25, 3.5 if busy else 1.5], busy, {"sglang": "0.5.23"})


def batch_result(finished: bool = True, busy: bool = False) -> BatchResult:
    """Four servers: twice stock's batch with windows, 3.33 times frozen."""
    command = ["python", "-m", "loadtest", "max-batch", "--policy", "compiled"]
    return BatchResult(
        SCHEMA_VERSION, command, finished, 7, "smollm2-135m-instruct", 330_000_000, 2048, 128, 3,
        [batch_side(role) for role in WHAT], machine(busy),
    )  # fmt: skip


def batch_side(role: Role) -> BatchSide:
    """One of its servers."""
    runs = [timed(role, batch, rate) for batch, rate in RATES[role].items()]
    count = LARGEST[role]
    return BatchSide(
        server(role), count, count, EACH[role], [Probe(count + 2, count, 2, 0, 60.0)], runs,
        EACH[role] * count, needles(FOUND[role], 2048),
    )  # fmt: skip


def timed(role: Role, batch: int, rate: float) -> Timed:
    """One timed run."""
    return Timed(
        batch, batch, 60.0, 128 * batch, rate, 17 * rate, 4000.0 * batch, 5000.0 * batch, 90.0,
        120.0, 0, 0, EACH[role] * batch, 1_900_000_000, 50.0, 1000 / rate, 1.25,
    )  # fmt: skip


def context_result(finished: bool = True) -> ContextResult:
    """The same servers: windows reach 2.54 times as far, frozen prompts 0.92 times."""
    command = ["python", "-m", "loadtest", "max-context", "--policy", "compiled"]
    return ContextResult(
        SCHEMA_VERSION, command, finished, 7, "smollm2-135m-instruct", 8192, 150_000_000, 2048, 16,
        8169, 64, [0.2, 0.5, 0.8], [context_side(role) for role in WHAT], machine(),
    )  # fmt: skip


def context_side(role: Role) -> ContextSide:
    """One of its servers."""
    longest, slope = LONGEST[role], SLOPE[role]
    curve = [Point(longest * i // 8, slope * longest * i // 8) for i in range(1, 9)]
    tried = [
        Attempt(n, "answered", "", n / 90, slope * n, 1_900_000_000, True) for n in (768, longest)
    ]
    tried.append(Attempt(longest + 64, "refused", "too long", None, None, None, None))
    return ContextSide(
        server(role), longest + 39, longest, UNDERSTOOD[role], slope * longest, slope * longest,
        1_900_000_000, longest / 90, curve, tried, [Depths(longest, [True, True])],
        needles(FOUND[role], 2048),
    )  # fmt: skip


def server(role: Role) -> Server:
    """What one of them was."""
    budget = 256 if role is Role.FROZEN else None
    flags = ["--kv-policy", "it"] if role is not Role.STOCK else ["--max-total-tokens", "7152"]
    return Server(role, NAMES[role], WHAT[role], None, None, budget, flags, None, 45.0)


def needles(found: int, context: int) -> Needles:
    """Ten questions of which the first ``found`` were answered."""
    hits = [i < found for i in range(10)]
    return Needles(context, 10, found, [i / 10 for i in range(10)], ["x"] * 10, hits)

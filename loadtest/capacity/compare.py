"""The few figures that decide, out of a whole result: what is gained, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from loadtest.capacity.results import BatchResult, BatchSide, ContextSide
from loadtest.capacity.sides import Role

OFFERED = (Role.WINDOWS, Role.FROZEN, Role.OTHER)
Measured = TypeVar("Measured", BatchSide, ContextSide)


@dataclass(frozen=True)
class Beside:
    """``ours`` over ``theirs``; the ratio is None where there is nothing to divide by."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float | None:
        """ours / theirs."""
        return self.ours / self.theirs if self.theirs else None


def base_of(sides: Sequence[Measured]) -> Measured | None:
    """What the others are compared with; None if one side ran alone."""
    if len(sides) > 1 and sides[0].server.role in (Role.STOCK, Role.BASE):
        return sides[0]
    return None


def offered(sides: Sequence[Measured]) -> list[Measured]:
    """The sides that a user would choose instead of the base: policies, not the tax."""
    base = base_of(sides)
    chosen = [s for s in sides if s is not base and s.server.role in OFFERED]
    return chosen or [s for s in sides if s is not base]


def tax_of(result: BatchResult) -> Beside | None:
    """Output tokens per second of our engine with nothing dropped, beside stock's, equal batch."""
    base = base_of(result.sides)
    full = next((s for s in result.sides if s.server.role == Role.FULL), None)
    if base is None or full is None:
        return None
    return at_equal(result, full, base)


def at_equal(result: BatchResult, side: BatchSide, base: BatchSide) -> Beside | None:
    """Output tokens per second of both at the same batch: the equal one, or the side's if less."""
    batch = min(result.equal, side.largest)
    ours, theirs = side.run(batch), base.run(batch)
    if ours is None or theirs is None:
        return None
    return Beside(ours.output_tokens_per_second, theirs.output_tokens_per_second)


def at_largest(side: BatchSide, base: BatchSide) -> Beside:
    """Output tokens per second, each at its own largest batch."""
    return Beside(
        side.at_largest.output_tokens_per_second, base.at_largest.output_tokens_per_second
    )


def cpu_at_equal(result: BatchResult, side: BatchSide, base: BatchSide) -> Beside | None:
    """CPU time per output token at the same batch: other work on the machine counts less in it."""
    batch = min(result.equal, side.largest)
    ours, theirs = side.run(batch), base.run(batch)
    if ours is None or theirs is None:
        return None
    if ours.cpu_ms_per_output_token is None or theirs.cpu_ms_per_output_token is None:
        return None
    return Beside(ours.cpu_ms_per_output_token, theirs.cpu_ms_per_output_token)


def times(beside: Beside | None) -> str:
    """``1.32x``; a dash where there is no ratio."""
    ratio = None if beside is None else beside.ratio
    return "–" if ratio is None else f"{ratio:.2f}x"

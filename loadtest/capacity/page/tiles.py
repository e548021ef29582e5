"""The headline figures: one tile each, a line for each side that a user would choose."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from kvpolicy.report.markup import node
from loadtest.capacity.compare import (
    Beside,
    Measured,
    at_equal,
    at_largest,
    base_of,
    cpu_at_equal,
    offered,
    times,
)
from loadtest.capacity.results import BatchResult, BatchSide, ContextResult
from loadtest.capacity.sides import Role
from loadtest.capacity.terminal import EVEN, found


def tiles(batch: BatchResult | None, context: ContextResult | None) -> Element:
    """All tiles that the results allow."""
    made = [*_batch_tiles(batch), *_context_tiles(context), *_needles(batch or context)]
    return node("div", made, cls="tiles")


def _batch_tiles(result: BatchResult | None) -> Iterator[Element]:
    if result is None:
        return
    base = base_of(result.sides)
    sides = offered(result.sides)
    yield _tile("requests together", [
        _line(side, Beside(side.largest, base.largest) if base else None, str(side.largest),
              f"{side.largest} beside {base.largest}" if base else "")
        for side in sides
    ])  # fmt: skip
    if base is None:
        return
    yield _tile("output tokens/s, each at its largest batch", [
        _line(side, at_largest(side, base), "",
              f"{side.at_largest.output_tokens_per_second:.1f} beside "
              f"{base.at_largest.output_tokens_per_second:.1f}", judged=not result.machine.busy)
        for side in sides
    ])  # fmt: skip
    equal = [_equal(result, side, base) for side in sides] + _tax(result, base)
    yield _tile(f"output tokens/s at equal batch ({result.equal})", [e for e in equal if e])


def _equal(result: BatchResult, side: BatchSide, base: BatchSide, more: str = "") -> Element | None:
    beside, cpu = at_equal(result, side, base), cpu_at_equal(result, side, base)
    if beside is None:
        return None
    how = f"{beside.ours:.1f} beside {beside.theirs:.1f}{more}"
    how = how if cpu is None else f"{how}; CPU per token {times(cpu)}"
    return _line(side, beside, "", how, judged=not result.machine.busy)


def _tax(result: BatchResult, base: BatchSide) -> list[Element | None]:
    """The engine with nothing dropped, if it is not what is offered anyway."""
    full = next((s for s in result.sides if s.server.role == Role.FULL), None)
    if full is None or full in offered(result.sides):
        return []
    return [_equal(result, full, base, ", nothing dropped")]


def _context_tiles(result: ContextResult | None) -> Iterator[Element]:
    if result is None:
        return
    base = base_of(result.sides)
    yield _tile("longest prompt", [
        _line(side, Beside(side.longest, base.longest) if base else None, f"{side.longest:,}",
              _reach(side.longest, side.answered, result.up_to, base and base.longest))
        for side in offered(result.sides)
    ])  # fmt: skip


def _reach(longest: int, answered: int, up_to: int, beside: int | None) -> str:
    text = f"{longest:,} tokens" + ("" if beside is None else f" beside {beside:,}")
    if longest >= up_to:
        text += ", all that was tried"
    return text if answered == longest else f"{text}; understood to {answered:,}"


def _needles(result: BatchResult | ContextResult | None) -> Iterator[Element]:
    if result is None or any(side.needles is None for side in result.sides):
        return
    base = base_of(result.sides)
    lines = []
    for side in offered(result.sides):
        beside = None if base is None else Beside(side.needles.found, base.needles.found)
        how = f"at {side.needles.context:,} tokens"
        if base is not None:
            how += f"; {base.server.name} {found(base.needles)}"
        lines.append(_line(side, beside, "", how, figure=found(side.needles)))
    yield _tile("needles found", lines)


def _tile(title: str, lines: list[Element]) -> Element:
    return node("section", node("h2", title), lines, cls="tile")


def _line(
    side: Measured,
    beside: Beside | None,
    alone: str,
    how: str,
    figure: str | None = None,
    judged: bool = True,
) -> Element:
    """One side's figure; ``judged`` marks it as a gain or a loss."""
    ratio = None if beside is None else beside.ratio
    even = ratio is None or abs(ratio - 1) < EVEN or not judged
    cls = "" if even else "more" if ratio > 1 else "less"
    text = figure or (times(beside) if ratio is not None else alone)
    return node(
        "p",
        node("b", text, **({"cls": cls} if cls else {})),
        node("span", str(side.server.role), cls="who"),
        node("span", how, cls="how"),
        cls=f"s-{side.server.role}",
    )

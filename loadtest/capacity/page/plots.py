"""The page's plots: throughput by batch, memory by context, quality by what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from kvpolicy.render import human_bytes
from kvpolicy.report.charts import Axis, Dot, Line, line_chart
from kvpolicy.report.words import short, tokens
from loadtest.capacity.compare import base_of
from loadtest.capacity.page.style import GROUPS
from loadtest.capacity.quality_file import QualityPoint
from loadtest.capacity.results import BatchResult, ContextResult, ContextSide

_SHARES = [(i / 4, f"{25 * i} %") for i in range(5)]
_TOP = 1.04  # room above the highest value


def axis_to(high: float, title: str, label=lambda value: f"{value:g}", count: int = 5) -> Axis:
    """An axis from 0 to ``high`` with about ``count`` round ticks."""
    step = _round_step(max(high, 1e-9) / count)
    ticks = [(i * step, label(i * step)) for i in range(int(high / step) + 1)]
    return Axis(0.0, high, ticks, title)


def _round_step(least: float) -> float:
    """Smallest 1, 2 or 5 times a power of ten that is no less than ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def throughput(result: BatchResult) -> Element:
    """Output tokens per second against the requests sent at once."""
    lines, dots = [], []
    for side in result.sides:
        name, cls = short_name(side.server.role), f"s-{side.server.role}"
        values = [(run.batch, run.output_tokens_per_second) for run in side.runs]
        lines.append(Line(name, side.server.name, cls, values))
        dots += [Dot(x, y, f"{side.server.name}, batch {x}: {y:.1f} tokens/s", cls)
                 for x, y in values]  # fmt: skip
    most = max(dot.x for dot in dots)
    x = axis_to(most * _TOP, "requests at once", _whole)
    y = axis_to(max(dot.y for dot in dots) * _TOP, "output tokens/s")
    return line_chart(lines, dots, x, y, "output tokens per second against batch")


def context_memory(result: ContextResult) -> Element:
    """KV bytes of one request against its prompt: predicted curves, measured points, the limit."""
    lines, dots = [], []
    for side in result.sides:
        cls = f"s-{side.server.role}"
        curve = [(point.length, point.kv_bytes / 1e6) for point in side.curve]
        if curve:
            lines.append(
                Line(short_name(side.server.role), f"{side.server.name}, predicted",
                     f"{cls} guess", [(0, 0), *curve])
            )  # fmt: skip
        dots += [Dot(x, y, text, cls) for x, y, text in _measured(side)]
    longest = max([dot.x for dot in dots] + [x for line in lines for x, _ in line.values] + [1])
    limit = [(0, result.kv_bytes / 1e6), (longest, result.kv_bytes / 1e6)]
    lines.append(Line("limit", f"KV bytes of each server: {result.kv_bytes}", "limit", limit))
    top = max([result.kv_bytes / 1e6] + [dot.y for dot in dots]) * _TOP
    x = axis_to(longest * _TOP, "prompt, tokens", lambda value: tokens(int(value)))
    y = axis_to(top, "KV of one request, MB")
    return line_chart(lines, dots, x, y, "KV bytes of one request against its prompt")


def _measured(side: ContextSide) -> Iterable[tuple[float, float, str]]:
    for attempt in side.attempts:
        if attempt.kv_bytes:
            text = f"{side.server.name}, {attempt.length} tokens: {human_bytes(attempt.kv_bytes)}"
            yield attempt.length, attempt.kv_bytes / 1e6, text


def quality(points: Sequence[QualityPoint]) -> Element:
    """Scores against the share of the cache that is kept, a line for each group."""
    groups: dict[str, list[QualityPoint]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    lines, dots = [], []
    for number, (group, members) in enumerate(groups.items()):
        cls = group if group.startswith("s-") else f"g{number % GROUPS}"
        members = sorted(members, key=lambda p: p.share)
        name = short(members[0].name if group.startswith("s-") else group)
        lines.append(Line(name, group, cls, [(p.share, p.score) for p in members]))
        dots += [
            Dot(p.share, p.score, f"{p.name}: {p.score:.0%} at {p.share:.0%}", cls) for p in members
        ]
    x = Axis(0.0, 1.02, _SHARES, "share of the KV cache kept")
    y = Axis(0.0, 1.03, _SHARES, points[0].measure)
    return line_chart(lines, dots, x, y, f"{points[0].measure} against the share of KV kept")


def own_points(result: BatchResult | ContextResult) -> list[QualityPoint]:
    """Needles found in this run, against the share of the dense cache a decoding request holds."""
    dense = max((_held(result, i) for i in range(len(result.sides))), default=0)
    return [
        QualityPoint(
            f"s-{side.server.role}", short_name(side.server.role),
            min(1.0, _held(result, number) / dense), side.needles.found / side.needles.asked,
            "needles found",
        )
        for number, side in enumerate(result.sides)
        if side.needles is not None and dense
    ]  # fmt: skip


def _held(result: BatchResult | ContextResult, number: int) -> float:
    if isinstance(result, BatchResult):
        return result.sides[number].request_bytes
    side = result.sides[number]
    base = base_of(result.sides) or side
    common = min(side.longest, base.longest) or 1
    return next((p.kv_bytes / p.length for p in side.curve if p.length >= common), 0.0)


def short_name(role: str) -> str:
    """A side's name in a chart."""
    return str(role)


def _whole(value: float) -> str:
    return f"{value:g}" if value == int(value) else ""

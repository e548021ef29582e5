"""Line charts and histograms as inline SVG. Sizes are in SVG units; CSS gives the colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

import numpy as np

from kvpolicy.report.markup import node, number

_WIDTH = 420
_LEFT, _TOP, _BOTTOM = 54, 12, 44
_LABEL_GAP = 14


@dataclass(frozen=True)
class Axis:
    """A range, its ticks (value, label) and its title."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str
    log: bool = False

    def place(self, value: float) -> float:
        """Where ``value`` lies, 0 at the low end and 1 at the high one."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return (at - low) / (high - low) if high > low else 0.5


@dataclass(frozen=True)
class Dot:
    """A marked value with the text shown when the pointer rests on it."""

    x: float
    y: float
    text: str
    cls: str


@dataclass(frozen=True)
class Line:
    """One named curve; ``cls`` picks colour and dashes."""

    label: str
    text: str
    cls: str
    values: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """The plotting area of a chart ``height`` high with ``right`` units kept for labels."""

    x: Axis
    y: Axis
    height: int
    right: int

    @property
    def edge(self) -> float:
        """Right end of the plotting area."""
        return _WIDTH - self.right

    @property
    def floor(self) -> float:
        """Lower end of the plotting area."""
        return self.height - _BOTTOM

    def across(self, value: float) -> float:
        """Horizontal position of ``value``."""
        return _LEFT + self.x.place(value) * (self.edge - _LEFT)

    def down(self, value: float) -> float:
        """Vertical position of ``value``."""
        return self.floor - self.y.place(value) * (self.floor - _TOP)


def line_chart(
    lines: Sequence[Line], dots: Sequence[Dot], x: Axis, y: Axis, description: str
) -> Element:
    """Curves named at their right ends, over a grid."""
    frame = Frame(x, y, height=270, right=88)
    ends = [frame.down(line.values[-1][1]) for line in lines]
    labels = spread(ends, _LABEL_GAP, _TOP, frame.floor)
    return _svg(
        frame,
        description,
        _axes(frame),
        [_curve(frame, line) for line in lines],
        [_dot(frame, dot) for dot in dots],
        [_end_label(frame, *item) for item in zip(lines, ends, labels, strict=True)],
    )


def histogram(
    values: Sequence[float], x: Axis, y_title: str, cls: str, description: str, bins: int = 24
) -> Element:
    """Counts of ``values`` in equal bins over the range of ``x``."""
    counts, edges = np.histogram(values, bins=bins, range=(x.low, x.high))
    top = max(1, int(counts.max()))
    ticks = [(0.0, "0"), (float(top), f"{top}")]
    frame = Frame(x, Axis(0.0, top, ticks, y_title), height=190, right=22)
    bars = [
        _bar(frame, float(left), float(right), int(count), cls)
        for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True)
        if count
    ]
    return _svg(frame, description, _axes(frame), bars)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near ``wanted`` and at least ``gap`` apart, kept below ``high`` where possible."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    placed = list(wanted)
    floor = low - gap
    for i in order:
        floor = placed[i] = max(wanted[i], floor + gap)
    ceiling = high + gap
    for i in reversed(order):
        ceiling = placed[i] = min(placed[i], ceiling - gap)
    return placed


def _svg(frame: Frame, description: str, *parts: object) -> Element:
    box = f"0 0 {_WIDTH} {frame.height}"
    return node("svg", *parts, viewBox=box, role="img", aria_label=description, cls="chart")


def _axes(frame: Frame) -> list[Element]:
    parts = []
    for value, label in frame.y.ticks:
        y = frame.down(value)
        parts.append(node("line", x1=_LEFT, x2=frame.edge, y1=y, y2=y, cls="grid"))
        parts.append(_text(label, _LEFT - 6, y + 4, "end"))
    for value, label in frame.x.ticks:
        x = frame.across(value)
        parts.append(node("line", x1=x, x2=x, y1=frame.floor, y2=frame.floor + 5, cls="tick"))
        parts.append(_text(label, x, frame.floor + 18, "middle"))
    middle = (_LEFT + frame.edge) / 2
    parts.append(_text(frame.x.title, middle, frame.height - 6, "middle", "title"))
    turn = f"rotate(-90 11 {number((_TOP + frame.floor) / 2)})"
    height = (_TOP + frame.floor) / 2
    parts.append(_text(frame.y.title, 11, height, "middle", "title", transform=turn))
    return parts


def _text(label: str, x: float, y: float, anchor: str, cls: str = "", **more: str) -> Element:
    extra = {"cls": cls} if cls else {}
    return node("text", label, x=x, y=y, text_anchor=anchor, **extra, **more)


def _curve(frame: Frame, line: Line) -> Element:
    places = (f"{number(frame.across(x))},{number(frame.down(y))}" for x, y in line.values)
    return node(
        "polyline", node("title", line.text), points=" ".join(places), cls=f"curve {line.cls}"
    )


def _dot(frame: Frame, dot: Dot) -> Element:
    return node(
        "circle", node("title", dot.text),
        cx=frame.across(dot.x), cy=frame.down(dot.y), r=4, cls=f"dot {dot.cls}",
    )  # fmt: skip


def _end_label(frame: Frame, line: Line, end: float, label: float) -> list[Element]:
    start = frame.edge + 2
    lead = node("line", x1=start, x2=start + 8, y1=end, y2=label, cls=f"link {line.cls}")
    return [lead, _text(line.label, start + 11, label + 4, "start", f"name {line.cls}")]


def _bar(frame: Frame, left: float, right: float, count: int, cls: str) -> Element:
    x, top = frame.across(left), frame.down(count)
    width = max(1.0, frame.across(right) - x - 1)
    label = node("title", f"{count}: from {left:.5f} to {right:.5f}")
    return node(
        "rect", label, x=x, y=top, width=width, height=frame.floor - top, cls=f"count {cls}"
    )

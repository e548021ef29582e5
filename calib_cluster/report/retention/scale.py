"""One ordered scale of colours for a table's values, its key, and histograms of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree.ElementTree import Element

import numpy as np

from kvpolicy.report.charts import Axis, histogram
from kvpolicy.report.markup import node

STEPS = 21
"""Colours of the scale: the paper's gate has that many thresholds."""
_MOST_BARS = 32
_TICKS = 5


@dataclass(frozen=True)
class Scale:
    """Colours from ``low`` to ``high``; equal ratios, not differences, stand apart if ``log``."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: np.ndarray, log: bool = False) -> Scale:
        """From the least to the greatest of ``values``."""
        return cls(float(values.min()), float(values.max()), log)

    def level(self, value: float) -> str:
        """CSS class of a value's colour."""
        if self.high <= self.low:
            return f"l{STEPS // 2}"
        low, high, at = self.low, self.high, float(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        part = (at - low) / (high - low)
        return f"l{round(min(max(part, 0.0), 1.0) * (STEPS - 1))}"

    def key(self, what: str, *marks: Element) -> Element:
        """The colours between their ends; ``marks`` explain other cells."""
        if self.high <= self.low:
            colours = [node("b", cls=self.level(self.low)), short(self.low)]
        else:
            steps = [node("b", cls=f"l{i}") for i in range(STEPS)]
            colours = [f"{short(self.low)} ", steps, f" {short(self.high)}"]
        items = [node("li", f"{what} ", node("span", colours, cls="ramp"))]
        items += [node("li", mark) for mark in marks]
        return node("ul", items, cls="legend", aria_label=f"colours: {what}")


def short(value: float) -> str:
    """Four significant digits."""
    return f"{float(value):.4g}"


def bars(values: np.ndarray, title: str, y_title: str, cls: str, description: str) -> Element:
    """Histogram of ``values``, a bar for each where they lie on a grid of few."""
    low, high = float(values.min()), float(values.max())
    steps = np.diff(np.unique(values.astype(np.float64)))
    step = float(steps.min()) if steps.size else 0.05
    count = round((high - low) / step) + 1
    if count > _MOST_BARS:
        count, step = _MOST_BARS, 0.0
    ticks = np.linspace(low, high, _TICKS) if high > low else [low]
    axis = Axis(low - step / 2, high + step / 2, [(float(t), short(t)) for t in ticks], title)
    return histogram(values.astype(np.float64), axis, y_title, cls, description, count)

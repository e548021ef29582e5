"""How the report writes numbers."""

from __future__ import annotations

import math

from kvpolicy.windows import FULL

NOTHING = "–"
_MINUS = "−"


def tokens(count: int) -> str:
    """``512``, ``8k``, ``1M`` (powers of 1024), else the exact number."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return f"{count:,}"


def window(value: int) -> str:
    """A window for a cell of a map: at most five characters up to 1M tokens."""
    if value == FULL:
        return "full"
    return str(value) if value < 10_000 else tokens(value)


def share(value: float) -> str:
    """``29.1 %``; two decimals below 1 %."""
    return f"{value:.2%}" if 0 < value < 0.01 else f"{value:.1%}"


def cosine(value: float) -> str:
    """Four decimals, five near 1, where the points differ; a dash if not measured."""
    if math.isnan(value):
        return NOTHING
    return f"{value:.5f}" if value >= 0.999 else f"{value:.4f}"


def signed(value: float, digits: int = 4) -> str:
    """``+0.0042`` with a real minus sign, ``+4e-06`` if it would read 0; a dash if not a number."""
    if math.isnan(value):
        return NOTHING
    sign = _MINUS if value < 0 else "+"
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{sign}{abs(value):.0e}"
    return f"{sign}{abs(value):.{digits}f}"


def plural(count: int, noun: str) -> str:
    """``1 unit``, ``2,000 units``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def short(name: str, length: int = 10) -> str:
    """A name cut to ``length`` characters for a label in a chart."""
    return name if len(name) <= length else name[: length - 1] + "…"

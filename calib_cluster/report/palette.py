"""Colours: one ordered scale for windows, another for points, each for light and dark.

Both scales order by lightness, so they stay ordered for every kind of colour vision and in grey.
"""

from __future__ import annotations

from collections.abc import Sequence

# ColorBrewer YlGnBu without its near-white end; in the dark scheme more history is brighter.
_WINDOWS = ("#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
_WINDOWS_DARK = (*reversed(_WINDOWS[:-1]),)
# Parts of matplotlib's plasma that stand out from the page.
_POINTS = ("#cf571f", "#d0406e", "#a3239c", "#6a00a8", "#1b0a86")
_POINTS_DARK = ("#b65bd0", "#e0609a", "#f08a63", "#f9b53c", "#f4ee58")

Rgb = tuple[int, int, int]


def window_colours(count: int, dark: bool) -> list[str]:
    """``count`` background colours from the smallest window to full."""
    return _steps(_WINDOWS_DARK if dark else _WINDOWS, count)


def point_colours(count: int, dark: bool) -> list[str]:
    """``count`` line colours in the order of the points."""
    return _steps(_POINTS_DARK if dark else _POINTS, count)


def blend(colours: Sequence[str], parts: Sequence[float]) -> str:
    """The mean of ``colours`` by ``parts``, which sum to 1."""
    rows = [_rgb(colour) for colour in colours]
    mixed = (sum(part * row[i] for part, row in zip(parts, rows, strict=True)) for i in range(3))
    return "#" + "".join(f"{min(round(value), 255):02x}" for value in mixed)


def ink(background: str) -> str:
    """Black or white, whichever reads better on ``background`` (contrast is always over 4.5)."""
    luminance = _luminance(_rgb(background))
    return "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#fff"


def _steps(stops: Sequence[str], count: int) -> list[str]:
    if count == 1:
        return [stops[len(stops) // 2]]
    return [_between(stops, i / (count - 1)) for i in range(count)]


def _between(stops: Sequence[str], where: float) -> str:
    position = where * (len(stops) - 1)
    left = min(int(position), len(stops) - 2)
    part = position - left
    pairs = zip(_rgb(stops[left]), _rgb(stops[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _rgb(colour: str) -> Rgb:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(rgb: Rgb) -> float:
    """Relative luminance as WCAG 2 defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

"""The plot: what each contender keeps against what it loses, legible on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from loadtest.quality_contenders import Kind
from loadtest.quality_report import find, mean
from loadtest.quality_results import Result, Row
from loadtest.result_files import write_png

PLOT_FILE = "quality.png"
LINEAR_NATS = 0.02  # within it the NLL axis is linear, beyond it logarithmic
SIZE_INCHES = (6.0, 8.5)
DPI = 150
SAME_SHARE = 0.005
STEP = 0.024  # of the horizontal axis: about a marker's width
STYLE = {
    Kind.FULL: ("s", "#444444"),
    Kind.POINT: ("o", "#0b6e4f"),
    Kind.UNIFORM: ("D", "#c8553d"),
    Kind.SHUFFLED: ("^", "#5b5bd6"),
}
"""Marker and colour of each kind."""


def write_plot(result: Result, folder: Path) -> Path:
    """Write ``folder/quality.png`` by one rename. Raises UserError if it cannot be written."""
    with matplotlib.rc_context({"font.size": 13}):
        return write_png(folder / PLOT_FILE, draw(result), DPI)


def draw(result: Result) -> Figure:
    """Residency against the NLL's difference to full (95 % intervals), and against retrieval."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(f"{result.model}\n{result.policy_id}, context {result.context}", fontsize=13)
    losses, retrieval = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_losses(losses, result)
    _draw_retrieval(retrieval, result)
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=12)
    return figure


def _style(row: Row) -> dict:
    marker, colour = STYLE[Kind(row.kind)]
    return {"marker": marker, "color": colour, "markersize": 9, "linestyle": "none"}


def _draw_losses(axes: Axes, result: Result) -> None:
    lowest, largest = 0.0, LINEAR_NATS
    for row, x in zip(result.rows, _spread(result.rows), strict=True):
        interval = find(result, row.name, "full", "nll")
        y, low, high = (interval.mean, interval.low, interval.high) if interval else (0.0, 0.0, 0.0)
        lowest, largest = min(lowest, low), max(largest, high)
        bars = [[max(0.0, y - low)], [max(0.0, high - y)]]
        label = f"{row.name}: {row.residency:.0%}"
        axes.errorbar([x], [y], yerr=bars, capsize=5, elinewidth=2, label=label, **_style(row))
    axes.axhline(0, color="#999999", linewidth=1)
    axes.set_yscale("symlog", linthresh=LINEAR_NATS, linscale=1)
    ticks = [-0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_yticks([tick for tick in ticks if 1.5 * lowest <= tick <= 1.5 * largest])
    axes.set_ylim(min(1.3 * lowest, -LINEAR_NATS / 5), 1.5 * largest)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("NLL above full (nats a token)")
    axes.grid(alpha=0.3)


def _draw_retrieval(axes: Axes, result: Result) -> None:
    for row, x in zip(result.rows, _spread(result.rows), strict=True):
        if (share := mean(row, "retrieval")) is not None:
            axes.plot([x], [share], **_style(row))
            if row.kind == Kind.POINT:
                axes.annotate(
                    row.name, (x, share), (0, 10), textcoords="offset points", ha="center",
                    fontsize=10,
                )  # fmt: skip
    axes.set_ylim(-0.07, 1.2)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlim(0, 1.05)
    axes.set_ylabel("needles found")
    axes.set_xlabel("share of the cache kept (equal shares stand side by side)", fontsize=12)
    axes.grid(alpha=0.3)


def _spread(rows: Sequence[Row]) -> list[float]:
    """Residencies; contenders that keep the same share stand side by side around it."""
    places: list[float] = []
    for row in rows:
        same = [other.name for other in rows if abs(other.residency - row.residency) < SAME_SHARE]
        places.append(row.residency + STEP * (same.index(row.name) - (len(same) - 1) / 2))
    return places

"""The judge's plot: what every arm still answers, against the tokens it keeps."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from calib_cluster.judge.arms import FULL
from calib_cluster.judge.items import TEXT
from calib_cluster.judge.results import PLOT_FILE, Cell, Result, write_file
from calib_cluster.judge.summary import ANSWERS, by_arm, grouped, values
from kvpolicy.bootstrap import paired_interval

DPI = 130
PANEL = (2.9, 2.5)  # inches
CHARACTERS = 11  # of the title, an inch
OURS = ("#0b6e4f", "#5b5bd6", "#c8553d", "#b8860b")
"""Colours of our policies, in their order."""
PEERS = {
    "snapkv": ("#1f77b4", "o"), "adakv": ("#17a2b8", "s"), "chunkkv": ("#7b6fb0", "D"),
    "tova": ("#d95f9c", "^"), "expected_attention": ("#e08a2e", "v"),
    "adakv_ea": ("#b5651d", "P"), "streamingllm": ("#8a8f98", "<"), "random": ("#b9bec6", "x"),
    "recency": ("#6b7078", ">"),
}  # fmt: skip
TEXT_PANELS = (
    ("kl", "KL to the full cache (nats a token)"),
    ("rise", "rise of the NLL (nats a token)"),
    ("agreement", "same most likely token"),
)


def write_plot(result: Result, folder: Path) -> Path:
    """Write ``folder/judge.png``, whole or not at all. Raises CalibrationError."""
    image = io.BytesIO()
    with matplotlib.rc_context({"font.size": 10}):
        draw(result).savefig(image, format="png", dpi=DPI)
    return write_file(folder / PLOT_FILE, image.getvalue())


def draw(result: Result) -> Figure:
    """A row of panels for each length and protocol with answers, then for each length's text."""
    rows = list(dict.fromkeys((c.length, c.protocol, c.task == TEXT) for c in result.cells))
    rows.sort(key=lambda row: (row[2], row[0]))
    answers = list(dict.fromkeys(c.task for c in result.cells if c.task != TEXT))
    columns = max(len(answers), len(TEXT_PANELS) if any(row[2] for row in rows) else 0)
    size = (PANEL[0] * columns + 0.4, PANEL[1] * len(rows) + 1.5)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(textwrap.fill(_title(result), int(CHARACTERS * size[0])), fontsize=12)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes_row, (length, protocol, is_text) in zip(grid, rows, strict=True):
        cells = [c for c in result.cells if (c.length, c.protocol) == (length, protocol)]
        panels = TEXT_PANELS if is_text else [("accuracy", task) for task in answers]
        for axes in axes_row[len(panels) :]:
            axes.set_axis_off()
        for axes, (measure, name) in zip(axes_row, panels, strict=False):
            task = TEXT if is_text else name
            own = [c for c in cells if c.task == task]
            _panel(axes, result, own, measure)
            if own:  # a suite need not ask every task under both protocols
                axes.set_title("all answers" if name == ANSWERS else name, fontsize=10)
        label = f"text, T={length}" if is_text else f"{protocol}, T={length}\nanswer tokens right"
        axes_row[0].set_ylabel(label)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(3, columns)))
    return figure


def _title(result: Result) -> str:
    items = max((cell.n for cell in result.cells if cell.task != ANSWERS), default=0)
    state = "" if result.finished else " (not finished)"
    band = f"; band: 95 % interval of {result.against}'s mean" if result.against else ""
    return (
        f"{result.settings.model}: what is left after compressing the prompt's cache, "
        f"up to {items} items a panel{band}{state}"
    )


def _panel(axes: Axes, result: Result, cells: Sequence[Cell], measure: str) -> None:
    full = next((cell for cell in cells if cell.arm == FULL), None)
    if full is None:
        axes.set_axis_off()
        return
    budgets = sorted({cell.budget for cell in cells if cell.budget is not None})
    arms = list(dict.fromkeys(cell.arm for cell in cells if cell.arm != FULL))
    for arm in sorted(arms, key=lambda arm: arm in result.settings.policies):
        own = [next(c for c in cells if (c.arm, c.budget) == (arm, b)) for b in budgets]
        points = [_value(cell, measure, full) for cell in own]
        axes.plot(budgets, points, label=arm, **_style(result, arm))
        if arm == result.against and measure != "rise":
            _band(axes, result, own, measure, _style(result, arm)["color"])
    if measure in ("accuracy", "agreement"):
        level = _value(full, measure, full)
        axes.axhline(level, color="#444444", linestyle="--", linewidth=1.2, label="full cache")
        axes.set_ylim(0, 1.03)
    elif measure == "kl":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(budget) for budget in budgets])
    axes.set_xlabel("budget (tokens a kv head)", fontsize=9)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _value(cell: Cell, measure: str, full: Cell) -> float:
    if measure == "rise":
        return cell.nll - full.nll
    return max(getattr(cell, measure), 1e-4) if measure == "kl" else getattr(cell, measure)


def _style(result: Result, arm: str) -> dict:
    ours = list(result.settings.policies)
    if arm in ours:
        colour = OURS[ours.index(arm) % len(OURS)]
        return {"color": colour, "marker": "o", "markersize": 6, "linewidth": 2.6, "zorder": 3}
    colour, marker = PEERS.get(arm, ("#6b7078", "."))
    return {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.2}


def _band(axes: Axes, result: Result, own: Sequence[Cell], measure: str, colour: str) -> None:
    """The interval of an arm's mean over items."""
    first = own[0]
    cases = grouped(result.cases)[first.length, first.protocol, first.task]
    scores = by_arm(cases)
    bounds = []
    for cell in own:
        found = values(scores[cell.arm, cell.budget], measure)
        interval = paired_interval(found, np.zeros(len(found)), result.resamples, 0)
        bounds.append((interval.low, interval.high))
    low, high = zip(*bounds, strict=True)
    floor = [max(x, 1e-4) for x in low] if measure == "kl" else low
    axes.fill_between([cell.budget for cell in own], floor, high, color=colour, alpha=0.15)

"""The plot of the freeze benchmark: what decodes together, how fast, and the first token."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpolicy.render import human_bytes
from loadtest.freeze_report import ratio_text
from loadtest.freeze_results import Result, Side
from loadtest.result_files import write_png

PLOT_FILE = "freeze.png"
SIZE_INCHES = (11.0, 4.6)
DPI = 150
COLOURS = ("#8a8f98", "#5b5bd6", "#0b6e4f")
"""Of stock, unfrozen and frozen."""
LABELS = ("stock\nSGLang", "RaggedKV\nunfrozen", "RaggedKV\nfrozen")


def write_plot(result: Result, folder: Path) -> Path:
    """Write ``folder/freeze.png`` by one rename. Raises UserError if it cannot be written."""
    with matplotlib.rc_context({"font.size": 11}):
        return write_png(folder / PLOT_FILE, draw(result), DPI)


def draw(result: Result) -> Figure:
    """Three panels side by side."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(
        f"{result.model}, the same {human_bytes(result.kv_bytes)} of KV cache: prompts of "
        f"{result.prompt_tokens} tokens frozen to {result.budget_tokens}, "
        f"{result.output_tokens} tokens of output",
        fontsize=12,
    )
    together, rates, first = figure.subplots(1, 3, width_ratios=(3, 4, 3))
    _draw_together(together, result.sides)
    _draw_rates(rates, result.sides)
    _draw_first_token(first, result)
    for axes in (together, rates, first):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_together(axes: Axes, sides: list[Side]) -> None:
    stock = max(1, sides[0].largest.peak_decoding)
    for i, side in enumerate(sides):
        peak = side.largest.peak_decoding
        axes.bar(i, peak, 0.62, color=COLOURS[i])
        axes.annotate(
            f"{peak}" if i == 0 else f"{peak}  ({peak / stock:.1f}x)", (i, peak), (0, 4),
            textcoords="offset points", ha="center", fontweight="bold",
        )  # fmt: skip
        axes.hlines(side.predicted, i - 0.38, i + 0.38, color="black", linestyle=":", linewidth=2)
    axes.plot([], [], color="black", linestyle=":", linewidth=2, label="predicted")
    axes.legend(frameon=False, loc="upper left")
    axes.set_xticks(range(len(sides)), LABELS, fontsize=10)
    axes.set_ylim(0, 1.18 * max(max(s.largest.peak_decoding, s.predicted) for s in sides))
    axes.set_title("requests that decode together", fontsize=11)


def _draw_rates(axes: Axes, sides: list[Side]) -> None:
    groups = (
        (f"at batch {sides[0].equal.finished},\nend to end", "equal", "tokens_per_second"),
        ("at its largest,\nend to end", "largest", "tokens_per_second"),
        ("at its largest,\nwhile decoding", "largest", "decode_tokens_per_second"),
    )
    width, tallest = 0.27, 0.0
    for g, (_, batch, rate) in enumerate(groups):
        stock = getattr(getattr(sides[0], batch), rate)
        for i, side in enumerate(sides):
            value = getattr(getattr(side, batch), rate)
            tallest = max(tallest, value)
            x = g + (i - 1) * width
            axes.bar(x, value, 0.94 * width, color=COLOURS[i])
            text = f"{value:.1f}" if i == 0 else f"{value / stock:.2f}x"
            axes.annotate(
                text, (x, value), (0, 3), textcoords="offset points", ha="center", fontsize=9,
                fontweight="bold" if i == 2 else "normal",
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), [name for name, _, _ in groups], fontsize=10)
    axes.set_ylim(0, 1.12 * tallest)
    axes.set_title("output tokens a second", fontsize=11)


def _draw_first_token(axes: Axes, result: Result) -> None:
    first = result.first_token
    for pair in first.pairs:
        axes.plot([0, 1], [pair.off, pair.on], "o-", color="#b9bec6", markersize=5, linewidth=1)
    for x, median, colour in ((0, first.off_median, COLOURS[1]), (1, first.on_median, COLOURS[2])):
        axes.hlines(median, x - 0.22, x + 0.22, color=colour, linewidth=4)
        text = f"median\n{median:.2f} s"
        axes.annotate(
            text, (x, 0), (0, 12), textcoords="offset points", ha="center", color=colour,
            fontweight="bold",
        )  # fmt: skip
    axes.set_xticks([0, 1], ["without\nthe freeze", "with\nthe freeze"], fontsize=10)
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(0, 1.3 * max(max(pair.off, pair.on) for pair in first.pairs))
    axes.set_title(
        f"first token of a cold prompt (s)\nratio {ratio_text(first.ratio)}", fontsize=11
    )

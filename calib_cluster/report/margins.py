"""How close each choice was: cosine at the chosen window against tau, and what the next
smaller window would have given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from xml.etree.ElementTree import Element

from calib_cluster.report.data import ReportInput
from calib_cluster.report.parts import only
from kvpolicy.report import words
from kvpolicy.report.charts import Axis, histogram
from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import figure, header, row, scroll_table
from kvpolicy.windows import FULL

TIGHTEST = 10


@dataclass(frozen=True)
class Unit:
    """A calibrated unit at one point: its window and mean cosine, and the largest smaller window
    that was measured with its own. NaN and None where there is no measurement."""

    layer: int
    head: int
    window: int
    cosine: float
    smaller: int | None
    smaller_cosine: float


@dataclass(frozen=True)
class Margins:
    """The units of one point by how they were decided; ``windowed`` is ascending in cosine."""

    tau: float
    windowed: tuple[Unit, ...]
    full: tuple[Unit, ...]
    unmeasured: tuple[Unit, ...]

    @property
    def values(self) -> list[float]:
        """Mean cosine minus tau of every windowed unit, ascending."""
        return [unit.cosine - self.tau for unit in self.windowed]


def units_of(data: ReportInput, index: int) -> list[Unit]:
    """Every calibrated unit of point ``index``, by layer then kv head."""
    windows = data.points[index].policy.windows
    return [
        _unit(data, index, at, layer.layer_id, head, int(windows[at, head]))
        for at, layer in data.global_rows
        for head in range(layer.num_kv_heads)
    ]


def margins_of(data: ReportInput, index: int) -> Margins | None:
    """Margins of point ``index``, or None if it has no tau."""
    tau = data.points[index].tau
    if tau is None:
        return None
    units = units_of(data, index)
    finite = [unit for unit in units if unit.window != FULL]
    known = [unit for unit in finite if not math.isnan(unit.cosine)]
    return Margins(
        tau,
        tuple(sorted(known, key=lambda unit: (unit.cosine, unit.layer, unit.head))),
        tuple(unit for unit in units if unit.window == FULL),
        tuple(unit for unit in finite if math.isnan(unit.cosine)),
    )


def margin_table(data: ReportInput) -> Element:
    """One row a point: how its units were decided and how much room they have."""
    head = header("point", "room", "lowest", "median", "windowed", "full")
    rows = [
        row(point.name, *_summary(margins_of(data, index)), cls=f"p{index}")
        for index, point in enumerate(data.points)
    ]
    return scroll_table([head], rows)


def margin_blocks(data: ReportInput) -> list[Element]:
    """For each point: the distribution of margins and its tightest units."""
    return [
        only(index, point.name, _block(margins_of(data, index), index))
        for index, point in enumerate(data.points)
    ]


def _unit(data: ReportInput, index: int, at: int, layer: int, head: int, window: int) -> Unit:
    measured = data.evidence.mean_cosine[index, at, head].tolist()
    cosines = dict(zip(data.evidence.codebook, measured, strict=True))
    below = [w for w, c in cosines.items() if w < window and not math.isnan(c)]
    smaller = max(below, default=None)
    own = 1.0 if window == FULL else cosines.get(window, math.nan)
    return Unit(layer, head, window, own, smaller, cosines.get(smaller, math.nan))


def _summary(margins: Margins | None) -> list[str]:
    if margins is None:
        return [words.NOTHING] * 5
    values = margins.values
    return [
        f"{1 - margins.tau:.4g}",
        words.signed(values[0], 5) if values else words.NOTHING,
        words.signed(median(values), 5) if values else words.NOTHING,
        f"{len(margins.windowed) + len(margins.unmeasured):,}",
        f"{len(margins.full):,}",
    ]


def _block(margins: Margins | None, index: int) -> Child:
    if margins is None:
        return node("p", "This point has no tau, so its units have no margin.")
    notes = [node("p", text) for text in _notes(margins)]
    if not margins.windowed:
        return [node("p", "No unit of this point has a measured window."), notes]
    left = node("div", _distribution(margins, index), notes)
    return node("div", left, node("div", _tightest(margins)), cls="pair lean")


def _distribution(margins: Margins, index: int) -> Element:
    values = margins.values
    low, high = min(0.0, values[0]), max(1 - margins.tau, values[-1], 1e-6)
    ticks = [(low + (high - low) * part, "") for part in (0, 0.25, 0.5, 0.75, 1)]
    ticks = [(value, f"{value:.4g}") for value, _ in ticks]
    axis = Axis(low, high, ticks, f"mean cosine above tau = {margins.tau:g}")
    chart = histogram(values, axis, "units", f"p{index}", "distribution of margins over units")
    return figure(
        chart,
        f"How far above tau the {words.plural(len(values), 'windowed unit')} ended: bars near 0 "
        "are choices that were only just good enough.",
    )


def _tightest(margins: Margins) -> list[Element]:
    head = header("layer/head", "window", "cosine", "margin", "smaller", "cosine", "short by")
    rows = [_tight_row(unit, margins.tau) for unit in margins.windowed[:TIGHTEST]]
    title = f"The {len(rows)} tightest units" if len(rows) > 1 else "The tightest unit"
    why = "With the next smaller window, its cosine, and how far that is below tau."
    return [node("h4", title), node("p", why), scroll_table([head], rows, "compact")]


def _tight_row(unit: Unit, tau: float) -> Element:
    place = f"{unit.layer} / {unit.head}"
    own = [words.window(unit.window), words.cosine(unit.cosine), words.signed(unit.cosine - tau, 5)]
    if unit.smaller is None:
        return row(place, *own, "none", words.NOTHING, words.NOTHING)
    short = words.cosine(unit.smaller_cosine), f"{tau - unit.smaller_cosine:.4f}"
    return row(place, *own, words.window(unit.smaller), *short)


def _notes(margins: Margins) -> list[str]:
    notes = []
    if margins.full:
        notes.append(_full_note(margins.full))
    if margins.unmeasured:
        count = words.plural(len(margins.unmeasured), "unit")
        notes.append(
            f"{count} have no measured cosine at the chosen window: no query position of the "
            "calibration texts reached past it."
        )
    below = sum(value < 0 for value in margins.values)
    if below:
        notes.append(f"{words.plural(below, 'unit')} below tau: this should not happen.")
    return notes


def _full_note(units: Sequence[Unit]) -> str:
    known = [unit for unit in units if unit.smaller is not None]
    count = words.plural(len(units), "unit")
    text = f"{count} {'keeps' if len(units) == 1 else 'keep'} full history"
    if not known:
        return text + "; no smaller window was measured."
    low, high = (f([u.smaller_cosine for u in known]) for f in (min, max))
    largest = words.window(max(u.smaller for u in known))
    reach = words.cosine(low) if low == high else f"{words.cosine(low)} to {words.cosine(high)}"
    return text + f": even the largest measured window, {largest}, reached only {reach}."

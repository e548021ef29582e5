"""How much was measured: one row a table, from its evidence."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree.ElementTree import Element

import numpy as np

from calib_cluster.report.retention.data import SURE, RetentionReportInput
from calib_cluster.report.retention.heads import percent
from calib_cluster.report.retention.risk import quantile_text
from kvpolicy.report.parts import header, row, scroll_table

MEANING = (
    "A record is the reward of one evaluation in which an entry's action was drawn. Support is the "
    "records of the action that was chosen. Confidence is how surely its mean reward is above that "
    "of the best other action that was tried; the choice was made on the same records, so it "
    "flatters. Entries without a record take the conservative end of the grid, the largest weight "
    "or the lowest threshold. Thin support is no proof of a bad value, only the lack of one for a "
    "good one."
)
MIX_MEANING = (
    "A record is the reward of one evaluation; each of them drew a share and a mixture for every "
    "head at once. Support is the records that drew a head's best share, the one that would be "
    "chosen if no other head wanted room, and confidence is how surely its mean reward is above "
    "that of the best other share. The compiled share is another number: all heads share one "
    "budget, so it follows what more room is worth to each. A low confidence says that two shares "
    "did about equally well, not that the head does not matter."
)


def support_table(data: RetentionReportInput) -> Element:
    """The head table, then the gate of each budget; of a mix the shares."""
    head = header(
        "table", "entries", "no record", "records: least", "median", "most", "support: median",
        "unsupported", "confidence: median", f"≥ {SURE:.0%}", "< 50%",
    )  # fmt: skip
    if data.mix is not None:
        return scroll_table([head], [row("best shares", *_cells(data.of_heads))], "figures")
    rows = [row("head weights", *_cells(data.of_heads))]
    for index, name in enumerate(data.budgets):
        cells = _cells(lambda kind, i=index: data.of_gate(kind, i).ravel())
        rows.append(row(f"gate, {name}", *cells, cls=f"p{index}"))
    return scroll_table([head], rows, "figures")


def _cells(evidence: Callable[[str], np.ndarray]) -> list[str]:
    records, support, sure, empty = (
        evidence(kind) for kind in ("records", "support", "confidence", "empty")
    )
    return [
        f"{records.size:,}",
        f"{int(empty.sum()):,}",
        *quantile_text(records),
        f"{int(np.median(support)):,}",
        f"{int((support == 0).sum()):,}",
        percent(np.median(sure)),
        f"{int((sure >= SURE).sum()):,}",
        f"{int((sure < 0.5).sum()):,}",
    ]

"""Risk cells: their edges, how many prompts fell in each, and tables over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

import numpy as np

from calib_cluster.report.retention.data import RetentionReportInput
from calib_cluster.report.retention.scale import Scale, short
from kvpolicy.report import words
from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import header, scroll_table

MEANING = (
    "A prompt falls into one cell by two numbers taken at the end of its prefill: the entropy of "
    "its mean attention over the prompt, over ln T (0: all on one token, 1: spread evenly; rows), "
    "and the perplexity of its last tokens (columns). Edges are quantiles over the calibration "
    "prompts, so rows and columns hold about equally many of them, but single cells need not. A "
    "value equal to an edge is in the bin above it."
)


def labels(edges: np.ndarray) -> list[str]:
    """What each bin holds, from the lowest."""
    if not edges.size:
        return ["any"]
    texts = [short(edge) for edge in edges]
    inner = [f"{a} – {b}" for a, b in pairwise(texts)]
    return [f"<\u00a0{texts[0]}", *inner, f"≥\u00a0{texts[-1]}"]


def cell_table(
    data: RetentionReportInput,
    cell: Callable[[int, int], Element],
    title: str,
) -> Element:
    """A row for each entropy bin, a column for each of perplexity; ``cell`` gives a ``td``."""
    entropy, perplexity = (
        labels(edges) for edges in (data.tables.entropy_edges, data.tables.perplexity_edges)
    )
    top = node(
        "tr", [node("th", name, rowspan=2, scope="col") for name in ("bin", "entropy")],
        node("th", f"{title}, by perplexity", colspan=len(perplexity), scope="colgroup"),
    )  # fmt: skip
    names = header(*perplexity)
    rows = [
        node("tr", node("th", str(e + 1), scope="row"), node("td", text, cls="edge"),
             [cell(e, p) for p in range(len(perplexity))])
        for e, text in enumerate(entropy)
    ]  # fmt: skip
    return scroll_table([top, names], rows, "compact heat")


def prompt_table(data: RetentionReportInput) -> list[Element]:
    """Calibration prompts in each cell."""
    counts = data.evidence.cell_prompts
    scale = Scale(0.0, float(max(counts.max(), 1)))

    def cell(e: int, p: int) -> Element:
        count = int(counts[e, p])
        return node("td", f"{count:,}", cls=scale.level(count) if count else "none")

    bare = int((counts == 0).sum())
    text: Child = (
        f"{words.plural(int(counts.sum()), 'prompt')} in {words.plural(counts.size, 'cell')}; "
        + (f"{bare} of them {'holds' if bare == 1 else 'hold'} none (hatched)." if bare else
           "none is empty.")
    )  # fmt: skip
    return [node("p", text), cell_table(data, cell, "calibration prompts")]


def quantile_text(values: Sequence[int] | np.ndarray) -> list[str]:
    """Least, median and greatest, as counts."""
    return [f"{int(f(values)):,}" for f in (np.min, np.median, np.max)]

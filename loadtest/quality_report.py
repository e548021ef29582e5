"""Paired comparisons of the measured contenders, and the tables that show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from kvpolicy.bootstrap import Interval, paired_interval
from loadtest.quality_contenders import Kind
from loadtest.quality_results import Comparison, Result, Row
from loadtest.quality_stats import agreement

ALL = "all"
MEASURES: dict[str, Callable[[Row], list[tuple[str, float]]]] = {
    "nll": lambda row: [(t.corpus, t.nll) for t in row.texts],
    "late": lambda row: [(t.corpus, t.late) for t in row.texts],
    "retrieval": lambda row: [(n.corpus, float(n.found)) for n in row.needles],
}
"""Measure -> (corpus, value) of every prompt of a row."""


def compare(rows: Sequence[Row], resamples: int, seed: int) -> list[Comparison]:
    """Every contender minus ``full``, and every baseline minus its point, overall and by corpus.

    Rows that are not there yet are left out.
    """
    by_name = {row.name: row for row in rows}
    pairs = [(row, by_name.get("full")) for row in rows if row.kind != Kind.FULL]
    pairs += [(row, by_name.get(row.beside)) for row in rows if row.beside]
    found: list[Comparison] = []
    for row, beside in pairs:
        if beside is not None:
            for measure in MEASURES:
                found += _differences(row, beside, measure, resamples, seed)
    return found


def _differences(
    row: Row, beside: Row, measure: str, resamples: int, seed: int
) -> list[Comparison]:
    ours, theirs = MEASURES[measure](row), MEASURES[measure](beside)
    corpora = sorted({corpus for corpus, _ in ours})
    return [
        Comparison(
            row.name, beside.name, measure, corpus,
            paired_interval(_values(ours, corpus), _values(theirs, corpus), resamples, seed),
        )
        for corpus in [ALL, *(corpora if len(corpora) > 1 else ())]
        if ours
    ]  # fmt: skip


def _values(pairs: Sequence[tuple[str, float]], corpus: str) -> list[float]:
    return [value for name, value in pairs if corpus in (ALL, name)]


def find(
    result: Result, name: str, beside: str, measure: str, corpus: str = ALL
) -> Interval | None:
    """The interval of one comparison, or None if it was not made."""
    for it in result.comparisons:
        if (it.name, it.beside, it.measure, it.corpus) == (name, beside, measure, corpus):
            return it.interval
    return None


def mean(row: Row, measure: str, corpus: str = ALL) -> float | None:
    """Mean of a measure over a row's prompts of one corpus; None without any."""
    values = _values(MEASURES[measure](row), corpus)
    return sum(values) / len(values) if values else None


def _signed(interval: Interval | None, digits: int, between: str = "\n") -> str:
    if interval is None:
        return ""
    low, high = (f"{x:+.{digits}f}" for x in (interval.low, interval.high))
    return f"{interval.mean:+.{digits}f}{between}[{low}, {high}]"


def _grid(title: str, *columns: str, lines: bool = False) -> Table:
    grid = Table(title=title, title_justify="left", box=HORIZONTALS, show_lines=lines)
    grid.padding = (0, 1, 0, 0)
    for index, column in enumerate(columns):
        grid.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return grid


def main_table(result: Result) -> Table:
    """What each contender keeps and scores, a row each."""
    title = f"{result.model}, policy {result.policy_id}, context {result.context} tokens"
    grid = _grid(
        title,
        "contender",
        "kept",
        "NLL\n(nats)",
        "NLL,\n2nd half",
        "needles\nfound",
        "same\ntokens",
    )
    full = next((row for row in result.rows if row.kind == Kind.FULL), None)
    for row in result.rows:
        nll, late = (mean(row, measure) for measure in ("nll", "late"))
        grid.add_row(
            row.name,
            f"{row.residency:.1%}",
            "" if nll is None else f"{nll:.4f}",
            "" if late is None else f"{late:.4f}",
            _found(row),
            "" if full is None else _agreement(row, full),
        )
    return grid


def _found(row: Row) -> str:
    if not row.needles:
        return ""
    return f"{sum(n.found for n in row.needles)}/{len(row.needles)}"


def _agreement(row: Row, full: Row) -> str:
    if not row.needles:
        return ""
    ours, theirs = ([n.output_ids for n in it.needles] for it in (row, full))
    return f"{agreement(ours, theirs):.0%}"


def paired_table(result: Result) -> Table:
    """Every contender minus ``full``, then baselines minus the point that keeps as much."""
    columns = ("difference", "NLL", "NLL, 2nd half", "share of needles")
    grid = _grid("Paired differences [95 % bootstrap interval]", *columns, lines=True)
    pairs = dict.fromkeys((it.name, it.beside) for it in result.comparisons)
    for name, beside in pairs:
        found = (find(result, name, beside, measure) for measure in MEASURES)
        nll, late, retrieval = found
        grid.add_row(
            f"{name}\n- {beside}", _signed(nll, 4), _signed(late, 4), _signed(retrieval, 3)
        )
    return grid


def corpus_table(result: Result) -> Table | None:
    """Each corpus on its own; None if there is only one."""
    corpora = sorted({it.corpus for it in result.comparisons} - {ALL})
    if not corpora:
        return None
    grid = _grid("By corpus", "contender", "corpus", "NLL", "NLL - full [95 %]", "found")
    for row in result.rows:
        for corpus in corpora:
            nll = mean(row, "nll", corpus)
            hits = [n.found for n in row.needles if n.corpus == corpus]
            grid.add_row(
                row.name,
                corpus,
                "" if nll is None else f"{nll:.4f}",
                _signed(find(result, row.name, "full", "nll", corpus), 4, " "),
                f"{sum(hits)}/{len(hits)}" if hits else "",
            )
    return grid


def meaning(result: Result) -> list[str]:
    """What the tables can and cannot say."""
    sentences = [
        "Kept: share of the global layers' tokens that the last query of a prompt reads. NLL: "
        "mean negative log-likelihood of a held-out token, windows active while the prompt is "
        "read. Same tokens: share of the needle answers before the first token that differs "
        "from full's. Every contender got the same prompts; intervals resample the prompts."
    ]
    needles = max((len(row.needles) for row in result.rows), default=0)
    if needles:
        sentences.append(
            f"A retrieval interval of no width means that no prompt differed: with {needles} "
            f"prompts a true loss below about {3 / needles:.0%} can stay unseen."
        )
    if not result.complete:
        sentences.append("Not every contender is measured yet: --resume goes on.")
    return sentences


def show(result: Result, files: Sequence[Path], console: Console) -> None:
    """Print the tables, what they mean, and where the raw results are."""
    for table in (main_table(result), paired_table(result), corpus_table(result)):
        if table is not None:
            console.print(table)
            console.print()
    for sentence in meaning(result):
        console.print(sentence)
        console.print()
    console.print(f"Raw results: {', '.join(map(str, files))}", soft_wrap=True)

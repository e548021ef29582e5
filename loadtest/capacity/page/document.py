"""The whole page in reading order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from kvpolicy.render import human_bytes
from kvpolicy.report.markup import node, to_bytes
from kvpolicy.report.parts import document, figure, section
from loadtest.capacity.page import plots, tables
from loadtest.capacity.page.style import stylesheet
from loadtest.capacity.page.tiles import tiles
from loadtest.capacity.quality_file import QualityPoint
from loadtest.capacity.results import REPORT_FILE, BatchResult, ContextResult
from loadtest.capacity.terminal import batch_meaning, context_meaning
from loadtest.result_files import write_bytes


def write_report(
    batch: BatchResult | None,
    context: ContextResult | None,
    quality: Sequence[QualityPoint],
    folder: Path,
) -> Path:
    """Write ``folder/report.html`` by one rename. Raises UserError if it cannot be written."""
    return write_bytes(folder / REPORT_FILE, render(batch, context, quality))


def render(
    batch: BatchResult | None, context: ContextResult | None, quality: Sequence[QualityPoint] = ()
) -> bytes:
    """The page as one HTML file in UTF-8, without script or network. One of the results is given.

    ``quality`` replaces the needle counts in the plot of quality. Raises ValueError without any
    result.
    """
    results = [result for result in (batch, context) if result is not None]
    if not results:
        raise ValueError("nothing to report")
    title = f"{results[0].model}: what the same KV cache holds"
    return to_bytes(
        document(
            title,
            stylesheet(),
            _header(title, results),
            tiles(batch, context),
            _plots(batch, context, quality),
            _batch_section(batch),
            _context_section(context),
            _how(results),
        )
    )


def _header(title: str, results: Sequence[BatchResult | ContextResult]) -> Element:
    sizes = sorted({human_bytes(result.kv_bytes) for result in results})
    servers = {(s.server.role, s.server.what): s.server for r in results for s in r.sides}
    sides = [
        node("li", node("b", server.name, cls="who"), f" {server.what}", cls=f"s-{server.role}")
        for server in servers.values()
    ]
    notes = []
    if not all(result.finished for result in results):
        notes.append("This run is not finished: some servers are missing.")
    if any(result.machine.busy for result in results):
        notes.append("Other work ran on this machine: tokens/s vary with it, CPU per token less.")
    return node(
        "header",
        node("p", f"{' and '.join(sizes)} of KV cache for each server"),
        node("h1", title),
        [node("p", note, cls="note") for note in notes],
        node("ul", sides, cls="sides"),
    )


def _plots(
    batch: BatchResult | None, context: ContextResult | None, quality: Sequence[QualityPoint]
) -> Element:
    made = []
    if batch is not None:
        made.append(_plot(
            "Batch and throughput", plots.throughput(batch),
            f"Prompts of {batch.context:,} tokens, {batch.output} of output. Each line ends at the "
            "most requests that run together.",
        ))  # fmt: skip
    if context is not None:
        made.append(_plot(
            "Context and memory", plots.context_memory(context),
            "KV bytes of one request, by the length of its prompt: dashed as predicted, points as "
            "measured.",
        ))  # fmt: skip
    points = list(quality) or plots.own_points(batch or context)
    if points:
        where = "as measured apart" if quality else "of this run's few questions"
        made.append(_plot(
            "Quality and memory", plots.quality(points),
            f"{points[0].measure[0].upper()}{points[0].measure[1:]}, {where}, by the share of the "
            "dense cache that is kept.",
        ))  # fmt: skip
    return node("div", made, cls="trio")


def _plot(title: str, chart: Element, caption: str) -> Element:
    return node("section", node("h2", title), figure(chart, caption))


def _batch_section(result: BatchResult | None) -> Element | None:
    if result is None:
        return None
    return section(
        "Largest batch",
        f"Cold prompts of {result.context:,} tokens sent at once, {result.output} tokens of output "
        "each, by SGLang's own client.",
        _said(batch_meaning(result)),
        tables.capacity_table(result),
        tables.batch_table(result),
    )


def _context_section(result: ContextResult | None) -> Element | None:
    if result is None:
        return None
    return section(
        "Longest context",
        f"One prompt at a time with {result.output} tokens of output, up to {result.up_to:,} "
        f"tokens in steps of {result.step}. A length is understood if the needle is found at most "
        f"of {len(result.depths)} depths.",
        _said(context_meaning(result)),
        tables.context_table(result),
        tables.attempts(result),
    )


def _said(sentences: Sequence[str]) -> Element:
    return node("ul", [node("li", sentence) for sentence in sentences], cls="said")


def _how(results: Sequence[BatchResult | ContextResult]) -> Element:
    parts = [tables.provenance(result) for result in results]
    return section("How it was measured", "One server after the other, on one machine.", parts)

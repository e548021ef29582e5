"""The page's tables: every figure behind the tiles and plots."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from kvpolicy.report.markup import Child, node
from kvpolicy.report.parts import definitions, header, row, scroll_table
from loadtest.capacity.results import BatchResult, BatchSide, ContextResult, Server
from loadtest.capacity.terminal import NOTHING, found, memory


def batch_table(result: BatchResult) -> Element:
    """A row a timed run: every batch of every server."""
    head = header(
        "server", "batch", "ran at once", "output tokens/s", "all tokens/s",
        "first token, median and p99", "between tokens, median and p99", "CPU per token",
        "KV held", "memory", "cached", "retracted",
    )  # fmt: skip
    rows = [_run(side, number) for side in result.sides for number in range(len(side.runs))]
    return scroll_table([head], rows, "figures compact")


def _run(side: BatchSide, number: int) -> Element:
    run = side.runs[number]
    cpu = run.cpu_ms_per_output_token
    return row(
        _who(side.server) if not number else "",
        f"{run.batch}" + (" (largest)" if run.batch == side.largest else ""),
        run.peak_running,
        f"{run.output_tokens_per_second:.2f}",
        f"{run.total_tokens_per_second:.1f}",
        f"{run.ttft_median_ms / 1000:.2f}, {run.ttft_p99_ms / 1000:.2f} s",
        f"{run.tpot_median_ms:.0f}, {run.tpot_p99_ms:.0f} ms",
        NOTHING if cpu is None else f"{cpu:.0f} ms",
        memory(run.kv_bytes),
        memory(run.memory_bytes),
        run.cached_tokens,
        NOTHING if run.retractions is None else run.retractions,
    )


def capacity_table(result: BatchResult) -> Element:
    """A row a server: predicted beside measured."""
    head = header(
        "server", "together", "predicted", "KV of each, predicted", "KV held at most",
        "needles found",
    )  # fmt: skip
    rows = [
        row(_who(side.server), side.largest, side.predicted, memory(side.request_bytes),
            memory(side.kv_bytes), found(side.needles))
        for side in result.sides
    ]  # fmt: skip
    return scroll_table([head], rows, "figures compact")


def context_table(result: ContextResult) -> Element:
    """A row a server: the longest prompts, predicted beside measured."""
    head = header(
        "server", "longest prompt", "predicted", "understood to", "KV at the longest", "predicted",
        "memory", "first token", f"needles at {result.context:,}",
    )  # fmt: skip
    rows = [
        row(_who(side.server), f"{side.longest:,}", f"{side.predicted:,}", f"{side.answered:,}",
            memory(side.kv_bytes), memory(side.predicted_kv_bytes), memory(side.memory_bytes),
            NOTHING if side.prefill_seconds is None else f"{side.prefill_seconds:.1f} s",
            found(side.needles))
        for side in result.sides
    ]  # fmt: skip
    return scroll_table([head], rows, "figures compact")


def attempts(result: ContextResult) -> Element:
    """Every prompt that was tried, folded away."""
    rows = [
        row(_who(side.server), f"{tried.length:,}", tried.outcome,
            NOTHING if tried.prefill_seconds is None else f"{tried.prefill_seconds:.1f} s",
            memory(tried.kv_bytes), {None: NOTHING, True: "yes", False: "no"}[tried.found])
        for side in result.sides
        for tried in side.attempts
    ]  # fmt: skip
    head = header("server", "prompt", "outcome", "first token", "KV held", "needle found")
    return node(
        "details", node("summary", f"all {len(rows)} prompts that were tried"),
        scroll_table([head], rows, "figures compact"),
    )  # fmt: skip


def provenance(result: BatchResult | ContextResult) -> list[Child]:
    """The command, the servers, the machine, the versions."""
    machine = result.machine
    loads = ", ".join(f"{load:.1f}" for load in machine.loads)
    busy = "; other work ran: read CPU time and ratios, not seconds" if machine.busy else ""
    facts: list[tuple[str, Child]] = [
        ("machine", f"{machine.name}, {machine.cores} cores"),
        ("load averages", loads + busy),
        ("seed", result.seed),
        ("versions", ", ".join(f"{k} {v}" for k, v in sorted(machine.versions.items()))),
        *((side.server.name, _flags(side.server)) for side in result.sides),
    ]
    return [node("pre", node("code", " ".join(result.command))), definitions(facts)]


def _flags(server: Server) -> list[Child]:
    how = server.url or " ".join(server.flags)
    return [f"{server.what} ", node("code", how)]


def _who(server: Server) -> Element:
    return node("span", server.name, cls=f"who s-{server.role}")

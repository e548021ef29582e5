"""The table printed when a server starts: what is served and what it should hold."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from engine_patches.serving import PAGE_SIZE, Serving
from engine_patches.sizing import dense_tokens
from kvpolicy.render_retention import transfer_text
from kvpolicy.residency import ceil_div, frozen_pages, peak_bytes
from kvpolicy.retention import retention_units
from kvpolicy.windows import FULL, WindowPolicy

MIB = 1 << 20


def startup_table(served: Serving, logical_tokens: int) -> str:
    """Predicted bytes per request and concurrency, a dense cache beside the policy.

    Args:
        served: with its arena sized.
        logical_tokens: SGLang's token capacity.

    Returns:
        Lines for the log. The predictions are ``kvpolicy``'s formulas for requests of that many
        tokens in all; the dense cache is stock SGLang's with the same bytes.
    """
    contexts = _contexts(served.geometry.max_context)
    table = Table(title=_title(served), title_justify="left")
    table.add_column("tokens a request", justify="right")
    names = ["dense MiB", "policy MiB", "dense requests", "policy requests"]
    if served.states is not None:
        names.insert(2, "state MiB")
    budget = served.request.budget
    if budget is not None:
        names += ["frozen MiB", "frozen requests"]
    for name in names:
        table.add_column(name, justify="right")
    dense = WindowPolicy.full(served.geometry).levels()
    for context in contexts:
        was = peak_bytes(dense, served.geometry, context, PAGE_SIZE)
        now = peak_bytes(served.levels, served.geometry, context, PAGE_SIZE)
        cells = [f"{was / MIB:.1f}", f"{now / MIB:.1f}"]
        if served.states is not None:
            cells.append(f"{served.states.request_bytes / MIB:.1f}")
        cells += [_requests(served, was), _requests(served, now)]
        if budget is not None:
            kept = min(now, _frozen_bytes(served, context) or now)
            cells += [f"{kept / MIB:.1f}", _requests(served, kept)]
        table.add_row(str(context), *cells)
    lines = [
        _render(table),
        _point_line(served),
        _levels_line(served),
        *_freeze_lines(served),
        *_state_lines(served),
        _capacity_line(served, logical_tokens),
    ]
    return "\n".join(lines)


def _requests(served: Serving, request_bytes: int) -> str:
    """How many requests of so many bytes of K and V run at once."""
    count = (served.arena_bytes or 0) // request_bytes
    return str(count if served.states is None else min(count, served.states.max_requests))


def _state_lines(served: Serving) -> list[str]:
    """What recurrent layers take beside the arena, where the model has any."""
    states = served.states
    if states is None:
        return []
    layers = len(served.geometry.recurrent_layers)
    return [
        f"recurrent state: {states.slot_bytes / MIB:.2f} MiB for {layers} layers at any length; "
        f"{states.slots} states ({states.slots * states.slot_bytes / MIB:.1f} MiB, beside the "
        f"arena), {states.per_request} for a running request, so {states.max_requests} at once"
    ]


def _title(served: Serving) -> str:
    point = f", point {served.resolved.point}" if served.resolved.point else ""
    return f"RaggedKV serves policy {served.policy_id}{point}"


def _point_line(served: Serving) -> str:
    """Which matrix is served, what it keeps, and what chose it."""
    tau = "" if served.tau is None else f"tau {served.tau:g}, "
    name = "" if served.resolved.point is None else f"point {served.resolved.point}: "
    budget = served.request.residency_budget
    chosen = "" if budget is None else f", chosen by --kv-residency {budget:g}"
    share = (
        f"residency {served.residency:.2%} of global layers at {served.residency_context} tokens"
    )
    return f"{name}{tau}{share}{chosen}"


def _frozen_bytes(served: Serving, prompt: int) -> int | None:
    """Bytes a request holds right after its prompt was frozen; None if it is not."""
    kept = served.kept_tokens(prompt)
    if kept is None:
        return None
    page = served.geometry.bytes_per_token() * PAGE_SIZE // served.geometry.num_units
    return frozen_pages(served.levels, prompt, 0, kept, PAGE_SIZE) * page


def _freeze_lines(served: Serving) -> list[str]:
    """What happens at the end of prefill, where the policy can freeze."""
    if served.retention is None:
        return []
    rule, budget = served.retention.rule, served.request.budget
    _, layers, _ = retention_units(served.policy)
    kept = "only where a request asks for it" if budget is None else f"to {budget}"
    lines = [
        f"freeze: rule {rule.name}, {len(layers)} heads of {len(set(layers))} layers, {kept}; "
        "the frozen columns hold after prefill, which needs the policy's"
    ]
    if rule.mixes:
        lines.append(_shares_line(served))
    origin = transfer_text(served.resolved.artifact)
    return [*lines, f"tables {origin}"] if origin else lines


def _shares_line(served: Serving) -> str:
    """How unevenly a rule that mixes splits a budget among the heads."""
    tables, budget = served.retention, served.request.budget
    _, layers, heads = retention_units(served.policy)
    shares = tables.mix.shares[:, layers, heads]
    if budget is not None:
        shares = shares[[tables.budget_index(budget.of(served.geometry.max_context))]]
    ratios = shares / shares.mean(axis=1, keepdims=True)
    return f"mix: heads keep {ratios.min():.2g}x to {ratios.max():.2g}x of the budget"


def _contexts(longest: int) -> list[int]:
    wanted = [1024, 2048, 4096, 8192, 32768, 131072]
    return [c for c in wanted if c < longest] + [longest]


def _levels_line(served: Serving) -> str:
    parts = []
    for level in served.levels:
        window = "full" if level.window == FULL else f"window {level.window}"
        sinks = f" + {level.sinks} sinks" if level.sinks else ""
        parts.append(f"{len(level.units)} heads {window}{sinks}")
    return "levels: " + ", ".join(parts)


def _capacity_line(served: Serving, logical_tokens: int) -> str:
    dense = dense_tokens(served, PAGE_SIZE)
    table = served.geometry.num_units * ceil_div(logical_tokens, PAGE_SIZE) * 4
    return (
        f"arena {(served.arena_bytes or 0) / MIB:.1f} MiB: {dense} tokens if dense, "
        f"{logical_tokens} logical tokens offered; page table {table / MIB:.1f} MiB; "
        f"kernel {served.kernel}"
    )


def _render(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return out.getvalue().rstrip()

"""Evidence that a policy is being served, in the units a user can check."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine_patches.freezing import compact_held
from engine_patches.serving import Serving
from kvpolicy.windows import FULL


def proof(served: Serving) -> dict[str, Any]:
    """State of the served policy as plain JSON values; bytes are of K and V."""
    pool, allocator = served.pool, served.allocator
    if pool is None or allocator is None:
        return {**chosen(served), "running": False}
    ledger = allocator.ledger
    page = pool.layout.page_elements * pool.arena.element_size()
    held = ledger.held_by_level()
    return {
        **chosen(served),
        "running": True,
        "units": served.geometry.num_units,
        "page_size": pool.page_size,
        "page_bytes": page,
        "arena_bytes": pool.arena.numel() * pool.arena.element_size(),
        "pages": {
            "capacity": ledger.capacity,
            "free": ledger.free,
            "pinned": ledger.pinned,
            "cached": ledger.used - ledger.pinned - ledger.parked,
            "peak_pinned": ledger.peak_pinned,
            "peak_used": ledger.peak_used,
            "evicted": ledger.evicted_pages,
        },
        "levels": [
            {
                "window": "full" if level.window == FULL else level.window,
                "sinks": level.sinks,
                "units": len(level.units),
                "pages": held[level.index],
            }
            for level in served.levels
        ],
        "recurrent": None if served.states is None else asdict(served.states),
        "requests": len(allocator.residents.running),
        "frozen": frozen(served),
        "bytes_saved": saved_bytes(served),
        "counters": {
            name: getattr(allocator.counters, name) for name in allocator.counters.__struct_fields__
        },
    }


def chosen(served: Serving) -> dict[str, Any]:
    """Which windows are served and why.

    ``residency`` is the exact share of the global layers' dense cache at ``residency_context``
    tokens; ``budget`` is what ``--kv-residency`` allowed, None if no budget chose the point.
    ``retention`` names the rule that freezes prompts, None if the policy has none;
    ``prompt_budget`` what a request keeps unless it says otherwise, None for everything;
    ``kernel`` what attends.
    """
    rule = None if served.retention is None else served.retention.rule.name
    budget = served.request.budget
    return {
        "policy": served.policy_id,
        "point": served.resolved.point,
        "tau": served.tau,
        "residency": served.residency,
        "residency_context": served.residency_context,
        "budget": served.request.residency_budget,
        "retention": rule,
        "prompt_budget": None if budget is None else str(budget),
        "kernel": served.kernel,
    }


def frozen(served: Serving) -> dict[str, int]:
    """Running requests that are frozen: how many, their prompt tokens, their compact pages."""
    freezes = [r.freeze for r in served.allocator.residents.running if r.freeze and r.freeze.done]
    return {
        "requests": len(freezes),
        "prompt_tokens": sum(freeze.prompt for freeze in freezes),
        "compact_pages": sum(compact_held(freeze) for freeze in freezes),
    }


def saved_bytes(served: Serving) -> int:
    """Bytes that a dense cache would hold for the running requests, less what they pin."""
    pool, allocator = served.pool, served.allocator
    page = pool.layout.page_elements * pool.arena.element_size()
    dense = {page_id for resident in allocator.residents.running for page_id in resident.pages}
    return (len(dense) * served.geometry.num_units - allocator.ledger.pinned) * page

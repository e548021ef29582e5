"""From bytes to tokens: how many logical tokens an arena of given bytes is offered as."""

from __future__ import annotations

from engine_patches.serving import Serving
from kvpolicy.residency import frozen_pages, peak_length, request_pages

MAX_OVERSUBSCRIPTION = 16
"""Logical tokens per token that a dense cache of the same bytes would hold, at most."""

HEADROOM = 2
"""Logical tokens beyond what running requests can fill, for prefixes cached without full pages."""

TABLE_ENTRY_BYTES = 4


def dense_tokens(served: Serving, page_size: int) -> int:
    """Tokens a dense cache of the arena's bytes would hold."""
    return (served.arena_bytes or 0) // _page_bytes(served, page_size) * page_size


def logical_tokens(served: Serving, page_size: int) -> int:
    """Logical tokens to offer for the arena: what its pages can serve at the model's full context.

    Returns:
        a multiple of ``page_size``, between the dense capacity and 16 times it.
    """
    dense = dense_tokens(served, page_size)
    context = served.geometry.max_context
    per_request = request_pages(served.levels, peak_length(context, page_size), page_size)
    kept = served.kept_tokens(context)
    if kept is not None:
        per_request = min(per_request, frozen_pages(served.levels, context, 0, kept, page_size))
    capacity = dense // page_size * served.geometry.num_units
    fillable = capacity * context // max(1, per_request)
    tokens = max(dense, min(HEADROOM * fillable, MAX_OVERSUBSCRIPTION * dense))
    return tokens // page_size * page_size


def arena_within(budget_bytes: int, served: Serving, page_size: int) -> int:
    """Arena bytes that leave room for the page table within a device budget."""
    units = served.geometry.num_units
    dense_page = _page_bytes(served, page_size)
    table = MAX_OVERSUBSCRIPTION * units * TABLE_ENTRY_BYTES
    return budget_bytes * dense_page // (dense_page + table)


def _page_bytes(served: Serving, page_size: int) -> int:
    return served.geometry.bytes_per_token() * page_size

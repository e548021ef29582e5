"""How many pages, bytes and tokens a policy holds: integer formulas, no arrays.

Held pages of one unit at length s (design section 3), with P tokens a page, window w, and
w' = w + slack * P::

    ceil(s / P) - first + min(ceil(sinks / P), first),   first = floor(max(0, s - w') / P)

``first`` is the first page of the window; the sink pages below it are kept as well, and those the
window still reaches are not counted twice. FULL units hold ceil(s / P).

Two facts make peaks O(1). A unit's held pages never fall when s grows by P, since ``first`` grows
by at most one page; and between two lengths where ceil(s / P) steps they never rise. So the
largest value over 1..S is at the last s <= S with s = 1 (mod P), for every level at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd

from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerKind, ModelGeometry
from kvpolicy.windows import FULL, Level, WindowPolicy

DEFAULT_PAGE_SIZE = 16
DEFAULT_SLACK_PAGES = 1


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b) for a >= 0, b > 0."""
    return -(-a // b)


def first_window_page(level: Level, length: int, page_size: int, slack_pages: int = 1) -> int:
    """First logical page of a unit's window at ``length`` tokens; 0 for FULL levels."""
    if level.window == FULL:
        return 0
    return max(0, length - level.window - slack_pages * page_size) // page_size


def held_pages(
    level: Level,
    length: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> int:
    """Pages one unit of ``level`` holds for a request of ``length`` tokens.

    Raises:
        PolicyError: negative length or slack, or a page size below 1.
    """
    if length < 0 or page_size < 1 or slack_pages < 0:
        raise PolicyError(
            f"need length >= 0, page_size >= 1, slack_pages >= 0; found {length}, {page_size}, "
            f"{slack_pages}"
        )
    first = first_window_page(level, length, page_size, slack_pages)
    return ceil_div(length, page_size) - first + min(ceil_div(level.sinks, page_size), first)


def request_pages(
    levels: Iterable[Level],
    length: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> int:
    """Pages all units hold for one request of ``length`` tokens."""
    return sum(len(k.units) * held_pages(k, length, page_size, slack_pages) for k in levels)


def request_bytes(
    levels: Iterable[Level],
    geometry: ModelGeometry,
    length: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> int:
    """Bytes of K and V held for one request of ``length`` tokens, whole pages."""
    return sum(
        held_pages(k, length, page_size, slack_pages) * page_size * level_token_bytes(k, geometry)
        for k in levels
    )


def level_token_bytes(level: Level, geometry: ModelGeometry) -> int:
    """Bytes one token takes over all units of ``level``."""
    return sum(geometry.bytes_per_token_of_unit(unit) for unit in level.units)


def peak_length(final_length: int, page_size: int = DEFAULT_PAGE_SIZE) -> int:
    """The length in 1..final_length at which any policy holds the most pages (0 if none)."""
    return (final_length - 1) // page_size * page_size + 1 if final_length > 0 else 0


def peak_pages(
    levels: Sequence[Level],
    prompt: int,
    max_new: int = 0,
    page_size: int = DEFAULT_PAGE_SIZE,
    chunk: int | None = None,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> int:
    """Most pages one request holds while its length goes up to prompt + max_new.

    Args:
        levels: levels of one policy.
        prompt: prompt tokens, > 0.
        max_new: tokens appended after the prompt, >= 0. A request that samples n tokens stores
            n - 1 of them, so passing n is an upper bound.
        page_size: tokens a page.
        chunk: None gives the maximum over every length 1..prompt + max_new, which holds for any
            chunking, prefix hit or retraction (what admission reserves). A number gives the exact
            maximum of a cold run that visits chunk, 2 * chunk, ..., prompt, then every length.
        slack_pages: extra pages kept before the window.

    Raises:
        PolicyError: an argument out of range.
    """
    if prompt < 1 or max_new < 0 or (chunk is not None and chunk < 1):
        raise PolicyError(
            f"need prompt >= 1, max_new >= 0, chunk >= 1; found {prompt}, {max_new}, {chunk}"
        )

    def pages(length: int) -> int:
        return request_pages(levels, length, page_size, slack_pages)

    if chunk is None:
        return pages(peak_length(prompt + max_new, page_size))
    return _peak_of_cold_run(pages, prompt, max_new, page_size, chunk)


def _peak_of_cold_run(
    pages: Callable[[int], int], prompt: int, max_new: int, page_size: int, chunk: int
) -> int:
    # held pages never fall over a step of P, so the last P / gcd chunk ends dominate; while
    # decoding, nothing before the first page border after the prompt exceeds the prompt's end
    visited = {prompt}
    last = prompt // chunk
    span = page_size // gcd(page_size, chunk)
    visited.update(k * chunk for k in range(max(1, last - span + 1), last + 1))
    top = peak_length(prompt + max_new, page_size)
    visited.add(max(prompt, top))
    return max(pages(length) for length in visited)


def frozen_pages(
    levels: Iterable[Level],
    prompt: int,
    new: int,
    budget: int | Sequence[int],
    page_size: int = DEFAULT_PAGE_SIZE,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> int:
    """Pages all units hold for a request whose prompt was frozen, ``new`` tokens later.

    A unit without a window holds the pages of its kept tokens and those from the prompt's end on; a
    windowed one holds what it always does. ``budget``: kept tokens of every unit without a window,
    or of each of them.

    Raises:
        PolicyError: not one budget for each unit without a window.
    """
    levels = tuple(levels)
    length = prompt + new
    tail = ceil_div(length, page_size) - prompt // page_size
    full = sum(len(level.units) for level in levels if level.is_full)
    kept = [budget] * full if isinstance(budget, int) else budget
    if len(kept) != full:
        raise PolicyError(f"{full} units without a window, found {len(kept)} budgets")
    windowed = (level for level in levels if not level.is_full)
    total = request_pages(windowed, length, page_size, slack_pages) + full * tail
    return total + sum(ceil_div(int(tokens), page_size) for tokens in kept)


def peak_bytes(
    levels: Iterable[Level],
    geometry: ModelGeometry,
    final_length: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> int:
    """Most bytes of K and V one request holds while its length goes up to ``final_length``."""
    length = peak_length(final_length, page_size)
    return request_bytes(levels, geometry, length, page_size, slack_pages)


def retained_tokens(level: Level, context: int) -> int:
    """Keys the last query of a ``context``-token request reads in one unit of ``level``."""
    if context <= level.window:
        return context
    return level.window + min(level.sinks, context - level.window)


def residency(policy: WindowPolicy, geometry: ModelGeometry, context: int) -> float:
    """Share of the GLOBAL units' tokens that the policy keeps at ``context``, exactly.

    Native layers are outside the ratio (they are never calibrated). 1.0 if there is no global
    unit. Raises PolicyError if ``context`` is below 1.
    """
    return _global_share(policy, geometry, context, lambda k: retained_tokens(k, context), context)


def page_residency(
    policy: WindowPolicy,
    geometry: ModelGeometry,
    context: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    slack_pages: int = DEFAULT_SLACK_PAGES,
) -> float:
    """Like ``residency`` but in whole pages held, slack included, over a dense cache's pages."""
    dense = ceil_div(context, page_size)
    return _global_share(
        policy, geometry, context, lambda k: held_pages(k, context, page_size, slack_pages), dense
    )


def _global_share(
    policy: WindowPolicy,
    geometry: ModelGeometry,
    context: int,
    kept: Callable[[Level], int],
    dense: int,
) -> float:
    if context < 1:
        raise PolicyError(f"context must be at least 1 token, found {context}")
    is_global = [
        geometry.layer_of_unit(u).kind is LayerKind.GLOBAL for u in range(geometry.num_units)
    ]
    total = sum(is_global)
    if not total:
        return 1.0
    held = sum(kept(k) * sum(is_global[u] for u in k.units) for k in policy.levels())
    return held / (total * dense)

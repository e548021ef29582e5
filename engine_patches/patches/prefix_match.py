"""Shortens a prefix hit to where every level still holds its window."""

from dataclasses import replace

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch
from engine_patches.prefix import longest_valid_hit


def match_prefix(original, self, params):
    result = original(self, params)
    served = serving.current()
    if served is None or served.allocator is None or not result.device_prefix_len:
        return result
    allocator = served.allocator
    length = result.device_prefix_len

    def slots():
        root = self.root_node_handle(params.key.extra_key)
        path = self.tree_core.collect_full_device_indices(result.last_device_node, root)
        return path[:length]

    pages = allocator.tree_pages(params.key, params.key.token_ids[:length], slots)
    found = len(pages)
    pages = pages[: allocator.hit_limit(params.req)]
    valid = longest_valid_hit(allocator.ledger, pages, allocator.page_size)
    allocator.note_hit(params.req, len(pages), valid)
    if valid == found:
        return result
    return original(self, replace(params, key=_cut(params.key, valid * allocator.page_size)))


def _cut(key, limit: int):
    return type(key)(
        key.token_ids,
        key.extra_key,
        is_bigram=key.is_bigram,
        limit=limit,
        cache_salt=key.cache_salt,
    )


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix",
        parameters=("self", "params"),
        hook=match_prefix,
        kind=HookType.AROUND,
        why="the tree knows which tokens it has seen, not which pages are still resident",
        how="asks the ledger for the longest valid prefix and matches again with that limit",
        until="the tree asks the allocator to validate a match",
    ),
)

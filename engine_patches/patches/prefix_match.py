"""Shortens a prefix hit to where every level still holds its window."""

from dataclasses import replace

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch
from engine_patches.prefix import longest_valid_hit


def match_prefix(original, self, params):
    served = serving.current()
    if served is None or served.allocator is None:
        return original(self, params)
    allocator = served.allocator
    key = _cut(params.key, allocator.hit_limit(params.req))
    # a longer match that turns out unusable must not leave its recurrent state with the request
    probe = replace(params, key=key, cow_mamba=False)
    first = result = original(self, probe)
    while result.device_prefix_len:
        valid = _valid_tokens(self, allocator, key, result)
        if valid == result.device_prefix_len:
            break
        key = _cut(key, valid)
        result = original(self, replace(probe, key=key))
    allocator.note_hit(params.req, first, result.device_prefix_len)
    if params.cow_mamba and result.device_prefix_len:
        result = original(self, replace(params, key=key))
    if result.device_prefix_len < first.device_prefix_len:
        result = result._replace(mamba_branching_seqlen=first.mamba_branching_seqlen)
    return result


def _valid_tokens(tree, allocator, key, result) -> int:
    """Tokens of the match whose pages, on every level, are still there."""
    length = result.device_prefix_len

    def slots():
        root = tree.root_node_handle(key.extra_key)
        return tree.tree_core.collect_full_device_indices(result.last_device_node, root)[:length]

    pages = allocator.tree_pages(key, key.token_ids[:length], slots)
    return longest_valid_hit(allocator.ledger, pages, allocator.page_size) * allocator.page_size


def _cut(key, limit: int | None):
    if limit is None or limit >= len(key):
        return key
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
        how="asks the ledger for the longest valid prefix and matches again with that limit, until "
        "what is found (with recurrent layers: where a state was kept) is valid",
        until="the tree asks the allocator to validate a match",
    ),
)

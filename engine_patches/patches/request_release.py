"""Lets go of a request's pages when it finishes, aborts or is retracted."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def release_kv_cache(original, req, tree_cache, *, checkpoint):
    served = serving.current()
    if served is None or getattr(req, "raggedkv", None) is None:
        return original(req, tree_cache, checkpoint=checkpoint)
    allocator = served.allocator
    with allocator.ending(req):
        result = original(req, tree_cache, checkpoint=checkpoint)
    allocator.metrics.publish(idle=not allocator.residents.running)
    return result


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.common.release_kv_cache",
        parameters=("req", "tree_cache", "checkpoint"),
        hook=release_kv_cache,
        kind=HookType.AROUND,
        why="the allocator sees slots come back, not that a request has ended",
        how="drops the request's holds after its slots went to the tree or the free list",
        until="the allocator is told when a request releases its row",
    ),
)

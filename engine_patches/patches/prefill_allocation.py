"""Physical pages of a prefill batch."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def alloc_for_extend(original, batch):
    result = original(batch)
    served = serving.current()
    if served is not None:
        batch.raggedkv_plan = served.allocator.extend_batch(batch)
    return result


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.allocation.alloc_for_extend",
        parameters=("batch",),
        hook=alloc_for_extend,
        kind=HookType.AROUND,
        why="the allocator is told lengths, not whose they are",
        how="after the logical allocation, slides the windows and snapshots what the forward reads",
        until="alloc_extend() receives the requests",
    ),
)

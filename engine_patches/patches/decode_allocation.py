"""Physical pages of a decode step."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def alloc_for_decode(original, batch, token_per_req):
    locations = original(batch, token_per_req)
    served = serving.current()
    if served is not None:
        batch.raggedkv_plan = served.allocator.decode_batch(batch)
    return locations


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.allocation.alloc_for_decode",
        parameters=("batch", "token_per_req"),
        hook=alloc_for_decode,
        kind=HookType.AROUND,
        why="the allocator is told lengths, not whose they are",
        how="after the logical allocation, slides the windows by one token",
        until="alloc_decode() receives the requests",
    ),
)

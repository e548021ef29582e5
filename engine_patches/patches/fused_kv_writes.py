"""Keeps every K and V write on the attention backend."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def enable_fused_set_kv_buffer(original, forward_batch):
    return False if serving.current() is not None else original(forward_batch)


PATCHES = (
    Patch(
        target="sglang.srt.models.utils.enable_fused_set_kv_buffer",
        parameters=("forward_batch",),
        hook=enable_fused_set_kv_buffer,
        kind=HookType.AROUND,
        why="on CUDA a fused rope kernel writes K and V past the pool's interface",
        how="answers no while a policy is served",
        until="the pool can decline fused writes",
    ),
)

"""Lets SGLang build our pool and allocator on every platform."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.errors import exit_refused
from engine_patches.patches.patch import Patch


def get_kv_pool_cls(original, self, *, kind):
    served = serving.current()
    return served.pool_class() if served and kind == "mha" else original(self, kind=kind)


def get_paged_allocator_cls(original, self):
    from engine_patches import register
    from engine_patches.errors import Refusal

    served = serving.current()
    if served is None:
        return original(self)
    try:
        register.check_installed()
    except Refusal as refusal:
        exit_refused(refusal)
    return served.allocator_class()


_UNTIL = "a general plugin, not only a platform, can name the pool and allocator classes"

PATCHES = (
    Patch(
        target="sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls",
        parameters=("self", "kind"),
        hook=get_kv_pool_cls,
        kind=HookType.AROUND,
        why="only the active platform may replace the pool class, and on a GPU that is not ours",
        how="answers with RaggedKVPool for plain multi-head attention while a policy is served",
        until=_UNTIL,
    ),
    Patch(
        target="sglang.srt.platforms.interface.SRTPlatform.get_paged_allocator_cls",
        parameters=("self",),
        hook=get_paged_allocator_cls,
        kind=HookType.AROUND,
        why="only the active platform may replace the paged allocator",
        how="answers with RaggedAllocator while a policy is served, once every patch is in place",
        until=_UNTIL,
    ),
)

"""Admission by pages."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def get_prefill_adder_class(original, self):
    if serving.current() is None:
        return original(self)
    from engine_patches.admission import RaggedPrefillAdder

    return RaggedPrefillAdder


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
        parameters=("self",),
        hook=get_prefill_adder_class,
        kind=HookType.AROUND,
        why="the allocator's public capacity methods do not see the request they decide about",
        how="answers with RaggedPrefillAdder, which adds a budget in pages",
        until="create_prefill_budget() and its methods receive the request",
    ),
)

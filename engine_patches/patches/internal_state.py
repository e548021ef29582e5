"""Puts the proof that a policy is running into ``/server_info``."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def get_internal_state(result, self, recv_req):
    served = serving.current()
    if served is not None:
        from engine_patches.proof import proof

        result.internal_state["raggedkv"] = proof(served)
    return result


PATCHES = (
    Patch(
        target=(
            "sglang.srt.managers.scheduler_components.internal_state."
            "SchedulerInternalStateController.get_internal_state"
        ),
        parameters=("self", "recv_req"),
        hook=get_internal_state,
        kind=HookType.AFTER,
        why="the scheduler's state has no place for a plugin's",
        how="adds one key, raggedkv",
        until="plugins can contribute to the internal state",
    ),
)

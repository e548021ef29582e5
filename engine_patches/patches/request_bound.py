"""Bounds a new request by the pages it needs, which depend on whether its prompt will be frozen."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def init_req_max_new_tokens(original, self, req):
    served = serving.current()
    if served is None:
        return original(self, req)
    from engine_patches.budget import BudgetError

    try:
        served.wish(req.sampling_params.custom_params)
    except BudgetError as error:  # tokenizer workers of their own check nothing
        req.set_finish_with_abort(str(error))
    with served.allocator.considering(req):
        return original(self, req)


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        parameters=("self", "req"),
        hook=init_req_max_new_tokens,
        kind=HookType.AROUND,
        why="the allocator's memory bound is asked with lengths only",
        how="tells the allocator which request is meant, and refuses a malformed budget",
        until="max_new_tokens_for_memory() receives the request",
    ),
)

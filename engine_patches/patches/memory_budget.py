"""Sizes the cache from bytes: SGLang derives tokens from a per-token cost that no longer exists."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.errors import Refusal, exit_refused
from engine_patches.patches.patch import Patch
from engine_patches.recurrent import state_slots
from engine_patches.refusals import check_arena, check_configurator
from engine_patches.sizing import arena_within, logical_tokens


def config_from_budget(original, self, budget_bytes, *, cap_tokens=None):
    served = serving.current()
    if served is None:
        return original(self, budget_bytes, cap_tokens=cap_tokens)
    try:
        return _config(self, served, budget_bytes, cap_tokens)
    except Refusal as refusal:
        exit_refused(refusal)


def _config(configurator, served, budget_bytes, cap_tokens):
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import get_schedule

    check_configurator(configurator, served.geometry)
    served.use_kv_dtype(configurator.kv_cache_dtype.itemsize)
    served.states = state_slots(configurator)
    room = arena_within(budget_bytes, served, serving.PAGE_SIZE)
    asked = served.request.arena_bytes
    if asked is not None and asked > room:
        raise Refusal(
            f"--kv-arena-bytes {asked} does not fit: SGLang's memory budget leaves {room} bytes; "
            "lower it or raise --mem-fraction-static"
        )
    served.arena_bytes = room if asked is None else asked
    check_arena(served)
    tokens = logical_tokens(served, serving.PAGE_SIZE)
    for cap in (cap_tokens, get_schedule().max_total_tokens):
        tokens = tokens if cap is None else min(tokens, cap)
    pools = create_memory_pool_configurator(configurator)
    return pools.calculate_pool_sizes_from_max_tokens(tokens, get_schedule().page_size)


PATCHES = (
    Patch(
        target=(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget"
        ),
        parameters=("self", "budget_bytes", "cap_tokens"),
        hook=config_from_budget,
        kind=HookType.AROUND,
        why="token capacity is computed from dense bytes per token",
        how="fixes the arena's bytes and offers as many logical tokens as its pages can serve",
        until="the pool class may compute its own token capacity",
    ),
)

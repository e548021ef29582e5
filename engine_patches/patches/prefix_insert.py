"""Keeps physical pages with the tokens when the tree swaps a request's slots for its own."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def checkpoint_into_tree(original, self, req, *, up_to, **kwargs):
    served = serving.current()
    if served is None or self.disable or getattr(req, "raggedkv", None) is None:
        return original(self, req, up_to=up_to, **kwargs)
    if req.raggedkv.freeze is not None:
        # what follows a freeze was computed without the whole prompt: not for others to reuse
        up_to = min(up_to, req.raggedkv.freeze.prompt)
        _forget_later_state(req, up_to)
    with served.allocator.residents.drops_deferred():
        result = original(self, req, up_to=up_to, **kwargs)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        served.allocator.follow_tree(req, row[: req.kv.cache_protected_len])
    return result


def _forget_later_state(req, up_to: int) -> None:
    """Keep SGLang from filing a recurrent state of more than ``up_to`` tokens under fewer.

    Of a running request it donates the newest one, taken to be within what is inserted; once it
    has ended SGLang looks for one that is.
    """
    if not req.finished() and (getattr(req.kv, "mamba_last_track_seqlen", None) or 0) > up_to:
        req.kv.mamba_last_track_seqlen = None


PATCHES = (
    Patch(
        target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
        parameters=("self", "req", "up_to", "kwargs"),
        hook=checkpoint_into_tree,
        kind=HookType.AROUND,
        why="an insert may find the same tokens under other slots and free the request's",
        how="delays the frees, moves the mappings to the tree's slots, then frees; of a frozen "
        "request only the prompt goes in",
        until="the tree reports which slots an insert replaced",
    ),
)

"""Checks a request's budget where SGLang checks its sampling parameters."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def verify(result, self, vocab_size):
    served = serving.current()
    if served is not None:
        served.wish(self.custom_params)  # a ValueError: SGLang answers with status 400
    return result


PATCHES = (
    Patch(
        target="sglang.srt.sampling.sampling_params.SamplingParams.verify",
        parameters=("self", "vocab_size"),
        hook=verify,
        kind=HookType.AFTER,
        why="custom parameters reach nobody before the request is scheduled",
        how="refuses a malformed kv_ parameter with one line while a policy is served",
        until="plugins can validate requests",
    ),
)

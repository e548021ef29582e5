"""Carries the plan made at allocation to the attention backend."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


def init_new(result, cls, batch, *args, **kwargs):
    plan = getattr(batch, "raggedkv_plan", None)
    if plan is None and serving.current() is not None and batch.reqs:
        raise RuntimeError("a batch of requests reached the model without its RaggedKV plan")
    result.raggedkv_plan = plan
    return result


def forward(original, self, forward_batch, *args, **kwargs):
    served = serving.current()
    if served is None:
        return original(self, forward_batch, *args, **kwargs)
    # runners copy the batch field by field, so the plan goes round them
    served.plan = getattr(forward_batch, "raggedkv_plan", None)
    try:
        return original(self, forward_batch, *args, **kwargs)
    finally:
        served.plan = None


_WHY = "a forward batch is copied field by field, and the page table may change meanwhile"
_UNTIL = "allocators can attach data to a batch"

PATCHES = (
    Patch(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        parameters=(
            "cls",
            "batch",
            "model_runner",
            "capture_hidden_mode",
            "return_hidden_states_before_norm",
            "extend_position_info",
            "spec_mrope_positions",
            "kv_loc_plan",
            "write_cols",
        ),
        hook=init_new,
        kind=HookType.AFTER,
        why=_WHY,
        how="copies one attribute from the scheduled batch, and refuses a batch without it",
        until=_UNTIL,
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        parameters=(
            "self",
            "forward_batch",
            "skip_attn_backend_init",
            "pp_proxy_tensors",
            "reinit_attn_backend",
            "split_forward_count",
        ),
        hook=forward,
        kind=HookType.AROUND,
        why=_WHY,
        how="offers the plan to the backend for the length of the forward; warm-ups have none",
        until=_UNTIL,
    ),
)

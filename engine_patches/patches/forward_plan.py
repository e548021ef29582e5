"""Carries the plan made at allocation to the attention backend."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch

REPORT_KEY = "raggedkv"
"""Where a request's answer says what was kept, in ``meta_info``."""


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
    served.plan = plan = getattr(forward_batch, "raggedkv_plan", None)
    try:
        result = original(self, forward_batch, *args, **kwargs)
        if plan is not None and served.freezer is not None:
            _freeze(served, plan, result.logits_output)
        return result
    finally:
        served.plan = None


def _freeze(served, plan, logits_output):
    from engine_patches.plan import ExtendPlan

    if isinstance(plan, ExtendPlan):
        served.allocator.after_forward(plan)
        logits_output.customized_info = {REPORT_KEY: plan.reports}


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
        how="offers the plan to the backend for the length of the forward (warm-ups have none); "
        "then freezes the prompts that ended in it",
        until=_UNTIL,
    ),
)

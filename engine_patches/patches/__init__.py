"""Everything RaggedKV changes in SGLang: one module per target, all listed in ``ALL``."""

from engine_patches.patches import (
    cli_flags,
    decode_allocation,
    forward_plan,
    fused_kv_writes,
    internal_state,
    kv_pool_classes,
    memory_budget,
    observed_loss,
    prefill_adder,
    prefill_allocation,
    prefix_insert,
    prefix_match,
    request_bound,
    request_budget,
    request_release,
    request_report,
    sessions,
)

CLI = cli_flags.PATCHES
"""Installed always: they only add the flags."""

ENGINE = (
    *kv_pool_classes.PATCHES,
    *memory_budget.PATCHES,
    *prefill_adder.PATCHES,
    *prefill_allocation.PATCHES,
    *decode_allocation.PATCHES,
    *forward_plan.PATCHES,
    *observed_loss.PATCHES,
    *prefix_match.PATCHES,
    *prefix_insert.PATCHES,
    *request_release.PATCHES,
    *request_bound.PATCHES,
    *request_budget.PATCHES,
    *request_report.PATCHES,
    *fused_kv_writes.PATCHES,
    *internal_state.PATCHES,
    *sessions.PATCHES,
)
"""Installed only in a process that serves a policy."""

ALL = (*CLI, *ENGINE)

"""Everything RaggedKV changes in SGLang: one module per target, all listed in ``ALL``."""

from engine_patches.patches import (
    cli_flags,
    decode_allocation,
    forward_plan,
    fused_kv_writes,
    internal_state,
    kv_pool_classes,
    memory_budget,
    prefill_adder,
    prefill_allocation,
    prefix_insert,
    prefix_match,
    request_release,
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
    *prefix_match.PATCHES,
    *prefix_insert.PATCHES,
    *request_release.PATCHES,
    *fused_kv_writes.PATCHES,
    *internal_state.PATCHES,
    *sessions.PATCHES,
)
"""Installed only in a process that serves a policy."""

ALL = (*CLI, *ENGINE)

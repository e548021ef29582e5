"""Puts the torch replacements in SGLang's place, on this platform alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.plugins.hook_registry import HookType

from engine_patches.cpu_platform.gdn import (
    convolution,
    delta_rule,
    gates,
    projections,
    snapshots,
)
from engine_patches.patches.patch import Patch
from engine_patches.register import install as install_patches

OPS = "sglang.kernels.ops"
LAYER = ("hidden_states", "gate_weight", "shared_output")
STATES = (
    "cache_indices", "mamba_track_mask", "mamba_track_indices", "batch_size", "check_freed_slots",
)  # fmt: skip
PROJECTION = ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v")


def _replaced(module: str, name: str, hook: Callable, *parameters: str) -> Patch:
    return Patch(
        target=f"{OPS}.{module}.{name}",
        parameters=parameters,
        hook=hook,
        kind=HookType.REPLACE,
        why="SGLang has it as a Triton kernel only, which needs a GPU",
        how="the same in torch, with the same state layouts",
        until="SGLang serves Gated DeltaNet models without a GPU and without AMX",
    )


PATCHES = (
    _replaced(
        "mamba.causal_conv1d_triton", "causal_conv1d_fn", convolution.causal_conv1d_fn,
        "x", "weight", "bias", "conv_states", "query_start_loc", "seq_lens_cpu", "cache_indices",
        "has_initial_state", "activation", "pad_slot_id", "validate_data", "block_table", "kwargs",
    ),
    _replaced(
        "mamba.causal_conv1d_triton", "causal_conv1d_update", convolution.causal_conv1d_update,
        "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices",
        "num_accept_tokens", "intermediate_conv_window", "intermediate_state_indices",
        "retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token", "pad_slot_id",
        "metadata", "validate_data",
    ),
    _replaced(
        "attention.linear.fused_gdn_gating", "fused_gdn_gating", delta_rule.fused_gdn_gating,
        "A_log", "a", "b", "dt_bias", "beta", "threshold",
    ),
    _replaced(
        "attention.fla.chunk", "chunk_gated_delta_rule", delta_rule.chunk_gated_delta_rule,
        "q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices",
        "cu_seqlens", "head_first", "use_qk_l2norm_in_kernel", "inplace_update",
    ),
    _replaced(
        "attention.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode",
        delta_rule.fused_recurrent_gated_delta_rule_packed_decode,
        "mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out",
        "ssm_state_indices", "use_qk_l2norm_in_kernel",
    ),
    _replaced(
        "attention.triton_gdn_fused_proj", "fused_qkvzba_split_reshape_cat",
        projections.fused_qkvzba_split_reshape_cat, *PROJECTION,
    ),
    _replaced(
        "attention.triton_gdn_fused_proj", "fused_qkvzba_split_reshape_cat_contiguous",
        projections.fused_qkvzba_split_reshape_cat_contiguous, *PROJECTION,
    ),
    _replaced(
        "attention.fla.layernorm_gated", "RMSNorm.forward", gates.gated_rms_norm,
        "self", "x", "z",
    ),
    _replaced(
        "attention.fla.fused_norm_gate", "FusedRMSNormGated.forward", gates.fused_gated_rms_norm,
        "self", "x", "g", "residual", "prenorm", "residual_in_fp32",
    ),
    _replaced(
        "elementwise.elementwise", "fused_sigmoid_mul", gates.fused_sigmoid_mul,
        "attn_output", "gate", "inplace", "quant",
    ),
    _replaced(
        "elementwise.elementwise", "fused_gate_sigmoid_mul", gates.fused_gate_sigmoid_mul, *LAYER,
    ),
    _replaced(
        "elementwise.elementwise", "fused_gate_sigmoid_mul_add", gates.fused_gate_sigmoid_mul_add,
        *LAYER, "final_hidden_states",
    ),
    _replaced(
        "mamba.mamba_state_scatter_triton", "track_mamba_states_if_needed",
        snapshots.track_mamba_states_if_needed, "conv_states", "ssm_states", *STATES,
    ),
    _replaced(
        "mamba.mamba_state_scatter_triton", "track_mamba_states_all_layers",
        snapshots.track_mamba_states_all_layers, "conv_states_pool", "ssm_states_pool", *STATES,
    ),
)  # fmt: skip


def install() -> None:
    """Put everything in place, for the whole process. Raises Refusal if SGLang's kernels differ.

    Two calls of SGLang's also go to a GPU without asking the platform: ``Tensor.pin_memory`` of the
    rows to snapshot (``ScheduleBatch.prepare_for_decode``) and ``torch.get_device_module()`` where
    Qwen3-Next places its norms. Without an accelerator they answer for the host; they can go when
    SGLang asks ``is_pin_memory_available`` and the platform there.
    """
    install_patches(PATCHES)
    torch.Tensor.pin_memory = lambda self, device=None: self
    found = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu if device is None else found(device)

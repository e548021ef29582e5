"""Estimate a decoder's parameter count from its config, for capacity planning only.

Counted: input embedding and output head, attention and Gated-DeltaNet projections, convolutions,
dense MLPs or experts with router and shared expert. Left out: norms, biases and per-head scalars
(well under 0.1 %), vision towers, and multi-token-prediction heads.
"""

from __future__ import annotations

from kvpolicy.hf_config import LINEAR_ATTENTION, TextConfig


def count_parameters(config: TextConfig, kinds: list[str]) -> int:
    """Parameters of the language model with layer kinds ``kinds`` (execution order)."""
    hidden = config.positive("hidden_size")
    embeddings = config.positive("vocab_size") * hidden * (1 if config.tied_embeddings else 2)
    layers = 0
    for index, kind in enumerate(kinds):
        mixer = _delta_net(config, hidden) if kind == LINEAR_ATTENTION else _attention(config)
        layers += mixer + _feed_forward(config, hidden, index)
    return embeddings + layers


def _attention(config: TextConfig) -> int:
    hidden = config.positive("hidden_size")
    q_heads, kv_heads, head_dim = config.heads()
    queries = 2 if config.get("attn_output_gate") else 1
    return hidden * head_dim * ((queries + 1) * q_heads + 2 * kv_heads)


def _delta_net(config: TextConfig, hidden: int) -> int:
    keys = config.positive("linear_num_key_heads") * config.positive("linear_key_head_dim")
    value_heads = config.positive("linear_num_value_heads")
    values = value_heads * config.positive("linear_value_head_dim")
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return projections + (2 * keys + values) * config.positive("linear_conv_kernel_dim")


def _feed_forward(config: TextConfig, hidden: int, index: int) -> int:
    # starcoder2 has a plain two-matrix MLP; every other supported family is gated
    matrices = 2 if config.model_type == "starcoder2" else 3
    expert_key = next((k for k in ("num_experts", "num_local_experts") if config.get(k)), None)
    dense_layers = config.get("mlp_only_layers") or ()
    dense = isinstance(dense_layers, list) and index in dense_layers
    if expert_key is None or dense or (index + 1) % config.positive("decoder_sparse_step", 1):
        return matrices * hidden * config.positive("intermediate_size")
    experts = config.positive(expert_key)
    has_width = config.get("moe_intermediate_size") is not None
    width = config.positive("moe_intermediate_size" if has_width else "intermediate_size")
    has_shared = config.get("shared_expert_intermediate_size")
    shared = config.positive("shared_expert_intermediate_size") if has_shared else 0
    gate = hidden if has_shared else 0
    return experts * (3 * hidden * width + hidden) + 3 * hidden * shared + gate

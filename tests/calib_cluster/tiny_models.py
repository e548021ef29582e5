"""Tiny random models of every family that can be calibrated, saved as Hugging Face folders.

Biases and weights are drawn wide, so that attention is spiky and windows matter.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

VOCAB = 200
NATIVE_WINDOW = 8
_BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512,
}  # fmt: skip
_HEADS = {"head_dim": 16}
_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_NATIVE = {"sliding_window": NATIVE_WINDOW, "query_pre_attn_scalar": 16}
_LOCAL_THREE = ["sliding_attention"] * 3 + ["full_attention"]

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", _HEADS | {"attention_bias": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _HEADS),
    "mistral": ("MistralConfig", _HEADS | {"sliding_window": None}),
    "mistral_native": ("MistralConfig", _HEADS | {"sliding_window": NATIVE_WINDOW}),
    "gemma2": ("Gemma2Config", _HEADS | _NATIVE | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", _HEADS | _NATIVE | {"layer_types": _LOCAL_THREE}),
    "qwen3_next": (
        "Qwen3NextConfig",
        _HEADS | _GDN | _EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _HEADS | _GDN),
    "qwen3_moe": ("Qwen3MoeConfig", _HEADS | _EXPERTS),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2Config", {}),
    "granite": ("GraniteConfig", {}),
}
# what configs saved by transformers 5 lose: SGLang's readers, and ours, want them
_LOST = {
    "Gemma2Config": {"hidden_act": "gelu_pytorch_tanh"},
    "Qwen3NextConfig": {"full_attention_interval": 4},
    "Qwen3_5TextConfig": {"full_attention_interval": 4},
}


def save_tiny(family: str, folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write a random model of ``family`` (float32, 4 layers, 4 query and 2 kv heads of 16).

    ``changes`` override config values. Returns ``folder``.
    """
    name, special = FAMILIES[family]
    config = getattr(transformers, name)(**(_BASE | special | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _widen(model)
    return save_model(model, folder)


def save_model(model: torch.nn.Module, folder: Path) -> Path:
    """Save ``model`` with the config keys that transformers leaves out. Returns ``folder``."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    lost = _LOST.get(type(model.config).__name__, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | lost))
    return folder


@torch.no_grad()
def _widen(model: torch.nn.Module) -> None:
    """Random biases, and projections that make logits (of attention and output) of a few units."""
    for name, parameter in model.named_parameters():
        projection = name.rsplit(".", 2)[-2]
        if projection in {"q_proj", "k_proj", "qkv_proj"} and parameter.ndim == 2:
            parameter.normal_(std=0.25)
        elif projection in {"v_proj", "o_proj", "embed_tokens", "lm_head"} and parameter.ndim == 2:
            parameter.normal_(std=0.3)
        elif name.endswith("_proj.bias"):
            parameter.normal_(std=0.5)

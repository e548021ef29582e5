"""Configs of real model families, as published, cut to the keys that matter."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from kvpolicy.geometry import ModelGeometry, geometry_from_config

_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
}
_GEMMA3_NESTED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
    "torch_dtype": "float32",
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 24,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_QWEN2_WINDOWED = _QWEN2 | {"use_sliding_window": True, "max_window_layers": 21}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
# Qwen3.6-27B-like: the geometry published for the 27B model of this family
_QWEN3_6_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}
_CONFIGS = {
    "smollm2": _SMOLLM2,
    "gemma3": _GEMMA3,
    "gemma3_nested": _GEMMA3_NESTED,
    "gemma2": _GEMMA2,
    "qwen2": _QWEN2,
    "qwen2_windowed": _QWEN2_WINDOWED,
    "qwen3": _QWEN3,
    "mistral": _MISTRAL,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_6_27b": _QWEN3_6_27B,
}


@pytest.fixture
def config():
    """Factory: a fresh copy of a named config with top-level keys replaced."""

    def make(name: str, **changes) -> dict:
        return copy.deepcopy(_CONFIGS[name]) | changes

    return make


@pytest.fixture
def geometry(config):
    """Factory: geometry of a named config with top-level keys replaced."""

    def make(name: str, **changes) -> ModelGeometry:
        return geometry_from_config(config(name, **changes))

    return make


@pytest.fixture
def model_dir(config, tmp_path):
    """Factory: a folder with only the config.json of a named config."""

    def make(name: str, **changes) -> Path:
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(name, **changes)))
        return folder

    return make

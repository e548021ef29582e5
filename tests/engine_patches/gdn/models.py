"""Small random Gated DeltaNet models: three recurrent layers, then one of full attention."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

VOCAB = 128
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "float32",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CONFIGS = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**COMMON),
    "qwen3_next": lambda: Qwen3NextConfig(**COMMON, **EXPERTS),
}


def save(name: str, folder: Path) -> PreTrainedModel:
    """Write a random fp32 model of ``CONFIGS`` to ``folder``, and return it."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.architectures = {"qwen3_5": ["Qwen3_5ForCausalLM"]}.get(name, ["Qwen3NextForCausalLM"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.08)  # far from uniform answers, so that a fault shows
    model.save_pretrained(folder)
    path = folder / "config.json"  # transformers writes layer_types alone; SGLang reads this
    told = json.loads(path.read_text()) | {"full_attention_interval": 4}
    path.write_text(json.dumps(told))
    return model.eval()


@torch.inference_mode()
def log_probs(model: PreTrainedModel, ids: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of ``answer`` after ``ids``, in nats."""
    logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
    told = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
    return told[:, 0].tolist()

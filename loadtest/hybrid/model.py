"""What is trained: a Qwen3.5-text model of 1.6 million parameters and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from loadtest.corpora import library_texts

VOCAB = 1024
END = "<|end|>"
INTERVAL = 4
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "initializer_range": 0.06,
}  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``VOCAB`` tokens over the standard library's sources; digits apart.

    It follows from Python's version alone.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )


def make_model(seed: int) -> PreTrainedModel:
    """The untrained model, fp32."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        **SHAPE, full_attention_interval=INTERVAL, dtype="float32", bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip
    config.architectures = ["Qwen3_5ForCausalLM"]
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder that SGLang reads as well."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"  # transformers writes layer_types alone; SGLang reads this
    told = json.loads(path.read_text()) | {"full_attention_interval": INTERVAL}
    path.write_text(json.dumps(told, indent=2) + "\n")

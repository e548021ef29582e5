"""A model folder without weights whose token ids are bytes, for the quality tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.loadtest.fake_model import byte_symbols

BOS = 256


def byte_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes; with ``bos`` every text starts with id 256."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())} | {"<bos>": BOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


def write_model(folder: Path) -> Path:
    """config.json and tokenizer of 4 layers of 2 KV heads; context 2048."""
    LlamaConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        hidden_size=32, intermediate_size=64, vocab_size=257, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    byte_tokenizer().save_pretrained(folder)
    return folder


def prose(words: int, start: int = 0) -> str:
    """Text in which every word occurs once, so that overlaps show."""
    return " ".join(f"w{number}" for number in range(start, start + words))

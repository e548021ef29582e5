"""Convert a GGUF file to a Hugging Face folder that SGLang and transformers both load.

Weights are dequantized to float32. Heavy imports are inside the functions.
"""

import contextlib
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

from loadtest.errors import UserError

# Written by transformers about the conversion run itself; says nothing about the model.
_RUN_KEYS = {
    "config.json": ("_model_name_or_path", "quantization_config"),
    "tokenizer_config.json": ("is_local", "local_files_only"),
}


def convert(gguf: Path, out: Path) -> None:
    """Write ``out`` (created): config, tokenizer, generation config, model.safetensors (fp32).

    Raises UserError when a converter package is missing or the tokenizer that transformers
    built does not agree with the GGUF's own metadata.
    """
    _require("torch", "transformers", "gguf", "accelerate")
    with _quiet_and_offline():
        context = _save_weights(gguf, out)
        _save_tokenizer(gguf, out, context)
    for name, keys in _RUN_KEYS.items():
        _drop_keys(out / name, keys)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def _require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"converting a model needs {', '.join(missing)}: pip install 'raggedkv[models]'"
        )


@contextlib.contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """No progress bars or advice from transformers, and no look-ups on a model hub."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        # one of transformers' bars has no switch; what goes wrong arrives as an exception
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _save_weights(gguf: Path, out: Path) -> int:
    """Dequantize and save the model; returns its context length in tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # The loaded weights are plain fp32 now; with these marks left save_pretrained would refuse
    # and loaders would look for GGUF weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(out)
    return model.config.max_position_embeddings


def _save_tokenizer(gguf: Path, out: Path, context: int) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    meta = {
        key.removeprefix("tokenizer.ggml."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.")
    }
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.model_max_length = context
    tokenizer.add_bos_token = bool(meta.get("add_bos_token", False))
    if meta.get("pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = _smollm_pre_tokenizer()
    tokenizer.save_pretrained(out)
    _check_tokenizer(AutoTokenizer.from_pretrained(out), meta)


def _smollm_pre_tokenizer():
    """The split that ``tokenizer.ggml.pre = smollm`` names: single digits, then GPT-2's regex.

    transformers keeps only the second half, which splits "  12" at another place.
    """
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _check_tokenizer(tokenizer, meta: dict) -> None:
    """Compare the saved and reloaded tokenizer with the GGUF's metadata. Raises UserError."""
    vocabulary = tokenizer.get_vocab()
    wrong = [
        (index, token)
        for index, token in enumerate(meta["tokens"])
        # GGUF writes user-defined runs of spaces as text, the vocabulary with U+2581
        if vocabulary.get(token, vocabulary.get(token.replace(" ", "\u2581"))) != index
    ]
    facts = {
        "vocabulary": (len(wrong), 0),
        "bos_token_id": (tokenizer.bos_token_id, meta["bos_token_id"]),
        "eos_token_id": (tokenizer.eos_token_id, meta["eos_token_id"]),
        "chat_template": (tokenizer.chat_template, meta.get("tokenizer.chat_template")),
        "add_bos_token": (
            tokenizer("a").input_ids[0] == tokenizer.bos_token_id,
            bool(meta.get("add_bos_token", False)),
        ),
    }
    for fact, (got, expected) in facts.items():
        if got != expected:
            raise UserError(f"converted tokenizer differs from the GGUF in {fact}: {got!r}")


def _drop_keys(path: Path, keys: tuple[str, ...]) -> None:
    values = json.loads(path.read_text())
    kept = {key: value for key, value in values.items() if key not in keys}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")

"""A tiny model as PyPI packages: a random llama GGUF, cut in two, inside two wheels."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loadtest.model_specs import ModelSpec, Wheel

NAME = "tiny"
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
# enough for byte-level BPE: the 256 byte symbols, three merges and two control tokens
MERGES = ["a b", "ab c", "\u0120 a"]


@dataclass(frozen=True)
class FakeModel:
    """What was packed: the wheels' folder, the spec that pins them, the model before packing."""

    links: Path
    spec: ModelSpec
    model: LlamaForCausalLM


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, as its paper's code defines them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown}
    table |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    """Token strings by id: control tokens first, then bytes, then merged symbols."""
    return ["<s>", "</s>", *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]


def random_model() -> LlamaForCausalLM:
    """A random two-layer llama with GQA (4 query, 2 KV heads of 16)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows: interleaved pairs instead of halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write ``model`` the way llama.cpp's converter lays a llama out, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer)
    _write_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def _write_tensors(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    layers = model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight":  # tied
            continue
        data = value.numpy()
        if "q_proj" in key:
            data = _permute(data, model.config.num_attention_heads)
        if "k_proj" in key:
            data = _permute(data, model.config.num_key_value_heads)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), data)


def write_wheel(folder: Path, package: str, member: str, payload: bytes) -> Path:
    """A wheel ``package``==1.0 with one data file in it."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, payload)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def pack(folder: Path) -> FakeModel:
    """Write the GGUF and its two wheels into ``folder``."""
    model = random_model()
    whole = folder / "tiny.gguf"
    write_gguf(model, whole)
    payload = whole.read_bytes()
    half = len(payload) // 2
    wheels = []
    for number, part in enumerate((payload[:half], payload[half:])):
        package = f"raggedkv_fake_part{number}"
        member = f"{package}/tiny.gguf.part{number}"
        path = write_wheel(folder, package, member, part)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(Wheel(package, "1.0", digest, path.stat().st_size, member))
    spec = ModelSpec(
        name=NAME, licence="none", wheels=tuple(wheels), model_bytes=10_000_000,
        gguf_sha256=hashlib.sha256(payload).hexdigest(), gguf_size=len(payload),
    )  # fmt: skip
    return FakeModel(folder, spec, model)

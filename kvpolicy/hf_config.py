"""Read the shape of a decoder's cache from a raw Hugging Face ``config.json`` dictionary.

Nothing here imports transformers: a config is read as JSON and absent keys take the defaults of
the transformers configuration class of that ``model_type``. Only model types listed in
``FAMILIES`` are accepted, because the same key means different things in different families
(``sliding_window`` is active in Mistral, inactive in Qwen2 unless ``use_sliding_window``).
"""

from __future__ import annotations

from typing import Any

from kvpolicy.errors import GeometryError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LINEAR_ATTENTION = "linear_attention"
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# How each family lays out its layers when ``layer_types`` is absent, with the defaults of its
# transformers class for the keys that decide cache shapes.
_GDN = {
    "pattern": "interval",
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "attn_output_gate": True,
}
_QWEN = {
    "pattern": "upper_layers",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"pattern": "plain"},
    "granite": {"pattern": "plain"},
    "olmo2": {"pattern": "plain"},
    "gemma": {"pattern": "plain", "head_dim": 256, "tie_word_embeddings": True},
    "qwen2": _QWEN,
    "qwen2_moe": {"pattern": "unwindowed", "num_experts": 60, "moe_intermediate_size": 1408},
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": {"pattern": "unwindowed", "num_experts": 128, "moe_intermediate_size": 768},
    "mistral": {"pattern": "every_layer", "sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {"pattern": "every_layer", "sliding_window": None, "num_local_experts": 8},
    "phi3": {"pattern": "every_layer", "sliding_window": None},
    "starcoder2": {"pattern": "every_layer", "sliding_window": None, "num_key_value_heads": 2},
    "gemma2": {
        "pattern": "alternate",
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "pattern": "periodic",
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "tie_word_embeddings": True,
    },
    "qwen3_next": _GDN,
    "qwen3_5_text": _GDN,
    "qwen3_5_moe_text": _GDN,
}
# Multimodal wrappers whose language model sits under ``text_config``.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Keys that change how the cache is stored; a value other than these is refused.
_REFUSED = {
    "kv_lora_rank": "latent attention (MLA) stores no per-head cache",
    "num_kv_shared_layers": "layers that share another layer's cache are not supported",
    "attention_chunk_size": "chunked attention layers are not supported",
    "use_bidirectional_attention": "bidirectional attention has no causal cache",
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "cross_attention_layers": "cross-attention layers are not supported",
}


class TextConfig:
    """Typed view of the language-model part of a ``config.json`` dictionary.

    Args:
        raw: the parsed ``config.json``.

    Raises:
        GeometryError: unsupported model type, a refused feature, or a malformed value.
    """

    def __init__(self, raw: dict[str, Any]):
        if not isinstance(raw, dict):
            raise GeometryError("config.json must hold one JSON object")
        top_type = raw.get("model_type")
        if top_type is not None and not isinstance(top_type, str):
            raise GeometryError(f"config.json: model_type must be a name, found {top_type!r}")
        nested = raw.get("text_config")
        if top_type in WRAPPERS and not isinstance(nested, dict):
            raise GeometryError(f"model_type {top_type} needs a text_config object in config.json")
        self.values = nested if isinstance(nested, dict) else raw
        self._outer = raw
        self._refuse_features()
        self.model_type = self._find_model_type(top_type)
        self.family = FAMILIES[self.model_type]
        self.architecture = self._find_architecture()

    def _refuse_features(self) -> None:
        for source in (self._outer, self.values):
            for key, why in _REFUSED.items():
                if source.get(key):
                    raise GeometryError(f"config.json has {key}={source[key]!r}: {why}")

    def _find_model_type(self, top_type: Any) -> str:
        inner = self.values.get("model_type", top_type)
        if not isinstance(inner, str):
            raise GeometryError(f"config.json: model_type must be a name, found {inner!r}")
        found = WRAPPERS.get(inner, inner)
        if found in FAMILIES and (self.values is self._outer or top_type in WRAPPERS):
            return found
        accepted = ", ".join(sorted([*FAMILIES, *WRAPPERS]))
        raise GeometryError(f"model_type {top_type!r} is not supported; accepted: {accepted}")

    def _find_architecture(self) -> str:
        names = self._outer.get("architectures") or self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise GeometryError("config.json needs architectures with exactly one class name")
        return names[0]

    def get(self, key: str, default: Any = None) -> Any:
        """Value of ``key``, else the family's default, else ``default``."""
        if key in self.values:
            return self.values[key]
        return self.family.get(key, default)

    def positive(self, key: str, default: Any = None) -> int:
        """Like ``get`` but the value must be a positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise GeometryError(f"config.json: {key} must be a positive integer, found {value!r}")
        return value

    def _count(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GeometryError(f"config.json: {key} must be an integer >= 0, found {value!r}")
        return value

    @property
    def dtype(self) -> str:
        """Checkpoint dtype; transformers' default when unstated is float32."""
        for source in (self.values, self._outer):
            for key in ("dtype", "torch_dtype"):
                if source.get(key):
                    return self._known_dtype(key, source[key])
        return "float32"

    @staticmethod
    def _known_dtype(key: str, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise GeometryError(f"config.json: {key} {value!r} unknown; accepted: {[*DTYPE_BYTES]}")
        return name

    @property
    def quantized(self) -> bool:
        """True if the checkpoint declares a ``quantization_config``."""
        return any(s.get("quantization_config") for s in (self.values, self._outer))

    @property
    def tied_embeddings(self) -> bool:
        """True if the output head shares the input embedding."""
        for source in (self.values, self._outer):
            if "tie_word_embeddings" in source:
                return bool(source["tie_word_embeddings"])
        return bool(self.family.get("tie_word_embeddings", False))

    def heads(self) -> tuple[int, int, int]:
        """(query heads, kv heads, head_dim) of every attention layer."""
        q_heads = self.positive("num_attention_heads")
        kv_heads = q_heads
        if self.get("num_key_value_heads") is not None:
            kv_heads = self.positive("num_key_value_heads")
        if q_heads % kv_heads:
            raise GeometryError(
                f"config.json: {q_heads} query heads are not a multiple of {kv_heads} kv heads"
            )
        if self.get("head_dim") is not None:
            return q_heads, kv_heads, self.positive("head_dim")
        hidden = self.positive("hidden_size")
        if hidden % q_heads:
            raise GeometryError(
                f"config.json: no head_dim, and hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {q_heads}"
            )
        return q_heads, kv_heads, hidden // q_heads

    def layer_types(self) -> list[str]:
        """Kind of each layer in execution order, in transformers' names.

        Raises:
            GeometryError: unknown kind, wrong count, or ``layer_types`` that contradicts the
                ``full_attention_interval`` which the serving engine reads instead.
        """
        count = self.positive("num_hidden_layers")
        listed = self.values.get("layer_types")
        if listed is None or self.family["pattern"] == "every_layer":
            # transformers' Mistral-like classes window every layer whatever layer_types says
            return self._pattern(count)
        self._check_listed(listed, count)
        if self.values.get("full_attention_interval") and listed != self._pattern(count):
            raise GeometryError("config.json: layer_types contradicts full_attention_interval")
        return list(listed)

    def _check_listed(self, listed: Any, count: int) -> None:
        if not isinstance(listed, list) or len(listed) != count:
            raise GeometryError(f"config.json: layer_types must list {count} layers")
        unknown = sorted({str(kind) for kind in listed if kind not in LAYER_TYPES})
        if unknown:
            raise GeometryError(
                f"config.json: layer_types {unknown} unknown; accepted: {list(LAYER_TYPES)}"
            )
        pattern = self.family["pattern"]
        if LINEAR_ATTENTION in listed and pattern != "interval":
            raise GeometryError(f"config.json: no linear_attention layers in {self.model_type}")
        if SLIDING_ATTENTION in listed and pattern in ("plain", "unwindowed", "interval"):
            raise GeometryError(f"config.json: no sliding_attention layers in {self.model_type}")
        idle = pattern == "upper_layers" and not self._qwen_window_active()
        if SLIDING_ATTENTION in listed and idle:
            raise GeometryError("config.json: sliding layers but use_sliding_window is off")

    def _pattern(self, count: int) -> list[str]:
        pattern = self.family["pattern"]
        if pattern == "unwindowed" and self.get("use_sliding_window"):
            raise GeometryError(f"config.json: use_sliding_window in {self.model_type} is unknown")
        if pattern == "interval":
            step = self.positive("full_attention_interval")
            return _every(step, count, FULL_ATTENTION, LINEAR_ATTENTION)
        if pattern == "alternate":
            return _every(2, count, FULL_ATTENTION, SLIDING_ATTENTION)
        if pattern == "periodic":
            key = "_sliding_window_pattern"
            step = self.positive(key if key in self.values else "sliding_window_pattern")
            return _every(step, count, FULL_ATTENTION, SLIDING_ATTENTION)
        if pattern == "every_layer" and self.get("sliding_window") is not None:
            return [SLIDING_ATTENTION] * count
        if pattern == "upper_layers" and self._qwen_window_active():
            first = self._count("max_window_layers")
            return [FULL_ATTENTION if i < first else SLIDING_ATTENTION for i in range(count)]
        return [FULL_ATTENTION] * count

    def _qwen_window_active(self) -> bool:
        return bool(self.get("use_sliding_window")) and self.get("sliding_window") is not None

    def native_window(self) -> int:
        """Keys a sliding layer's query reads, the current token counted.

        transformers keeps ``kv > q - sliding_window`` (masking_utils.sliding_window_overlay),
        i.e. ``sliding_window`` keys ending at the query; SGLang passes ``sliding_window - 1`` as
        ``window_left``. Both equal w = ``sliding_window``.
        """
        return self.positive("sliding_window")


def _every(step: int, count: int, nth: str, other: str) -> list[str]:
    return [other if (i + 1) % step else nth for i in range(count)]

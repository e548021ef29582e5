"""The geometry of a model's cache: layers, kv heads, units and bytes.

A *unit* is one physical kv head of one attention layer whose cache grows with the context.
Units are numbered 0..num_units-1 over attention layers in execution order, then kv head, over
the whole model (not one tensor-parallel rank).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from kvpolicy.errors import GeometryError
from kvpolicy.hf_config import (
    DTYPE_BYTES,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    SLIDING_ATTENTION,
    TextConfig,
)
from kvpolicy.weights import count_parameters

# Keys of config.json that say nothing about the model itself.
_VOLATILE_KEYS = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


class LayerKind(StrEnum):
    """What a layer remembers: every token, a native sliding window, or a fixed-size state."""

    GLOBAL = "global"
    NATIVE = "native"
    RECURRENT = "recurrent"


_KIND_OF = {
    FULL_ATTENTION: LayerKind.GLOBAL,
    SLIDING_ATTENTION: LayerKind.NATIVE,
    LINEAR_ATTENTION: LayerKind.RECURRENT,
}


class LayerGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One layer.

    Fields: ``layer_id`` counts all layers from 0; head counts are global (before tensor
    parallelism) and 0 for recurrent layers; ``native_window`` is the number of keys a query
    reads, the current token counted (0 unless NATIVE); ``state_bytes`` is the convolution plus
    recurrent state of one request (0 unless RECURRENT).
    """

    layer_id: int
    kind: LayerKind
    num_q_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    native_window: int = 0
    state_bytes: int = 0

    @property
    def is_attention(self) -> bool:
        """True if this layer's cache grows with the context (GLOBAL or NATIVE)."""
        return self.kind is not LayerKind.RECURRENT


class ModelGeometry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """Geometry of a whole decoder, as read from its ``config.json``.

    ``max_context`` is in tokens; ``kv_dtype_bytes`` is the size of one cached number;
    ``weight_parameters`` is the estimate of ``kvpolicy.weights``; ``weight_dtype_bytes`` is 0
    when the checkpoint is quantised, so that its size cannot be told from the config.
    """

    architecture: str
    model_type: str
    layers: tuple[LayerGeometry, ...]
    max_context: int
    hidden_size: int
    vocab_size: int
    kv_dtype_bytes: int
    weight_parameters: int = 0
    weight_dtype_bytes: int = 0
    config_hash: str = ""

    def __post_init__(self) -> None:
        if [layer.layer_id for layer in self.layers] != list(range(len(self.layers))):
            raise GeometryError("layer ids must count from 0 in execution order")
        if not self.attention_layers:
            raise GeometryError("no attention layer has a growing cache")
        for layer in self.attention_layers:
            if min(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) < 1:
                raise GeometryError(f"layer {layer.layer_id} needs kv heads and head dims above 0")

    @cached_property
    def attention_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers with a growing cache, in execution order."""
        return tuple(layer for layer in self.layers if layer.is_attention)

    @cached_property
    def recurrent_layers(self) -> tuple[LayerGeometry, ...]:
        """Layers with a state of fixed size, in execution order."""
        return tuple(layer for layer in self.layers if not layer.is_attention)

    @cached_property
    def _first_units(self) -> tuple[int, ...]:
        starts = [0]
        for layer in self.attention_layers:
            starts.append(starts[-1] + layer.num_kv_heads)
        return tuple(starts)

    @cached_property
    def _attention_index(self) -> dict[int, int]:
        return {layer.layer_id: i for i, layer in enumerate(self.attention_layers)}

    @property
    def num_units(self) -> int:
        """Number of (attention layer, kv head) units."""
        return self._first_units[-1]

    @property
    def max_kv_heads(self) -> int:
        """Largest kv head count over attention layers: the width of a window matrix."""
        return max(layer.num_kv_heads for layer in self.attention_layers)

    def attention_index(self, layer_id: int) -> int:
        """Row of ``layer_id`` in a window matrix. Raises GeometryError if it has no cache."""
        if layer_id not in self._attention_index:
            raise GeometryError(f"layer {layer_id} has no growing cache")
        return self._attention_index[layer_id]

    def unit_of(self, layer_id: int, head: int) -> int:
        """Unit number of kv head ``head`` of layer ``layer_id`` (id over all layers).

        Raises:
            GeometryError: no such head, or the layer has no growing cache.
        """
        row = self.attention_index(layer_id)
        heads = self.attention_layers[row].num_kv_heads
        if not 0 <= head < heads:
            raise GeometryError(f"layer {layer_id} has kv heads 0..{heads - 1}, not {head}")
        return self._first_units[row] + head

    def head_of(self, unit: int) -> tuple[int, int]:
        """(layer_id, kv head) of ``unit``: the reverse of ``unit_of``."""
        if not 0 <= unit < self.num_units:
            raise GeometryError(f"units are 0..{self.num_units - 1}, not {unit}")
        row = bisect_right(self._first_units, unit) - 1
        return self.attention_layers[row].layer_id, unit - self._first_units[row]

    def layer_of_unit(self, unit: int) -> LayerGeometry:
        """The layer that ``unit`` belongs to."""
        return self.layers[self.head_of(unit)[0]]

    def bytes_per_token_of_unit(self, unit: int) -> int:
        """Bytes of K and V of one token in ``unit``."""
        layer = self.layer_of_unit(unit)
        return (layer.head_dim + layer.v_head_dim) * self.kv_dtype_bytes

    def bytes_per_token(self) -> int:
        """Bytes one token adds to a dense cache over all attention layers."""
        return sum(
            (layer.head_dim + layer.v_head_dim) * layer.num_kv_heads * self.kv_dtype_bytes
            for layer in self.attention_layers
        )

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page (``page_size`` tokens of one unit).

        Raises:
            GeometryError: units differ in head dimensions, so pages have no single size.
        """
        sizes = {(layer.head_dim + layer.v_head_dim) for layer in self.attention_layers}
        if len(sizes) != 1:
            raise GeometryError(f"attention layers differ in head size: {sorted(sizes)}")
        return sizes.pop() * self.kv_dtype_bytes * page_size

    def state_bytes_per_request(self) -> int:
        """Bytes of recurrent state of one request over all recurrent layers."""
        return sum(layer.state_bytes for layer in self.layers)

    def with_kv_dtype_bytes(self, kv_dtype_bytes: int) -> ModelGeometry:
        """Copy with another cache element size (recurrent state is left as read)."""
        return msgspec.structs.replace(self, kv_dtype_bytes=kv_dtype_bytes)

    def fingerprint(self) -> str:
        """sha256 (hex) of what a policy depends on: architecture, layers, sizes.

        Element sizes, context length and the weight estimate are left out: the same policy
        serves a model in any dtype and at any length.
        """
        fields = ("layer_id", "kind", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")
        layers = [
            [*(getattr(layer, field) for field in fields), layer.native_window]
            for layer in self.layers
        ]
        record = [self.architecture, self.model_type, self.hidden_size, self.vocab_size, layers]
        return hashlib.sha256(json.dumps(record, separators=(",", ":")).encode()).hexdigest()

    def estimated_weight_bytes(self) -> int:
        """Bytes of the language model's weights, estimated from the config.

        Counts embeddings, projections, MLP or experts and convolutions; leaves out norms,
        biases, vision towers and multi-token-prediction heads (see ``kvpolicy.weights``).

        Raises:
            GeometryError: the checkpoint is quantised, or MLP sizes are not in the config.
        """
        if not self.weight_dtype_bytes or not self.weight_parameters:
            raise GeometryError(
                "weight bytes cannot be told from config.json (quantised, or sizes missing); "
                "give --weights-bytes"
            )
        return self.weight_parameters * self.weight_dtype_bytes


def read_geometry(model_dir: str | Path) -> ModelGeometry:
    """Read ``config.json`` of a Hugging Face model folder. No weights are touched.

    Raises:
        GeometryError: no or unreadable config.json, or a model whose cache is not supported.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise GeometryError(f"no config.json in {model_dir}; give a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise GeometryError(f"cannot read {path}: {error}") from None
    return geometry_from_config(raw)


def geometry_from_config(raw: dict[str, Any]) -> ModelGeometry:
    """Geometry of a parsed ``config.json``. Raises GeometryError as ``read_geometry``."""
    config = TextConfig(raw)
    kinds = config.layer_types()
    layers = tuple(_layer(config, index, kind) for index, kind in enumerate(kinds))
    dtype_bytes = DTYPE_BYTES[config.dtype]
    return ModelGeometry(
        architecture=config.architecture,
        model_type=config.model_type,
        layers=layers,
        max_context=config.positive("max_position_embeddings"),
        hidden_size=config.positive("hidden_size"),
        vocab_size=config.positive("vocab_size"),
        kv_dtype_bytes=dtype_bytes,
        weight_parameters=_parameters_or_zero(config, kinds),
        weight_dtype_bytes=0 if config.quantized else dtype_bytes,
        config_hash=hash_config(raw),
    )


def _parameters_or_zero(config: TextConfig, kinds: list[str]) -> int:
    # the estimate is for planning only: a key it lacks must not make the model unusable
    try:
        return count_parameters(config, kinds)
    except GeometryError:
        return 0


def hash_config(raw: dict[str, Any]) -> str:
    """sha256 (hex) of a config without the keys that change when it is merely re-saved."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in _VOLATILE_KEYS}
        return value

    text = json.dumps(strip(raw), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _layer(config: TextConfig, index: int, kind_name: str) -> LayerGeometry:
    kind = _KIND_OF[kind_name]
    if kind is LayerKind.RECURRENT:
        return LayerGeometry(index, kind, state_bytes=_gdn_state_bytes(config))
    q_heads, kv_heads, head_dim = config.heads()
    window = config.native_window() if kind is LayerKind.NATIVE else 0
    return LayerGeometry(index, kind, q_heads, kv_heads, head_dim, head_dim, window)


def _gdn_state_bytes(config: TextConfig) -> int:
    """Bytes of one Gated-DeltaNet layer's state for one request.

    Convolution [2 * key_dim + value_dim, kernel - 1] in the model's dtype (2 bytes at most, as
    served by default) and recurrent [value heads, value dim, key dim] in ``mamba_ssm_dtype``,
    float32 unless stated.
    """
    key_heads = config.positive("linear_num_key_heads")
    value_heads = config.positive("linear_num_value_heads")
    key_dim = config.positive("linear_key_head_dim")
    value_dim = config.positive("linear_value_head_dim")
    kernel = config.positive("linear_conv_kernel_dim")
    conv_channels = 2 * key_heads * key_dim + value_heads * value_dim
    ssm_name = str(config.get("mamba_ssm_dtype", "float32"))
    if ssm_name not in DTYPE_BYTES:
        raise GeometryError(f"config.json: mamba_ssm_dtype {ssm_name!r} unknown")
    conv = conv_channels * (kernel - 1) * 2
    return conv + value_heads * value_dim * key_dim * DTYPE_BYTES[ssm_name]

"""Peak memory of one worker, said before anything is loaded.

Everything grows with the length of a prompt at most linearly: attention is blockwise.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import msgspec
from safetensors import safe_open

from calib_cluster.attention import KEY_TILE, QUERY_BLOCK
from calib_cluster.capture import VOCAB_ROWS
from calib_cluster.worker import DTYPE_BYTES
from kvpolicy.geometry import ModelGeometry

FLOAT32 = 4
TILE_COPIES = 4  # logits, their mask, weights, and one temporary
SLACK = 1.1  # what the allocator keeps beyond what is asked for


class PeakEstimate(msgspec.Struct, frozen=True):
    """Bytes of one worker at its peak: ``runtime`` (libraries, measured), ``weights``, ``hidden``
    (states of its prompts on every trajectory), ``layer`` (one layer's activations) and ``head``
    (output logits of one block)."""

    runtime: int
    weights: int
    hidden: int
    layer: int
    head: int

    @property
    def total(self) -> int:
        """All of it, with slack; a layer's activations and the head are never alive together."""
        return int(SLACK * (self.runtime + self.weights + self.hidden + max(self.layer, self.head)))


def estimate_peak(
    geometry: ModelGeometry,
    model_dir: Path,
    *,
    dtype: str,
    prompts: int,
    length: int,
    trajectories: int,
    codebook: int,
    runtime: int,
) -> PeakEstimate:
    """Peak of a worker that holds ``prompts`` prompts of ``length`` tokens.

    Args:
        trajectories: how many there can be: one per tau.
        codebook: number of finite candidate windows.
        runtime: bytes of the process with its libraries loaded.
    """
    size = DTYPE_BYTES[dtype]
    state = length * geometry.hidden_size * size
    return PeakEstimate(
        runtime=runtime,
        weights=count_weights(model_dir) * size,
        hidden=(prompts * trajectories + trajectories) * state,
        layer=_layer_bytes(geometry, model_dir, length, size, codebook),
        head=3 * VOCAB_ROWS * geometry.vocab_size * FLOAT32,
    )


def _layer_bytes(
    geometry: ModelGeometry, model_dir: Path, length: int, size: int, codebook: int
) -> int:
    layer = max(geometry.attention_layers, key=lambda lyr: lyr.num_q_heads * lyr.head_dim)
    q = layer.num_q_heads * layer.head_dim
    kv = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    projections = length * (4 * q + 2 * kv) * size
    feed_forward = length * (4 * geometry.hidden_size + 3 * _intermediate(model_dir)) * size
    block = min(QUERY_BLOCK, length)
    tiles = TILE_COPIES * layer.num_q_heads * block * min(KEY_TILE, length) * FLOAT32
    outputs = (codebook + 2) * layer.num_q_heads * block * layer.v_head_dim * FLOAT32
    return projections + max(feed_forward, tiles + outputs)


def _intermediate(model_dir: Path) -> int:
    """Widest feed-forward layer in config.json; four hidden sizes if it does not say."""
    raw = json.loads((model_dir / "config.json").read_text())
    text = raw.get("text_config", raw)
    widths = [text.get(f"{kind}intermediate_size") for kind in ("", "moe_", "shared_expert_")]
    known = [width for width in widths if isinstance(width, int)]
    return max(known, default=4 * int(text["hidden_size"]))


def count_weights(model_dir: Path) -> int:
    """Parameters in a folder's safetensors headers; other formats count as 2-byte numbers."""
    total = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total or sum(p.stat().st_size for p in model_dir.glob("pytorch_model*.bin")) // 2

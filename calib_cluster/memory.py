"""Peak memory of one worker, said before anything is loaded.

Everything grows with the length of a prompt at most linearly: attention is blockwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open

from calib_cluster.attention import KEY_TILE, QUERY_BLOCK
from calib_cluster.capture import VOCAB_ROWS
from calib_cluster.cluster import memory_by_node
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import weight_files
from calib_cluster.worker import DTYPE_BYTES, Probe
from kvpolicy.geometry import ModelGeometry

FLOAT32 = 4
TILE_COPIES = 4  # logits, their mask, weights, and one temporary
RECURRENT_COPIES = 4  # chunked, decayed, and two temporaries
SLACK = 1.1  # what the allocator keeps beyond what is asked for


class PeakEstimate(msgspec.Struct, frozen=True):
    """Bytes of one worker at its peak: ``runtime`` (libraries, measured), ``weights``, ``hidden``
    (states of its prompts on every trajectory, or a prompt's cache and kept sets), ``layer`` (one
    layer's activations) and ``head`` (output logits of one block)."""

    runtime: int
    weights: int
    hidden: int
    layer: int
    head: int

    def on_one_device(self, count: int) -> int:
        """Bytes on the fullest of a worker's ``count`` GPUs: weights are spread, states not."""
        spread = self.weights - self.weights // max(1, count)
        return self.total - int(SLACK * spread)

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
        layer=layer_bytes(geometry, model_dir, length, size, codebook),
        head=3 * VOCAB_ROWS * geometry.vocab_size * FLOAT32,
    )


def check_memory(
    estimate: PeakEstimate,
    probes: Sequence[Probe],
    gpus: float,
    advice: str,
    say: Callable[[str], None],
) -> None:
    """Say what a worker needs, and refuse what does not fit where the workers are.

    Args:
        gpus: of each worker.
        advice: what to change if it does not fit.

    Raises:
        CalibrationError: the workers of a node, or of a GPU, need more than is free there.
    """
    parts = ("runtime", "weights", "hidden", "layer", "head")
    told = ", ".join(f"{part} {_gigabytes(getattr(estimate, part))}" for part in parts)
    say(f"peak memory of a worker: about {_gigabytes(estimate.total)} ({told})")
    each = estimate.on_one_device(int(gpus) or 1)
    for node in memory_by_node(probes):
        needed = node.workers * each
        if needed > node.available:
            raise CalibrationError(
                f"not enough memory on {node.node}: {node.workers} worker(s) need about "
                f"{_gigabytes(needed)}, {_gigabytes(node.available)} are free; use {advice}"
            )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def layer_bytes(
    geometry: ModelGeometry, model_dir: Path, length: int, size: int, codebook: int
) -> int:
    """One layer's activations over ``length`` tokens, ``size`` bytes a number, with attention of
    ``codebook`` candidate windows beside the full one."""
    layer = max(geometry.attention_layers, key=lambda lyr: lyr.num_q_heads * lyr.head_dim)
    q = layer.num_q_heads * layer.head_dim
    kv = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    projections = length * (4 * q + 2 * kv) * size
    feed_forward = length * feed_forward_numbers(geometry, model_dir) * size
    recurrent = RECURRENT_COPIES * length * _recurrent_channels(model_dir) * FLOAT32
    block = min(QUERY_BLOCK, length)
    tiles = TILE_COPIES * layer.num_q_heads * block * min(KEY_TILE, length) * FLOAT32
    outputs = (codebook + 2) * layer.num_q_heads * block * layer.v_head_dim * FLOAT32
    return max(projections + max(feed_forward, tiles + outputs), recurrent)


def _text_config(model_dir: Path) -> dict[str, Any]:
    raw = json.loads((model_dir / "config.json").read_text())
    return raw.get("text_config", raw)


def feed_forward_numbers(geometry: ModelGeometry, model_dir: Path) -> int:
    """Numbers a token in a feed-forward layer; each of its experts holds a row of its own."""
    text, hidden = _text_config(model_dir), geometry.hidden_size
    dense = text.get("intermediate_size") or 4 * hidden
    experts = text.get("num_experts_per_tok") or 0
    width = text.get("moe_intermediate_size") or dense
    shared = text.get("shared_expert_intermediate_size") or 0
    return 4 * hidden + max(3 * dense, 3 * experts * (hidden + width) + 3 * shared)


def _recurrent_channels(model_dir: Path) -> int:
    """Channels of a Gated-DeltaNet layer (0 without one), which computes in float32."""
    text = _text_config(model_dir)
    kinds = ("key", "key", "value")
    sizes = [
        text.get(f"linear_num_{kind}_heads", 0) * text.get(f"linear_{kind}_head_dim", 0)
        for kind in kinds
    ]
    return max(sum(sizes), 3 * sizes[-1])  # keys are repeated to the value heads


def count_weights(model_dir: Path) -> int:
    """Parameters in a folder's safetensors headers; other formats count as 2-byte numbers."""
    total = 0
    for path in weight_files(model_dir):
        if path.suffix != ".safetensors":
            total += path.stat().st_size // 2
            continue
        with safe_open(path, framework="numpy") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total

"""Peak memory of a worker that evaluates rewards, said before anything is loaded."""

from __future__ import annotations

import math
from pathlib import Path

from calib_cluster.capture import VOCAB_ROWS
from calib_cluster.compile_worker import Drawing
from calib_cluster.memory import (
    FLOAT32,
    TILE_COPIES,
    PeakEstimate,
    count_weights,
    feed_forward_numbers,
    layer_bytes,
)
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import SOURCES

INT64 = 8


def estimate_reward_peak(
    geometry: ModelGeometry,
    model_dir: Path,
    *,
    length: int,
    continuation: int,
    drawing: Drawing,
    runtime: int,
) -> PeakEstimate:
    """Peak of a worker with prompts of ``length`` tokens and ``continuation`` more.

    ``runtime``: bytes of the process with its libraries loaded. Raises CalibrationError for a model
    that nothing can be frozen of.
    """
    units = len(FreezingUnits.of(geometry))
    total, budget = length + continuation, min(_widest(drawing), length)
    cache = sum(
        layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
        for layer in geometry.attention_layers
    )
    kept = 2 * drawing.draws * units * budget * INT64  # selected, and stacked
    kept += 2 * units * length * INT64
    masses = 2 * units * length * FLOAT32
    layer = max(geometry.attention_layers, key=lambda lyr: lyr.num_q_heads)
    copied = 0
    if drawing.rule.mixes:
        group = layer.num_q_heads // layer.num_kv_heads
        orders = group + 2 * len(SOURCES) + 2 * len(drawing.grid.quotas)
        masses += orders * units * length * FLOAT32
        copied = 3 * layer.num_q_heads * continuation * total * FLOAT32
    return PeakEstimate(
        runtime=runtime,
        weights=count_weights(model_dir) * FLOAT32,
        hidden=length * cache * FLOAT32 + masses + kept,
        layer=max(
            layer_bytes(geometry, model_dir, total, FLOAT32, codebook=0),
            _continuation_bytes(geometry, model_dir, continuation, budget, drawing.batch),
            copied,
        ),
        head=3 * VOCAB_ROWS * geometry.vocab_size * FLOAT32,
    )


def _widest(drawing: Drawing) -> int:
    """Most tokens that any unit may keep in a draw."""
    shares = drawing.grid.shares
    return math.ceil(max(drawing.budgets) * max(shares) / min(shares))


def _continuation_bytes(
    geometry: ModelGeometry, model_dir: Path, continuation: int, budget: int, rows: int
) -> int:
    """One layer of ``rows`` continuations that each read ``budget`` kept tokens of their own."""
    layer = max(geometry.attention_layers, key=lambda lyr: lyr.num_q_heads * lyr.head_dim)
    q, read = layer.num_q_heads * layer.head_dim, budget + continuation
    tokens = rows * continuation
    projections = tokens * (4 * q + 2 * geometry.hidden_size)
    gathered = 2 * rows * layer.num_kv_heads * budget * (layer.head_dim + layer.v_head_dim)
    logits = TILE_COPIES * tokens * layer.num_q_heads * read
    feed_forward = tokens * feed_forward_numbers(geometry, model_dir)
    return FLOAT32 * (projections + max(gathered + logits, feed_forward))

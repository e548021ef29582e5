"""Behaviour policies: which actions are tried."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ALL, ActionGrid, Draws

BEHAVIOURS = ("factorial", "one-at-a-time")
EPSILON = 0.6


def prompt_id(prompt: Sequence[int], continuation: Sequence[int]) -> str:
    """16 hex digits that name a prompt and its continuation by their token ids."""
    digest = hashlib.sha256(f"{len(prompt)} ".encode())
    digest.update(np.array([*prompt, *continuation], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def draw_generator(seed: int, prompt: str, budget: int, part: int = 0) -> np.random.Generator:
    """Random numbers of one prompt and budget: the same for any sharding of the prompts.

    ``prompt`` is a ``prompt_id``; ``part`` counts further draws of the same prompt.
    """
    return np.random.default_rng([seed, int(prompt, 16), budget, part])


def factorial(
    rng: np.random.Generator, count: int, units: int, layers: int, grid: ActionGrid
) -> Draws:
    """Every evaluation draws all weights and all thresholds, uniformly.

    One loss then says something of every state: U + L records an evaluation.
    """
    _check(count, units, layers)
    return Draws(
        rng.integers(0, len(grid.weights), (count, units), dtype=np.uint8),
        rng.integers(0, len(grid.thresholds), (count, layers), dtype=np.uint8),
        np.full(count, ALL, dtype=np.int32),
    )


def mixed(
    rng: np.random.Generator,
    count: int,
    layers: int,
    base_shares: np.ndarray,
    base_mixtures: np.ndarray,
    grid: ActionGrid,
    epsilon: float = EPSILON,
) -> Draws:
    """Factorial draws of a rule that mixes: of each unit, share and mixture are each drawn anew
    with probability ``epsilon`` and are else the base's (indices [U]).

    A policy is only worth what its units do together, so most stay where they would be served.
    """
    units = len(base_shares)
    _check(count, units, layers)

    def drawn(base: np.ndarray, actions: int) -> np.ndarray:
        other = rng.integers(0, actions, (count, units), dtype=np.uint8)
        return np.where(rng.random((count, units)) < epsilon, other, base.astype(np.uint8))

    return Draws(
        np.zeros((count, units), np.uint8),
        np.zeros((count, layers), np.uint8),
        np.full(count, ALL, dtype=np.int32),
        drawn(base_shares, len(grid.shares)),
        drawn(base_mixtures, len(grid.quotas)),
    )


def one_at_a_time(
    rng: np.random.Generator,
    count: int,
    base_weights: np.ndarray,
    base_thresholds: np.ndarray,
    grid: ActionGrid,
) -> Draws:
    """The paper's: one state's action is drawn, all others are those of the current tables.

    ``base_weights`` [U] and ``base_thresholds`` [L] are action indices, the thresholds those of
    the prompt's risk cell. Every pair of a state and one of its actions is as likely.
    """
    units, layers = len(base_weights), len(base_thresholds)
    _check(count, units, layers)
    head_pairs = units * len(grid.weights)
    pairs = rng.integers(0, head_pairs + layers * len(grid.thresholds), count)
    weights = np.tile(base_weights.astype(np.uint8), (count, 1))
    thresholds = np.tile(base_thresholds.astype(np.uint8), (count, 1))
    varied = np.zeros(count, dtype=np.int32)
    for row, pair in enumerate(pairs.tolist()):
        if pair < head_pairs:
            varied[row], weights[row, varied[row]] = divmod(pair, len(grid.weights))
        else:
            layer, action = divmod(pair - head_pairs, len(grid.thresholds))
            varied[row], thresholds[row, layer] = units + layer, action
    return Draws(weights, thresholds, varied)


def _check(count: int, units: int, layers: int) -> None:
    if min(count, units, layers) < 1:
        raise CalibrationError(f"draws need a count, units and layers of at least 1, found {count}")

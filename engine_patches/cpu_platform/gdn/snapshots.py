"""Copying running states to the slots that the prefix cache keeps."""

from __future__ import annotations

import torch


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Of one layer, [slots, ...]: as ``track_mamba_states_all_layers``."""
    track_mamba_states_all_layers(
        conv_states[None], ssm_states[None], cache_indices, mamba_track_mask, mamba_track_indices,
        batch_size, check_freed_slots,
    )  # fmt: skip


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy both states from ``cache_indices`` to ``mamba_track_indices`` (int [B]) in every layer,
    for the rows of ``mamba_track_mask`` (bool [B]) up to ``batch_size``.

    Args:
        conv_states_pool, ssm_states_pool: [layers, slots, ...], written.
        check_freed_slots: slots below 0 are skipped.
    """
    rows = mamba_track_mask[:batch_size].bool()
    source = cache_indices[:batch_size][rows].long()
    target = mamba_track_indices[:batch_size][rows].long()
    if check_freed_slots:
        live = (source >= 0) & (target >= 0)
        source, target = source[live], target[live]
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]

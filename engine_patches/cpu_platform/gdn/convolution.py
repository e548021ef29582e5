"""The short causal convolution before a Gated DeltaNet, with its state in SGLang's pool.

State of a slot: [D, W - 1], the last W - 1 inputs of every channel, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine_patches.cpu_platform.gdn.refused import refuse_given

PAD_SLOT_ID = -1


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    validate_data: bool = False,
    block_table: torch.Tensor | None = None,
    **_kwargs,
) -> torch.Tensor:
    """Convolve N sequences laid end to end, each after its own state.

    Args:
        x: [D, T], all sequences' tokens.
        weight: [D, W]; ``bias`` [D] or None.
        conv_states: [slots, D, W - 1]; those at ``cache_indices`` are written.
        query_start_loc: int [N + 1], where each sequence starts, and the end.
        cache_indices: int [N], slots; ``pad_slot_id`` skips a sequence. None: slots 0..N-1.
        has_initial_state: bool [N]; False (or None) starts from zeros.

    Returns:
        [D, T], a transposed contiguous tensor; zeros where no sequence is.
    """
    starts = query_start_loc.tolist()
    slots = range(len(starts) - 1) if cache_indices is None else cache_indices.tolist()
    resumed = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    out = x.new_zeros(x.shape[1], x.shape[0])
    for slot, begin, end, continued in zip(slots, starts, starts[1:], resumed, strict=False):
        if slot == pad_slot_id or begin == end:
            continue
        state = conv_states[slot] if continued else torch.zeros_like(conv_states[slot])
        past = torch.cat([state.to(x.dtype), x[:, begin:end]], 1)
        out[begin:end] = _convolved(past, weight, bias, activation).T
        conv_states[slot] = past[:, past.shape[1] - state.shape[1] :].to(conv_states.dtype)
    return out.T


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    metadata=None,
    validate_data: bool = False,
) -> torch.Tensor:
    """One token for each of B sequences: [B, D], after the states ``conv_state`` [slots, D, W - 1]
    at ``conv_state_indices`` [B], which are shifted by one. Rows of padded slots are left as they
    came. Raises NotImplementedError for what only speculative decoding gives.
    """
    refuse_given(
        cache_seqlens=cache_seqlens, num_accept_tokens=num_accept_tokens,
        intermediate_conv_window=intermediate_conv_window,
        retrieve_next_token=retrieve_next_token, retrieve_parent_token=retrieve_parent_token,
        more_than_one_token=True if x.ndim != 2 else None,
    )  # fmt: skip
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices.long()
    real = slots != pad_slot_id
    slots, new = slots[real], x[real]
    past = torch.cat([conv_state[slots].to(x.dtype), new[:, :, None]], 2)  # [B, D, W]
    out = x.clone()
    out[real] = _convolved(past, weight, bias, activation)[:, :, 0]
    conv_state[slots] = past[:, :, 1:].to(conv_state.dtype)
    return out


def _convolved(
    past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation
) -> torch.Tensor:
    """[..., D, n] from inputs [..., D, n + W - 1]."""
    out = F.conv1d(past, weight[:, None].to(past.dtype), bias, groups=weight.shape[0])
    return F.silu(out) if activation in ("silu", "swish", True) else out

"""The gated delta rule (Yang et al., Gated Delta Networks) over SGLang's pool of states.

State S of a slot and value head: [V, K], fp32. A token with key k, value v, log decay g and write
strength beta changes it to ``S' = e^g S``, then to ``S' + beta (v - S' k) k^T``; a query reads
``S q``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

CHUNK = 64  # SGLang's: prefix snapshots are taken from the states between chunks
EPSILON = 1e-6  # of SGLang's l2 norm


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength, fp32 [1, T, Hv] each, from ``a``, ``b`` [T, Hv]."""
    step = F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return (-A_log.float().exp() * step)[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill N sequences laid end to end, each from its slot's state, in chunks of ``CHUNK``.

    Args:
        q, k: [1, T, H, K]; v: [1, T, Hv, V]; g (log decay), beta: [1, T, Hv].
        initial_state: fp32 [slots, Hv, V, K]; the end states are written there if
            ``inplace_update``.
        initial_state_indices: int [N] slots. None: slots 0..N-1.
        cu_seqlens: int [N + 1]. None: one sequence.

    Returns:
        [1, T, Hv, V] in v's dtype; None; and fp32 [1, n, Hv, V, K], the states before every chunk
        of every sequence, which prefix snapshots are copied from.
    """
    if head_first:
        raise NotImplementedError("head_first: not on the RaggedKV CPU platform")
    starts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    spans = list(pairwise(starts))
    slots = range(len(spans)) if initial_state_indices is None else initial_state_indices.tolist()
    scale, dtype = q.shape[-1] ** -0.5 if scale is None else scale, v.dtype
    q, k, v, g, beta = (x[0].float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = _l2_normed(q), _l2_normed(k)
    repeats, shape = v.shape[1] // k.shape[1], (v.shape[1], v.shape[2], k.shape[2])
    q, k = (x.repeat_interleave(repeats, 1) for x in (q * scale, k))
    out, before = torch.zeros_like(v), []
    for slot, (begin, end) in zip(slots, spans, strict=True):
        state = v.new_zeros(shape)
        if initial_state is not None:
            state.copy_(initial_state[slot])  # no view: the slot is written below
        for at in range(begin, end, CHUNK):
            part = slice(at, min(at + CHUNK, end))
            before.append(state)
            out[part], state = _chunk(q[part], k[part], v[part], g[part], beta[part], state)
        if initial_state is not None and inplace_update:
            initial_state[slot] = state.to(initial_state.dtype)
    states = torch.stack(before)[None] if before else v.new_zeros(1, 0, *shape)
    return out[None].to(dtype), None, states


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """All tokens of a chunk at once: what each writes, u_i, solves a triangular system.

    ``u_i = beta_i (v_i - e^{c_i} S k_i - sum_{j<i} e^{c_i - c_j} (k_i . k_j) u_j)``, with c the
    running sum of g.

    Args:
        q, k: [n, Hv, K], v: [n, Hv, V], g, beta: [n, Hv], all fp32; state: [Hv, V, K].

    Returns:
        Outputs [n, Hv, V] and the state after the chunk.
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [Hv, n, .]
    decay, beta = g.cumsum(0).T, beta.T[:, :, None]  # [Hv, n], [Hv, n, 1]
    between = (decay[:, :, None] - decay[:, None]).tril().exp().tril()  # e^{c_i - c_j}, j <= i
    since = decay.exp()[:, :, None]
    system = (beta * between * (k @ k.mT)).tril(-1)
    given = beta * (v - since * (k @ state.mT))
    written = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    out = since * (q @ state.mT) + (between * (q @ k.mT)) @ written
    left = (decay[:, -1:] - decay).exp()[:, :, None]
    state = decay[:, -1].exp()[:, None, None] * state + (written * left).mT @ k
    return out.transpose(0, 1), state


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B sequences.

    Args:
        mixed_qkv: [B, H K + H K + Hv V], after the convolution; a, b: [B, Hv].
        initial_state: [slots, Hv, V, K]; those at ``ssm_state_indices`` [B] are updated, slots
            below 0 are padding.
        out: [B, 1, Hv, V], written; zeros for padding.

    Returns:
        ``out`` and ``initial_state``.
    """
    heads, values, keys = initial_state.shape[1:]
    packed = (mixed_qkv.shape[1] - heads * values) // 2
    q, k, v = mixed_qkv.float().split([packed, packed, heads * values], 1)
    q, k = (x.unflatten(1, (-1, keys)) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = _l2_normed(q), _l2_normed(k)
    q, k = (x.repeat_interleave(heads // x.shape[1], 1)[..., None] for x in (q * scale, k))
    g, beta = (x[0, :, :, None, None] for x in fused_gdn_gating(A_log, a, b, dt_bias))
    slots = ssm_state_indices.long()
    real = slots >= 0
    state = initial_state[slots.clamp(min=0)].float() * g.exp()
    state = state + beta * (v.unflatten(1, (heads, values))[..., None] - state @ k) @ k.mT
    out[:, 0] = torch.where(real[:, None, None], (state @ q)[..., 0], 0).to(out.dtype)
    initial_state[slots[real]] = state[real].to(initial_state.dtype)
    return out, initial_state


def _l2_normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()

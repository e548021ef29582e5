"""Gated norms and output gates, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine_patches.cpu_platform.gdn.refused import refuse_given

GATES = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def gated_rms_norm(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """``RMSNorm.forward`` of fla: [T, D], times the gate of z after the norm (or before it, as
    ``norm_before_gate`` says), in ``group_size`` groups."""
    out, gate = x.float(), None if z is None else GATES[self.activation](z.float())
    if gate is not None and not self.norm_before_gate:
        out = out * gate
    grouped = out.unflatten(-1, (-1, self.group_size or out.shape[-1]))
    out = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2) * self.weight.float()
    return (out * gate if gate is not None and self.norm_before_gate else out).to(x.dtype)


def fused_gated_rms_norm(
    self,
    x: torch.Tensor,
    g: torch.Tensor,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor:
    """``FusedRMSNormGated.forward`` of fla: [T, D], the norm of x times the gate of g."""
    refuse_given(residual=residual, prenorm=prenorm)
    out = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
    if self.weight is not None:
        out = out * self.weight.float()
    return (out * GATES[self.activation](g.float())).to(x.dtype)


def fused_sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """``attn_output`` [T, Hq D] times the sigmoid of ``gate``, [T, Hq D] or [T, Hq, D]."""
    refuse_given(quant=quant)
    gated = attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()
    return attn_output.copy_(gated) if inplace else gated.to(attn_output.dtype)


def fused_gate_sigmoid_mul(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor
) -> torch.Tensor:
    """The shared expert's output [T, D] times its gate, the sigmoid of hidden_states . weight."""
    return _gated(hidden_states, gate_weight, shared_output).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """As ``fused_gate_sigmoid_mul``, added to ``final_hidden_states`` [T, D] in place."""
    added = final_hidden_states.float() + _gated(hidden_states, gate_weight, shared_output)
    final_hidden_states.copy_(added)


def _gated(hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """fp32 [T, D]: rounded by the caller, once."""
    return (hidden.float() @ weight.float()).sigmoid()[:, None] * shared.float()

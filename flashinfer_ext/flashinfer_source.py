"""What is compiled of FlashInfer: two attention variants over rows, and their argument lists.

A row is one (request, kv head), a batch entry of FlashInfer with one kv head. Both variants mask by
slot index. Masking acts on scores only: FlashInfer multiplies the value of a masked slot by a
probability of 0, so a masked slot that lies in a listed page before the row's end must hold finite
bytes (an arena starts zeroed, and is only ever written with keys and values). Slots past the
row's end are filled with zeros, pages that are not listed are never read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""Our names of the dtypes that FlashInfer's templates take, and torch's."""
HEAD_DIMS = (64, 128, 256)
DECODE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads of a kv head that the decode template is instantiated for."""

# Soft-capped scores c * tanh(s / c) enter the softmax as tanh(s / c), and c as its scale. tanh is
# 1 - 2 / (1 + e^2x): the template's own is the approximate instruction, off by 5e-4, 0.025 at a cap
# of 50. A row that reads nothing is set to 0, whatever its masked values were.
_SCORES = r"""
  float sm_scale_log2, cap_scale;

  template <typename Params>
  __device__ __host__ void set_scale(const Params& params) {
    const float scale = float(params.sm_scale), cap = float(params.logit_cap);
    cap_scale = cap > 0.f ? scale / cap : 0.f;
    sm_scale_log2 = (cap > 0.f ? cap : scale) * math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (cap_scale == 0.f) return logits;
    const float power = math::ptx_exp2(2.f * math::log2e * cap_scale * logits);
    return 1.f - 2.f * math::ptx_rcp(1.f + power);
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return (m != -math::inf) ? output * math::ptx_rcp(d) : 0.f;
  })
"""

DECODE_VARIANT = (
    r"""
struct RaggedDecode : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  int32_t hole_at, hole_end;
"""
    + _SCORES
    + r"""
  template <typename Params>
  __device__ __host__ RaggedDecode(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    hole_at = params.hole_at[batch_idx];
    hole_end = params.hole_end[batch_idx];
    set_scale(params);
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return int32_t(kv_idx) < hole_at || int32_t(kv_idx) >= hole_end;
  })
};
"""
)
"""Decode: slots [hole_at, hole_end) of a row are masked, all others are read."""

# window_left drives the template's tile skipping. It is per row here, and FlashInfer's planner
# knows only one window per batch, so the runs that skip (part 1) must be planned without KV splits.
PREFILL_VARIANT = (
    r"""
struct RaggedExtend : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  int32_t begin, window, sinks;
  const int32_t* positions;
"""
    + _SCORES
    + r"""
  template <typename Params>
  __device__ __host__ RaggedExtend(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    begin = params.begins[batch_idx];
    window = params.windows[batch_idx];
    sinks = params.sinks[batch_idx];
    positions = params.positions + params.position_starts[batch_idx];
    window_left = params.part == 1 ? uint32_t(window - 1) : kv_len;
    set_scale(params);
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t behind = int32_t(qo_idx) - int32_t(kv_idx);
    if (params.part == 1) return behind < window;
    if (params.part == 2) return behind >= window;
    if (kv_idx >= kv_len) return false;
    const int32_t position = positions[kv_idx];
    const int32_t query = begin + int32_t(qo_idx);
    return position >= 0 && position < begin && (position > query - window || position < sinks);
  })
};
"""
)
"""Prefill, in three parts whose results are merged. 0: history pages, masked by the position of
each slot. 1: the chunk on itself inside the window (causal mode; tiles before the window are
skipped). 2: the chunk's queries on those sinks that lie in the chunk itself, beyond the window."""


@dataclass(frozen=True)
class ModuleSpec:
    """One module to compile: ``kind``, ``head_dim`` (of keys and values), ``dtype`` (our name)."""

    kind: Kind
    head_dim: int
    dtype: str

    @property
    def name(self) -> str:
        """Such as ``ragged_decode_d64_bf16``."""
        return f"ragged_{self.kind}_d{self.head_dim}_{self.dtype}"

    @property
    def variant(self) -> tuple[str, str]:
        """(class name, CUDA source) of the attention variant."""
        if self.kind == "decode":
            return "RaggedDecode", DECODE_VARIANT
        return "RaggedExtend", PREFILL_VARIANT

    @property
    def tensors(self) -> dict[str, str]:
        """Extra tensor arguments in order, with their C element types."""
        if self.kind == "decode":
            return {"hole_at": "int32_t", "hole_end": "int32_t"}
        return {
            "begins": "int32_t", "windows": "int32_t", "sinks": "int32_t",
            "position_starts": "int64_t", "positions": "int32_t",
        }  # fmt: skip

    @property
    def scalars(self) -> dict[str, str]:
        """Extra scalar arguments in order, with their C types."""
        shared = {"sm_scale": "double", "logit_cap": "double"}
        return shared if self.kind == "decode" else {**shared, "part": "int64_t"}

    @property
    def digest(self) -> str:
        """SHA-256 of all that this spec adds to FlashInfer's templates."""
        parts = [self.name, *self.variant, repr(self.tensors), repr(self.scalars)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

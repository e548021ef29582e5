"""Pieces that the Triton decode and extend kernels share."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
UNLIMITED = tl.constexpr(2**31 - 1)


def block_of(size: int) -> int:
    """Elements of a tile that holds ``size``: a power of two, 16 at least, as tl.dot wants."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def load_tile(
    arena,
    pages,
    slots,
    live,
    PART: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[n, BLOCK] vectors of n tokens at (page, slot); zeros where ``live`` is false.

    ``PART`` elements into a page lie the vectors wanted: 0 the keys, P * D the values. Nothing is
    read where ``live`` is false, so stale or NaN slots never enter.
    """
    dims = tl.arange(0, BLOCK)
    base = pages.to(tl.int64) * PAGE_ELEMENTS + PART + slots * DIM
    mask = live[:, None]
    if BLOCK != DIM:
        mask = mask & (dims < DIM)[None, :]
    return tl.load(arena + base[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def scores_of(q, k, scale, CAP: tl.constexpr):
    """float32 [m, n] scores in base 2: scale * q.k, soft-capped at ``CAP`` (0: not)."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP > 0:
        s = CAP * (1.0 - 2.0 / (tl.exp(2.0 * s / CAP) + 1.0))
    return s * LOG2E


@triton.jit
def absorb(s, visible, v, top, mass, acc):
    """Online softmax: take [m, n] base-2 scores and [n, d] values into (top, mass, acc)."""
    s = tl.where(visible, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    floor = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: every weight is 0
    weights = tl.exp2(s - floor[:, None])
    decay = tl.exp2(top - floor)
    mass = mass * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new, mass, acc


@triton.jit
def finish(top, mass, acc):
    """(normalised [m, d], natural log-sum-exp [m]); 0 and -inf where nothing was seen."""
    some = mass > 0
    safe = tl.where(some, mass, 1.0)
    lse = tl.where(some, (top + tl.log2(safe)) * LN2, float("-inf"))
    return acc / safe[:, None], lse

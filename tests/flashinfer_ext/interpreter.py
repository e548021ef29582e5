"""bfloat16 as a GPU computes it, in Triton's CPU interpreter.

The interpreter keeps bfloat16 as raw 16-bit integers. Up to Triton 3.8 its ``dot`` multiplies
those integers, and its cast from float32 cuts bits off instead of rounding to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

STOCK = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def to_bits(values: np.ndarray) -> np.ndarray:
    """The uint16 bits of float32 values rounded to bfloat16, ties to even."""
    tensor = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the view needs strides
    return tensor.bfloat16().view(torch.uint16).numpy()


def to_values(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def dot_is_wrong() -> bool:
    """Whether this process's interpreter fails to multiply bfloat16 values."""
    tile = TensorHandle(to_bits(np.full((16, 16), 1.5)), tl.bfloat16)
    zero = TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
    product = interpreter_builder.create_dot(tile, tile, zero, None, 0)
    return not np.array_equal(product.data, np.full((16, 16), 16 * 2.25, np.float32))


def cast_is_wrong() -> bool:
    """Whether this process's interpreter fails to round float32 to bfloat16."""
    values = np.array([1.00390625, 1.01171875, 1.005, -1.005, 3.0, 0.0], np.float32)
    given = interpreter_builder.create_fp_trunc(TensorHandle(values, tl.float32), tl.bfloat16)
    return not np.array_equal(given.data.view(np.uint16), to_bits(values))


@contextmanager
def real_bfloat16() -> Iterator[None]:
    """Patch the interpreter's ``dot`` and casts while inside, each only if it is wrong."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(to_values(x.data), tl.float32)

    def real_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    def rounding_cast(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16:
            return cast(self, widened(src), dst_type)
        return TensorHandle(to_bits(widened(src).data), tl.bfloat16)

    dot_wrong, cast_wrong = dot_is_wrong(), cast_is_wrong()
    if dot_wrong:
        InterpreterBuilder.create_dot = real_dot
    if cast_wrong:
        InterpreterBuilder.cast_impl = rounding_cast
    try:
        yield
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, cast

"""What the interpreted tests stand on: bfloat16 arithmetic, and where the interpreter is on."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.flashinfer_ext.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled here")

if INTERPRETED:
    from tests.flashinfer_ext import interpreter


@triton.jit
def _product(a, b, out, N: tl.constexpr):
    """out = a @ b, all bfloat16 [N, N]; the sum is rounded from float32."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(out + at, total.to(tl.bfloat16))


def product_error() -> int:
    """Elements of a product of bfloat16 matrices that are not the exact sum, rounded."""
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=gen).bfloat16() for _ in range(2))
    out = torch.zeros(16, 16, dtype=torch.bfloat16)
    _product[(1,)](a, b, out, N=16)
    return int((out != (a.double() @ b.double()).bfloat16()).sum())


def test_bfloat16_products_are_real_and_rounded():
    with interpreter.real_bfloat16():
        assert not interpreter.dot_is_wrong()
        assert not interpreter.cast_is_wrong()
        assert product_error() == 0


def test_the_patch_is_needed_and_taken_back(device):
    """Skipped once Triton does it right: then the patch can go. Uses Triton as it comes."""
    del device  # only after the session's own patch may be on: look beneath it
    builder = interpreter.InterpreterBuilder
    patched = builder.create_dot, builder.cast_impl
    builder.create_dot, builder.cast_impl = interpreter.STOCK
    try:
        if not (interpreter.dot_is_wrong() or interpreter.cast_is_wrong()):
            pytest.skip(f"triton {triton.__version__} multiplies and rounds bfloat16 by itself")
        assert product_error() > 100
        with interpreter.real_bfloat16():
            assert product_error() == 0
        assert (builder.create_dot, builder.cast_impl) == interpreter.STOCK
    finally:
        builder.create_dot, builder.cast_impl = patched


def test_rounding_is_to_nearest_even():
    values = np.array([1.00390625, 1.01171875, -1.005, 0.0, np.inf, 3e38, 1e-40], np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(interpreter.to_values(interpreter.to_bits(values)), expected)
    assert np.isnan(interpreter.to_values(interpreter.to_bits(np.array([np.nan]))))[0]


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="set from outside: all inherit it")
def test_other_processes_do_not_interpret_unless_told(tmp_path):
    from tests.harness.server import Server

    show = "import triton; print(triton.knobs.runtime.interpret)"
    for told, expected in (({}, "False"), ({"TRITON_INTERPRET": "1"}, "True")):
        done = subprocess.run(
            [sys.executable, "-c", show], env={**os.environ, **told}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected
        server = Server(tmp_path, env=told, log=tmp_path / "log")
        assert server.env.get("TRITON_INTERPRET") == told.get("TRITON_INTERPRET")
        server.close()

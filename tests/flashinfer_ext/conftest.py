"""Where the kernels run: in Triton's interpreter on a CPU, compiled on a GPU (marked ``gpu``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Device of the tensors; one or the other in a process, as Triton is set up at its import."""
    if not INTERPRETED:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device, and TRITON_INTERPRET is off")
        yield request.param
        return
    from tests.flashinfer_ext.interpreter import real_bfloat16

    with real_bfloat16():
        yield request.param

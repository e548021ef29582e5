"""Which kernel serves: what each machine gets, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.errors import Refusal
from engine_patches.kernels import choice, flashinfer
from engine_patches.kernels.choice import choose_kernel
from flashinfer_ext.flashinfer_store import VariantError


@pytest.mark.parametrize(
    ("wanted", "device", "interpreted", "kernel"),
    [
        (None, "cuda", False, "triton"),
        (None, "cpu", False, "reference"),
        (None, "cpu", True, "reference"),
        ("reference", "cuda", False, "reference"),
        ("reference", "cuda", True, "reference"),
        (None, "rocm", False, "reference"),
        ("flashinfer", "cuda", False, "flashinfer"),
        ("triton", "cpu", True, "triton"),
    ],
)
def test_a_kernel_is_chosen(wanted, device, interpreted, kernel):
    assert choose_kernel(wanted, device, interpreted) == kernel


@pytest.mark.parametrize(
    ("wanted", "device", "interpreted", "line"),
    [
        ("fa3", "cuda", False, "--kv-kernel fa3 is none of triton, flashinfer, reference"),
        ("triton", "cpu", False, "--kv-kernel triton needs a CUDA GPU; use reference, or set TRI"),
        ("flashinfer", "cpu", True, "--kv-kernel flashinfer needs a CUDA GPU; use reference"),
        (None, "cuda", True, "cannot be compiled with TRITON_INTERPRET set"),
        ("triton", "cuda", True, "cannot be compiled with TRITON_INTERPRET set"),
    ],
)
def test_what_cannot_run_is_refused(wanted, device, interpreted, line):
    with pytest.raises(Refusal, match=line):
        choose_kernel(wanted, device, interpreted)


def test_models_that_no_kernel_covers_are_refused():
    choice.check_model("triton", 32, "torch.bfloat16", "torch.bfloat16")
    with pytest.raises(Refusal, match=r"a KV cache of .*bfloat16 beside a model of "):
        choice.check_model("triton", 4, "torch.float16", "torch.bfloat16")
    with pytest.raises(Refusal, match=r"71 query heads .* --kv-kernel flashinfer; use "):
        choice.check_model("flashinfer", 71, "torch.float16", "torch.float16")


def test_only_triton_is_captured_and_only_the_reference_plans_reads():
    assert [k for k in choice.KERNELS if choice.replays(k)] == ["triton"]
    assert [k for k in choice.KERNELS if not choice.reads_table(k)] == ["reference"]


def test_without_its_modules_triton_serves_and_says_why(monkeypatch, caplog):
    def refuse(*_args):
        raise VariantError("nvcc is missing")

    served = SimpleNamespace(kernel="flashinfer")
    monkeypatch.setattr(flashinfer, "FlashInferKernel", refuse)
    monkeypatch.setattr(flashinfer, "TritonKernel", lambda *args: args)
    assert flashinfer.flashinfer_or_triton(served, "pool", 1) == (served, "pool", 1)
    assert served.kernel == "triton"
    (record,) = caplog.records
    assert record.message.endswith("--kv-kernel triton instead of flashinfer: nvcc is missing")

"""Which kernel serves, decided in the launching process. Imports no kernel."""

from __future__ import annotations

from engine_patches.errors import Refusal

REFERENCE, TRITON, FLASHINFER = "reference", "triton", "flashinfer"
KERNELS = (TRITON, FLASHINFER, REFERENCE)
MOST_QUERY_HEADS = 32


def choose_kernel(wanted: str | None, device: str, interpreted: bool) -> str:
    """The kernel to serve with.

    Args:
        wanted: what ``--kv-kernel`` says, None if it was not given.
        device: the type SGLang serves on, ``cuda`` or ``cpu``.
        interpreted: whether Triton's interpreter is on.

    Raises:
        Refusal: an unknown name, or a kernel that cannot run there.
    """
    kernel = wanted or (TRITON if device == "cuda" else REFERENCE)
    if kernel not in KERNELS:
        raise Refusal(f"--kv-kernel {kernel} is none of {', '.join(KERNELS)}")
    if device == "cuda":
        if interpreted and kernel == TRITON:
            raise Refusal("Triton kernels cannot be compiled with TRITON_INTERPRET set; unset it")
        return kernel
    if kernel == TRITON and not interpreted:
        raise Refusal(
            "--kv-kernel triton needs a CUDA GPU; use reference, or set TRITON_INTERPRET=1 to run "
            "it slowly on the CPU"
        )
    if kernel == FLASHINFER:
        raise Refusal("--kv-kernel flashinfer needs a CUDA GPU; use reference")
    return kernel


def check_model(kernel: str, group: int, dtype: str, kv_dtype: str) -> None:
    """Refuse a model that ``kernel``, other than the reference, does not cover.

    Args:
        group: query heads of a kv head; ``dtype`` of the activations, ``kv_dtype`` of the cache.

    Raises:
        Refusal: naming the property.
    """
    remedy = f"does not work with --kv-kernel {kernel}; use --kv-kernel {REFERENCE}"
    if dtype != kv_dtype:
        raise Refusal(f"a KV cache of {kv_dtype} beside a model of {dtype} {remedy}")
    if group > MOST_QUERY_HEADS:
        raise Refusal(f"{group} query heads of a kv head (more than {MOST_QUERY_HEADS}) {remedy}")


def replays(kernel: str) -> bool:
    """Whether a CUDA graph can capture the kernel's decode steps."""
    return kernel == TRITON


def reads_table(kernel: str) -> bool:
    """Whether decode reads the page table itself, so that a step needs no host plan."""
    return kernel != REFERENCE

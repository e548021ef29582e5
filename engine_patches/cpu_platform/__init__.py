"""SGLang without a GPU, as an out-of-tree platform (entry point ``sglang.srt.platforms``)."""

PLATFORM_CLASS = "engine_patches.cpu_platform.platform:RaggedCpuPlatform"


def activate() -> str | None:
    """Name the platform class, or None wherever SGLang already has a device of its own.

    None when CUDA (or ROCm) or XPU is available, and when the in-tree CPU engine was asked for
    with ``SGLANG_USE_CPU_ENGINE=1``.
    """
    import os

    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return PLATFORM_CLASS

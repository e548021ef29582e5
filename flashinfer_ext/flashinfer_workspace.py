"""Scratch memory of FlashInfer's planner and kernels."""

from __future__ import annotations

import torch

# FlashInfer launches as many blocks as fit on the GPU where it cuts rows: never more than 32 on a
# multiprocessor.
BLOCKS_PER_PROCESSOR = 32


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device, 1 for another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class Workspace:
    """One float buffer, which runs share in stream order, and a pair of plan buffers per plan.

    A plan is written into pinned memory and copied from there without waiting, so each plan of a
    step has a pair of its own, and ``wait`` before the next step's plans are written.
    """

    def __init__(self, float_bytes: int, plan_bytes: int, device: torch.device) -> None:
        self.device = device
        self.floats = torch.empty(float_bytes, dtype=torch.uint8, device=device)
        self.plan_bytes = plan_bytes
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def pair(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(device, pinned) plan buffers number ``index``, uint8. Allocates new numbers."""
        while len(self._pairs) <= index:
            self._pairs.append((
                torch.empty(self.plan_bytes, dtype=torch.uint8, device=self.device),
                torch.empty(
                    self.plan_bytes, dtype=torch.uint8, pin_memory=self._copied is not None
                ),
            ))  # fmt: skip
        return self._pairs[index]

    def grow(self, plan_bytes: int) -> None:
        """Make all pairs at least so large. Call it after ``wait``."""
        if plan_bytes > self.plan_bytes:
            self.plan_bytes = plan_bytes
            self._pairs.clear()

    def wait(self) -> None:
        """Block until the copies before the last ``record`` are made."""
        if self._copied is not None:
            self._copied.synchronize()

    def record(self) -> None:
        """Note the end of a step's plans in the stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))

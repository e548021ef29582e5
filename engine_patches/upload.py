"""Host arrays onto the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on ``device``, copied in stream order.

    From pageable memory CUDA would wait for everything queued before the copy, which may be a
    whole forward; so the copy goes through pinned memory.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

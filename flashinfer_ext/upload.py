"""Host values onto the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values on ``device``, copied in stream order.

    From pageable memory CUDA would wait for everything queued before the copy, which may be a
    whole forward; so the copy goes through pinned memory.
    """
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

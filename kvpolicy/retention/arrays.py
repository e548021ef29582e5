"""Arrays of an artifact: checked once, never changed after."""

from __future__ import annotations

import numpy as np

from kvpolicy.errors import PolicyError


def frozen_array(name: str, array: np.ndarray) -> np.ndarray:
    """A read-only copy. Raises PolicyError unless ``array`` is float32 and finite."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        found = getattr(array, "dtype", type(array).__name__)
        raise PolicyError(f"retention {name} must be a float32 array, found {found}")
    if not np.isfinite(array).all():
        raise PolicyError(f"retention {name} holds a value that is not finite")
    frozen = array.copy()
    frozen.setflags(write=False)
    return frozen

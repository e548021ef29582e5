"""Window policies: how much history each unit keeps, and what its queries may read.

The rule (design section 3): the query at position t of a unit with window w and s sinks reads
keys ``[0, s) U [max(0, t - w + 1), t]``. ``w`` counts the current token, so it equals the
``window_left + 1`` of SGLang and FlashInfer. ``FULL`` means no window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry

FULL = 2**31 - 1
"""int32 sentinel for an unlimited window; a window merely as long as the context is not FULL."""


class Level(msgspec.Struct, frozen=True):
    """Units that share (window, sinks): their pages live and die together.

    ``index`` orders levels by (window, sinks), FULL last; ``units`` is ascending.
    """

    index: int
    window: int
    sinks: int
    units: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """True if these units keep the whole context."""
        return self.window == FULL


@dataclass(frozen=True, eq=False)
class WindowPolicy:
    """A window for every unit, plus the sinks kept by every windowed global unit.

    Args:
        geometry: the model the policy is for.
        windows: int32 [attention layers, max kv heads], each > 0; cells past a layer's kv heads
            are 0. A native layer holds its native window, or FULL to store it at full length
            (its attention stays natively masked either way). Made read-only here.
        sinks: first tokens kept by every windowed GLOBAL unit. FULL units need none; native
            sliding windows have none.

    Raises:
        PolicyError: wrong shape, dtype or value.
    """

    geometry: ModelGeometry
    windows: np.ndarray
    sinks: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise PolicyError(f"sinks must be an integer >= 0, found {self.sinks!r}")
        _check_windows(self.geometry, self.windows)
        frozen = self.windows.copy()
        frozen.setflags(write=False)
        object.__setattr__(self, "windows", frozen)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WindowPolicy):
            return NotImplemented
        same_model = self.geometry.fingerprint() == other.geometry.fingerprint()
        same_levels = self.sinks == other.sinks
        return same_model and same_levels and np.array_equal(self.windows, other.windows)

    __hash__ = None

    @classmethod
    def full(cls, geometry: ModelGeometry) -> WindowPolicy:
        """Everything stored at full length, native layers too: what stock SGLang holds."""
        return cls(geometry, _matrix(geometry, lambda layer: FULL))

    @classmethod
    def native(cls, geometry: ModelGeometry) -> WindowPolicy:
        """Native layers store only their native window; global layers keep everything."""
        return cls(geometry, _matrix(geometry, _native_or_full))

    @classmethod
    def uniform(cls, geometry: ModelGeometry, window: int, sinks: int = 0) -> WindowPolicy:
        """Every global unit gets ``window`` and ``sinks``; native layers as in ``native``.

        Raises:
            PolicyError: window not in 1..FULL, or negative sinks.
        """
        if isinstance(window, bool) or not isinstance(window, int) or not 0 < window <= FULL:
            raise PolicyError(f"window must be an integer in 1..{FULL} (full), found {window!r}")
        return cls(geometry, _matrix(geometry, lambda lyr: lyr.native_window or window), sinks)

    @cached_property
    def _units(self) -> np.ndarray:
        rows = zip(self.geometry.attention_layers, self.windows, strict=True)
        units = np.concatenate([row[: layer.num_kv_heads] for layer, row in rows])
        units.setflags(write=False)
        return units

    @cached_property
    def _unit_layers(self) -> list[LayerGeometry]:
        layers = self.geometry.attention_layers
        return [layer for layer in layers for _ in range(layer.num_kv_heads)]

    def for_units(self) -> np.ndarray:
        """Storage window of each unit: int32 [num_units], read-only."""
        return self._units

    def attention_for_units(self) -> np.ndarray:
        """Window that attention applies per unit: int32 [num_units].

        Differs from ``for_units`` only where a native layer is stored at full length.
        """
        native = [layer.native_window or FULL for layer in self._unit_layers]
        return np.minimum(self._units, np.array(native, dtype=np.int32))

    def sinks_for_units(self) -> np.ndarray:
        """Sinks of each unit: int32 [num_units]; 0 for FULL and for native units."""
        is_global = np.array([layer.kind is LayerKind.GLOBAL for layer in self._unit_layers])
        return np.where(is_global & (self._units != FULL), self.sinks, 0).astype(np.int32)

    @cached_property
    def _levels(self) -> tuple[Level, ...]:
        members: dict[tuple[int, int], list[int]] = {}
        keys = zip(self._units.tolist(), self.sinks_for_units().tolist(), strict=True)
        for unit, key in enumerate(keys):
            members.setdefault(key, []).append(unit)
        ordered = sorted(members.items())
        return tuple(Level(i, w, s, tuple(units)) for i, ((w, s), units) in enumerate(ordered))

    def levels(self) -> tuple[Level, ...]:
        """Units grouped by (window, sinks), ordered by window then sinks."""
        return self._levels


def _native_or_full(layer: LayerGeometry) -> int:
    return layer.native_window or FULL


def _matrix(geometry: ModelGeometry, window_of: Callable[[LayerGeometry], int]) -> np.ndarray:
    windows = np.zeros((len(geometry.attention_layers), geometry.max_kv_heads), dtype=np.int32)
    for row, layer in zip(windows, geometry.attention_layers, strict=True):
        row[: layer.num_kv_heads] = window_of(layer)
    return windows


def _check_windows(geometry: ModelGeometry, windows: np.ndarray) -> None:
    shape = (len(geometry.attention_layers), geometry.max_kv_heads)
    if not isinstance(windows, np.ndarray) or windows.dtype != np.int32:
        found = getattr(windows, "dtype", type(windows).__name__)
        raise PolicyError(f"windows must be an int32 array, found {found}")
    if windows.shape != shape:
        raise PolicyError(f"windows must have shape {list(shape)}, found {list(windows.shape)}")
    for row, layer in zip(windows, geometry.attention_layers, strict=True):
        heads = layer.num_kv_heads
        if (row[:heads] <= 0).any() or row[heads:].any():
            raise PolicyError(
                f"windows of layer {layer.layer_id} must be positive for its {heads} kv heads "
                "and 0 beyond them"
            )
        if layer.kind is LayerKind.NATIVE:
            _check_native(layer, row[:heads])


def _check_native(layer: LayerGeometry, row: np.ndarray) -> None:
    foreign = row[(row != layer.native_window) & (row != FULL)]
    if foreign.size:
        raise PolicyError(
            f"layer {layer.layer_id} has a native window of {layer.native_window}; a policy must "
            f"keep it (or store it full), found {int(foreign[0])}"
        )

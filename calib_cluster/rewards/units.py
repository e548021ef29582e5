"""The units of a model that a freeze touches, as rewards number them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calib_cluster.errors import CalibrationError
from kvpolicy.geometry import LayerKind, ModelGeometry
from kvpolicy.retention import retention_units
from kvpolicy.windows import WindowPolicy


@dataclass(frozen=True, eq=False)
class FreezingUnits:
    """U units of L freezing layers: every kv head of every global layer, in unit order.

    ``layers``, ``heads`` int64 [U]: row of the tables (attention layers in execution order) and kv
    head. ``layer_ids`` [L]: the freezing layers among all layers of the model.
    """

    layers: np.ndarray
    heads: np.ndarray
    layer_ids: tuple[int, ...]

    @classmethod
    def of(cls, geometry: ModelGeometry) -> FreezingUnits:
        """The units of ``geometry`` without any window policy.

        Raises:
            CalibrationError: no global layer.
        """
        kinds = {layer.kind for layer in geometry.layers}
        if LayerKind.GLOBAL not in kinds:
            raise CalibrationError(
                f"{geometry.architecture} has no global layer: nothing to freeze"
            )
        _, layers, heads = retention_units(WindowPolicy.native(geometry))
        ids = [geometry.attention_layers[row].layer_id for row in np.unique(layers)]
        return cls(layers, heads, tuple(ids))

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [L], row of each freezing layer in the tables, ascending."""
        return np.unique(self.layers)

    @cached_property
    def place(self) -> np.ndarray:
        """int64 [U], which freezing layer (0..L-1) each unit belongs to."""
        return np.searchsorted(self.rows, self.layers)

    @cached_property
    def slices(self) -> dict[int, slice]:
        """The units of each freezing layer, by layer id."""
        starts = np.searchsorted(self.place, np.arange(len(self.layer_ids) + 1)).tolist()
        return {
            layer: slice(first, last)
            for layer, first, last in zip(self.layer_ids, starts, starts[1:], strict=False)
        }

    def __len__(self) -> int:
        return len(self.layers)

"""What a report is made from, and the figures its sections share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from calib_cluster.errors import CalibrationError
from kvpolicy.artifact import PointSpec
from kvpolicy.evidence import Evidence, HeldOut
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.windows import FULL

_CONTEXTS = (2048, 8192, 32768)


@dataclass(frozen=True)
class ReportInput:
    """Everything a report says. ``points`` share one geometry and one sink count.

    ``evidence.mean_cosine`` is float64 [points, attention layers, max kv heads, codebook].

    Raises:
        CalibrationError: no points, an unknown default point, points of different models or
            sinks, a model without global units, or evidence of another shape.
    """

    model_name: str
    policy_name: str
    points: Sequence[PointSpec]
    default_point: str
    evidence: Evidence
    held_out: HeldOut | None
    calibration: CalibrationRecord

    def __post_init__(self) -> None:
        names = [point.name for point in self.points]
        if not names:
            raise CalibrationError("a report needs at least one point")
        if self.default_point not in names:
            raise CalibrationError(
                f"default point {self.default_point!r} is not among the points: {', '.join(names)}"
            )
        kinds = {(p.policy.geometry.fingerprint(), p.policy.sinks) for p in self.points}
        if len(kinds) != 1:
            raise CalibrationError("points of a report must share one model and one sink count")
        if not self.num_global_units:
            raise CalibrationError("the model has no unit that calibration could give a window")
        self._check_evidence()

    def _check_evidence(self) -> None:
        codebook = self.evidence.codebook
        geom = self.geometry
        want = (len(self.points), len(geom.attention_layers), geom.max_kv_heads, len(codebook))
        found = self.evidence.mean_cosine.shape
        if found != want:
            raise CalibrationError(
                f"mean cosines must have shape {list(want)} (points, attention layers, kv heads, "
                f"codebook), found {list(found)}"
            )

    @property
    def geometry(self) -> ModelGeometry:
        """Geometry shared by all points."""
        return self.points[0].policy.geometry

    @property
    def sinks(self) -> int:
        """First tokens kept by every windowed global unit."""
        return self.points[0].policy.sinks

    @property
    def default_index(self) -> int:
        """Index of the default point."""
        return [point.name for point in self.points].index(self.default_point)

    @cached_property
    def global_rows(self) -> tuple[tuple[int, LayerGeometry], ...]:
        """(row of a window matrix, layer) of every calibrated layer."""
        layers = enumerate(self.geometry.attention_layers)
        return tuple((row, layer) for row, layer in layers if layer.kind is LayerKind.GLOBAL)

    @property
    def num_global_units(self) -> int:
        """Units the calibration chose windows for."""
        return sum(layer.num_kv_heads for _, layer in self.global_rows)

    @property
    def native_windows(self) -> tuple[int, ...]:
        """Distinct native windows of the model, ascending; empty if it has none."""
        layers = self.geometry.attention_layers
        return tuple(sorted({layer.native_window for layer in layers if layer.native_window}))

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Ordered scale of the maps: the codebook, any other chosen window, then FULL."""
        return tuple(sorted({*self.evidence.codebook, FULL, *self._chosen_anywhere()}))

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Contexts of the tables, in tokens: those below the model's maximum, then it."""
        longest = self.geometry.max_context
        return (*(c for c in _CONTEXTS if c < longest), longest)

    def chosen(self, index: int) -> list[int]:
        """Windows of all calibrated units of point ``index``, by layer then kv head."""
        windows = self.points[index].policy.windows
        return [
            w
            for row, layer in self.global_rows
            for w in windows[row, : layer.num_kv_heads].tolist()
        ]

    def _chosen_anywhere(self) -> set[int]:
        return {window for index in range(len(self.points)) for window in self.chosen(index)}

"""What differs between two points, of one artifact or of two for the same model."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from kvpolicy.artifact import RESIDENCY_CONTEXTS, Artifact, describe
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerKind
from kvpolicy.manifest import Manifest, Point
from kvpolicy.residency import residency
from kvpolicy.windows import WindowPolicy


class Change(msgspec.Struct, frozen=True):
    """A unit whose windows differ: its layer id (over all layers), kv head, and both windows."""

    layer_id: int
    head: int
    window_a: int
    window_b: int


class Difference(msgspec.Struct, frozen=True):
    """A manifest entry that differs, as text; None where one side has no such entry."""

    field: str
    a: str | None
    b: str | None


class Comparison(msgspec.Struct, frozen=True):
    """Point ``point_a`` of policy ``a`` beside ``point_b`` of ``b``.

    ``residency`` maps a context in tokens to both shares. ``spearman`` correlates the windows over
    global units (full ranks highest); None where one side gives every unit the same window.
    """

    a: str
    b: str
    point_a: str
    point_b: str
    units: int
    changes: tuple[Change, ...]
    residency: dict[int, tuple[float, float]]
    spearman: float | None
    manifest: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether neither windows, sinks, retention nor the way they were made differ."""
        return not self.changes and not self.manifest


def compare(
    a: Artifact, b: Artifact, point_a: str | None = None, point_b: str | None = None
) -> Comparison:
    """Compare two points (default: each artifact's default point).

    Raises:
        PolicyError: made for models of different geometry, or no such point.
    """
    if a.manifest.model.geometry_hash != b.manifest.model.geometry_hash:
        raise PolicyError(
            f"{a.policy_id} and {b.policy_id} are for different models: "
            f"{describe(a.geometry)} and {describe(b.geometry)}"
        )
    point_a = point_a or a.manifest.default_point
    point_b = point_b or b.manifest.default_point
    policy_a, policy_b = a.policy(point_a), b.policy(point_b, a.geometry)
    return Comparison(
        a=a.policy_id,
        b=b.policy_id,
        point_a=point_a,
        point_b=point_b,
        units=a.geometry.num_units,
        changes=_changes(policy_a, policy_b),
        residency=_residencies(policy_a, policy_b),
        spearman=spearman(_global_windows(policy_a), _global_windows(policy_b)),
        manifest=_differences(_record(a, point_a), _record(b, point_b)),
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation of two vectors [n], ties at their average rank.

    None if undefined: fewer than two values, or one side constant.
    """
    if len(a) < 2:
        return None
    ranks = [average_ranks(values) for values in (a, b)]
    x, y = (rank - rank.mean() for rank in ranks)
    scale = np.sqrt((x @ x) * (y @ y))
    return float(np.clip((x @ y) / scale, -1.0, 1.0)) if scale > 0 else None


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 of a vector [n], ascending; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _global_windows(policy: WindowPolicy) -> np.ndarray:
    layers = policy.geometry.attention_layers
    mask = [layer.kind is LayerKind.GLOBAL for layer in layers for _ in range(layer.num_kv_heads)]
    return policy.for_units()[np.array(mask)]


def _changes(a: WindowPolicy, b: WindowPolicy) -> tuple[Change, ...]:
    before, after = a.for_units(), b.for_units()
    return tuple(
        Change(*a.geometry.head_of(int(unit)), int(before[unit]), int(after[unit]))
        for unit in np.flatnonzero(before != after)
    )


def _residencies(a: WindowPolicy, b: WindowPolicy) -> dict[int, tuple[float, float]]:
    geom = a.geometry
    contexts = [c for c in RESIDENCY_CONTEXTS if c < geom.max_context] + [geom.max_context]
    return {c: (residency(a, geom, c), residency(b, geom, c)) for c in contexts}


def _record(artifact: Artifact, point: str) -> dict[str, str]:
    """What made a point and how prompts are frozen, as flat text entries."""
    return _point_record(artifact.manifest, point) | _retention_record(artifact)


def _retention_record(artifact: Artifact) -> dict[str, str]:
    tables = artifact.retention
    if tables is None:
        return {"retention": "none"}
    record = {"retention": tables.rule.name}
    for option in tables.rule.options.split():
        name, _, value = option.partition("=")
        record[f"retention {name}"] = value
    record["retention budgets"] = ", ".join(map(str, tables.budgets)) or "none"
    for name, array in tables.to_tensors().items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        record[f"retention table {name}"] = f"{digest[:12]} {list(array.shape)}"
    return record


def _point_record(manifest: Manifest, point: str) -> dict[str, str]:
    chosen: Point = manifest.points[manifest.point_index(point)]
    record = {"sinks": str(manifest.sinks), "config hash": manifest.model.config_hash}
    record |= {"tau": str(chosen.tau), "fidelity": str(chosen.fidelity)}
    for file, digest in (manifest.model.weight_hashes or {}).items():
        record[f"weights {file}"] = digest
    calibration = manifest.calibration
    if calibration is None:
        return record | {"method": "not calibrated"}
    for field in ("method", "prompts", "tokens", "seed", "code_version"):
        record[field.replace("_", " ")] = str(getattr(calibration, field))
    for corpus, digest in calibration.corpora.items():
        record[f"corpus {corpus}"] = digest
    for name, value in calibration.hyperparameters.items():
        record[f"setting {name}"] = str(value)
    return record


def _differences(a: dict[str, str], b: dict[str, str]) -> tuple[Difference, ...]:
    fields = [*a, *(field for field in b if field not in a)]
    return tuple(
        Difference(field, a.get(field), b.get(field))
        for field in fields
        if a.get(field) != b.get(field)
    )

"""What differs between two points, of one artifact or of two for the same model."""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np

from kvpolicy.artifact import RESIDENCY_CONTEXTS, Artifact, describe
from kvpolicy.errors import PolicyError
from kvpolicy.evidence import calibratable
from kvpolicy.geometry import LayerKind
from kvpolicy.manifest import Manifest, Point
from kvpolicy.mix_view import quota_parts, retrieving
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


class ShareChange(msgspec.Struct, frozen=True):
    """A kv head whose compiled share differs: its layer id, head, and both shares."""

    layer_id: int
    head: int
    a: float
    b: float


class MixChange(msgspec.Struct, frozen=True):
    """Two mixes at one ``budget`` in tokens, each by the tables that serve it.

    Over the ``heads`` that a freeze can read: ``shares`` that differ, the largest ratio first;
    ``spearman`` of the shares (None where one side has a single share); ``mixtures``, heads whose
    quotas are in another proportion. ``retrieving``: query heads that count in the retrieval source
    of each side (``mix_view.retrieving``).
    """

    budget: int
    heads: int
    shares: tuple[ShareChange, ...]
    spearman: float | None
    mixtures: int
    retrieving: tuple[int, int]


class Comparison(msgspec.Struct, frozen=True):
    """Point ``point_a`` of policy ``a`` beside ``point_b`` of ``b``.

    ``residency`` maps a context in tokens to both shares. ``spearman`` correlates the windows over
    global units (full ranks highest); None where one side gives every unit the same window.
    ``mix`` has an entry for each budget that either side is compiled for, where both are mixes and
    their tables differ.
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
    mix: tuple[MixChange, ...] = ()

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
        mix=_mix_changes(a, b),
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


def _mix_changes(a: Artifact, b: Artifact) -> tuple[MixChange, ...]:
    tables = a.retention, b.retention
    if any(side is None or side.mix is None for side in tables):
        return ()
    arrays = [side.mix.to_tensors() for side in tables]
    same = all(np.array_equal(x, arrays[1][name]) for name, x in arrays[0].items())
    if same and tables[0].budgets == tables[1].budgets:
        return ()
    budgets = sorted({budget for side in tables for budget in side.budgets})
    return tuple(_mix_change(a, b, budget) for budget in budgets)


def _mix_change(a: Artifact, b: Artifact, budget: int) -> MixChange:
    heads, sides = calibratable(a.geometry), (a.retention, b.retention)
    index = [side.budget_index(budget) for side in sides]
    shares = [side.mix.shares[i] for side, i in zip(sides, index, strict=True)]
    quotas = [quota_parts(side.mix.quotas[i]) for side, i in zip(sides, index, strict=True)]
    places = np.argwhere(heads & (shares[0] != shares[1]))
    layers = a.geometry.attention_layers
    changes = [
        ShareChange(layers[row].layer_id, head, *(float(side[row, head]) for side in shares))
        for row, head in places.tolist()
    ]
    changes.sort(key=lambda change: -abs(math.log(change.a / change.b)))
    return MixChange(
        budget=budget,
        heads=int(heads.sum()),
        shares=tuple(changes),
        spearman=spearman(*(side[heads].astype(np.float64) for side in shares)),
        mixtures=int((quotas[0] != quotas[1])[heads].any(axis=-1).sum()),
        retrieving=tuple(retrieving(side.mix, a.geometry)[0] for side in sides),
    )


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
    origin = artifact.manifest.retention.transferred
    if origin is not None:
        record["retention transferred"] = origin.policy
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

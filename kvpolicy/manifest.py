"""The manifest of a policy artifact: its schema and its content version.

The version is the first 12 hex digits of a sha256 over everything that defines the policy: the
manifest's own fields and the bytes of every tensor. Library versions, the model folder's name,
element sizes and file hashes are left out, so the same policy has the same version everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import msgspec
import numpy as np

from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention.rule import RetentionRule
from kvpolicy.transfer import TransferRecord

SCHEMA_VERSION = 1
KIND_WINDOWS = "windows"
KIND_RETENTION = "retention"
VERSION_DIGITS = 12


class ModelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model a policy was made for.

    ``geometry_hash`` (``ModelGeometry.fingerprint``) must match on load; ``config_hash`` and
    ``weight_hashes`` (file name -> sha256) record provenance and are not enforced, so that a
    fine-tune of the same geometry may try the policy.
    """

    name: str
    geometry_hash: str
    config_hash: str
    geometry: ModelGeometry
    weight_hashes: dict[str, str] | None = None


class CalibrationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a policy was calibrated: ``corpora`` maps a name to its content's sha256; ``prompts``
    and ``tokens`` are counts; ``hyperparameters`` holds every other setting."""

    method: str
    corpora: dict[str, str]
    prompts: int
    tokens: int
    seed: int
    code_version: str
    hyperparameters: dict[str, str | int | float | bool | list[int | float] | None]


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operating point: a row of the windows tensor.

    ``residency`` maps a context (tokens) to the exact kept share of the global units' tokens;
    ``tau`` and ``fidelity`` are set by calibration only.
    """

    name: str
    residency: dict[int, float]
    tau: float | None = None
    fidelity: float | None = None


class RetentionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The retention part of a policy: its rule, the budgets in tokens that its gate was compiled
    for (one per row of the ``gate`` tensor), and how the tables were compiled (None: they were
    not). With ``transferred`` they were taken from another model's policy, and ``calibration`` is
    that one's."""

    rule: RetentionRule
    budgets: tuple[int, ...]
    calibration: CalibrationRecord | None = None
    transferred: TransferRecord | None = None


# omit_defaults: a policy without retention is written as before there was any
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``manifest.json``. ``files`` maps every other file of the folder to its sha256.

    ``calibration`` is the windows'; ``retention`` is None in a policy of windows only.
    """

    schema_version: int
    name: str
    version: str
    kinds: tuple[str, ...]
    model: ModelRecord
    calibration: CalibrationRecord | None
    sinks: int
    points: tuple[Point, ...]
    default_point: str
    files: dict[str, str]
    created_with: dict[str, str]
    retention: RetentionRecord | None = None

    def point_index(self, name: str) -> int | None:
        """Row of point ``name`` in the windows tensor, or None."""
        names = [point.name for point in self.points]
        return names.index(name) if name in names else None


def kinds_of(retention: RetentionRecord | None) -> tuple[str, ...]:
    """What a manifest's ``kinds`` must say."""
    return (KIND_WINDOWS,) if retention is None else (KIND_WINDOWS, KIND_RETENTION)


def content_version(manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> str:
    """Version of a policy: 12 hex digits over its defining fields and tensors.

    ``manifest.version``, ``files``, ``created_with`` and the model's folder name and dtype do not
    take part.
    """
    model = manifest.model
    record = {
        "schema_version": manifest.schema_version,
        "name": manifest.name,
        "kinds": manifest.kinds,
        "model": [model.geometry_hash, model.config_hash, model.weight_hashes],
        "calibration": manifest.calibration,
        "sinks": manifest.sinks,
        "points": manifest.points,
        "default_point": manifest.default_point,
        "tensors": {name: _tensor_record(tensors[name]) for name in sorted(tensors)},
    }
    if manifest.retention is not None:  # absent, not null: older policies keep their version
        record["retention"] = _retention_identity(manifest.retention)
    plain = msgspec.to_builtins(record, str_keys=True)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:VERSION_DIGITS]


def _retention_identity(record: RetentionRecord) -> dict[str, object]:
    # only what differs from the paper: an option that a later release adds moves no version
    rule = record.rule
    identity: dict[str, object] = {
        "rule": [rule.name, rule.departures],
        "budgets": record.budgets,
        "calibration": record.calibration,
    }
    if record.transferred is not None:
        identity["transferred"] = record.transferred.identity
    return identity


def _tensor_record(tensor: np.ndarray) -> dict[str, object]:
    # little-endian bytes, so that the hash does not depend on the machine
    data = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    return {
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(data.tobytes()).hexdigest(),
    }

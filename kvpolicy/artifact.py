"""Write and strictly load policy artifacts (format: ``artifacts/README.md``).

An artifact is a folder ``<root>/<model>/<policy>/<version>/`` with ``manifest.json`` and
``policy.safetensors``. It is written whole or not at all, and loaded whole or refused with one
``PolicyError``: unknown field, wrong hash, wrong geometry, missing or unlisted file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from kvpolicy.errors import KvPolicyError, PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.manifest import (
    SCHEMA_VERSION,
    CalibrationRecord,
    Manifest,
    ModelRecord,
    Point,
    RetentionRecord,
    content_version,
    kinds_of,
)
from kvpolicy.names import check_name
from kvpolicy.names import folder_name as folder_name  # a writer needs it with write_artifact
from kvpolicy.residency import residency
from kvpolicy.retention.tables import RetentionTables
from kvpolicy.transfer import TransferRecord
from kvpolicy.windows import WindowPolicy

MANIFEST_FILE = "manifest.json"
TENSOR_FILE = "policy.safetensors"
WINDOWS_TENSOR = "windows"
RESIDENCY_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True)
class Artifact:
    """A verified artifact. ``windows`` is int32 [points, attention layers, max kv heads];
    ``retention`` holds the tables that every point shares, None in a policy of windows only."""

    path: Path
    manifest: Manifest
    windows: np.ndarray
    retention: RetentionTables | None = None

    @property
    def policy_id(self) -> str:
        """``name@version``."""
        return f"{self.manifest.name}@{self.manifest.version}"

    @property
    def geometry(self) -> ModelGeometry:
        """Geometry of the model the artifact was made for."""
        return self.manifest.model.geometry

    def policy(self, point: str | None = None, geom: ModelGeometry | None = None) -> WindowPolicy:
        """Windows of one operating point (default: the manifest's ``default_point``).

        ``geom`` replaces the recorded geometry, e.g. to use the served model's dtype.

        Raises:
            PolicyError: no such point.
        """
        name = point if point is not None else self.manifest.default_point
        index = self.manifest.point_index(name)
        if index is None:
            known = ", ".join(p.name for p in self.manifest.points)
            raise PolicyError(f"policy {self.policy_id} has no point {name!r}; it has: {known}")
        return WindowPolicy(geom or self.geometry, self.windows[index], self.manifest.sinks)


@dataclass(frozen=True)
class PointSpec:
    """One point to write: its name, its policy, and calibration's figures where there are any."""

    name: str
    policy: WindowPolicy
    tau: float | None = None
    fidelity: float | None = None


def write_artifact(
    root: str | Path,
    *,
    model_name: str,
    name: str,
    points: Sequence[PointSpec],
    default_point: str | None = None,
    calibration: CalibrationRecord | None = None,
    weight_hashes: dict[str, str] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    retention: RetentionTables | None = None,
    retention_calibration: CalibrationRecord | None = None,
    transferred: TransferRecord | None = None,
) -> Path:
    """Write ``root/model_name/name/<version>/`` and return its path.

    All points share one geometry, one sink count and the retention tables, if any.
    ``calibration`` is how the windows were made, ``retention_calibration`` the tables, which
    ``transferred`` says are another model's. The folder appears by one rename, after its files are
    on disk; an interrupted write leaves nothing visible. Writing what is already there returns the
    existing folder.

    Raises:
        PolicyError: bad names or points, an existing folder of that version that is damaged, or
            a folder that cannot be written.
    """
    check_name(model_name, "model name")
    tensors = {WINDOWS_TENSOR: _stack(points)}
    record = _retention_record(retention, retention_calibration, transferred)
    if retention is not None:
        _check_retention(retention, record, points[0].policy.geometry)
        tensors |= retention.to_tensors()
    data = save_tensors(tensors)
    files = {**_checked_extras(extra_files or {}), TENSOR_FILE: data}
    check_name(name)
    manifest = _build_manifest(
        model_name, name, points, default_point, calibration, weight_hashes, files, record
    )
    manifest = msgspec.structs.replace(manifest, version=content_version(manifest, tensors))
    files[MANIFEST_FILE] = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    target = Path(root) / model_name / name / manifest.version
    if target.exists():
        load_artifact(target)
        return target
    try:
        _publish(target, files)
    except OSError as error:
        if not target.exists():
            raise PolicyError(f"cannot write {target}: {error.strerror or error}") from None
        load_artifact(target)  # another writer of the same version was faster
    return target


def load_artifact(path: str | Path, geom: ModelGeometry | None = None) -> Artifact:
    """Load and verify one artifact folder; with ``geom``, also that it fits that model.

    Raises:
        PolicyError: anything missing, unlisted, malformed, altered, or made for another model.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_files(folder, manifest)
    tensors = _read_tensors(folder, manifest)
    windows = _checked_windows(folder, manifest, tensors)
    expected = content_version(manifest, tensors)
    if expected != manifest.version:
        raise PolicyError(
            f"{folder}: content does not match version {manifest.version} (it hashes to "
            f"{expected}); the manifest was edited or damaged"
        )
    artifact = Artifact(folder, manifest, windows, _retention_tables(folder, manifest, tensors))
    _check_points(artifact)
    if geom is not None:
        check_fits(artifact, geom)
    return artifact


def read_manifest(folder: Path) -> Manifest:
    """Parse ``manifest.json`` strictly, without reading tensors. Raises PolicyError."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise PolicyError(f"{folder} is not a policy: no {MANIFEST_FILE}")
    try:
        manifest = msgspec.json.decode(_read(path), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is malformed: {error}") from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise PolicyError(
            f"{path}: schema_version {manifest.schema_version} unknown; accepted: {SCHEMA_VERSION}"
        )
    wanted = kinds_of(manifest.retention)
    if manifest.kinds != wanted:
        raise PolicyError(
            f"{path}: kinds {list(manifest.kinds)} unknown or not what it holds; accepted: "
            f"{list(wanted)}"
        )
    if manifest.model.geometry.fingerprint() != manifest.model.geometry_hash:
        raise PolicyError(f"{path}: recorded geometry does not match its hash")
    return manifest


def check_fits(artifact: Artifact, geom: ModelGeometry) -> None:
    """Raise PolicyError unless ``artifact`` was made for a model of geometry ``geom``."""
    recorded = artifact.manifest.model
    if recorded.geometry_hash != geom.fingerprint():
        raise PolicyError(
            f"policy {artifact.policy_id} was made for {recorded.name} "
            f"({describe(recorded.geometry)}), not for this model ({describe(geom)})"
        )


def describe(geom: ModelGeometry) -> str:
    """One-line summary of a geometry for messages."""
    layer = geom.attention_layers[0]
    return (
        f"{geom.architecture}, {len(geom.layers)} layers, {geom.num_units} kv units, "
        f"head_dim {layer.head_dim}, geometry {geom.fingerprint()[:12]}"
    )


def _checked_extras(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    for name in files:
        if name in (MANIFEST_FILE, TENSOR_FILE) or Path(name).name != name:
            raise PolicyError(f"extra file {name!r} is not a plain, free file name")
    return files


def _stack(points: Sequence[PointSpec]) -> np.ndarray:
    if not points:
        raise PolicyError("a policy needs at least one point")
    if len({point.name for point in points}) != len(points):
        raise PolicyError("points must have distinct names")
    first = points[0].policy
    for point in points:
        if point.policy.geometry.fingerprint() != first.geometry.fingerprint():
            raise PolicyError(f"point {point.name!r} is for another model than the first point")
        if point.policy.sinks != first.sinks:
            raise PolicyError(f"point {point.name!r} has other sinks than the first point")
    return np.stack([point.policy.windows for point in points])


def _build_manifest(
    model_name: str,
    name: str,
    points: Sequence[PointSpec],
    default_point: str | None,
    calibration: CalibrationRecord | None,
    weight_hashes: dict[str, str] | None,
    files: Mapping[str, bytes],
    retention: RetentionRecord | None,
) -> Manifest:
    geometry = points[0].policy.geometry
    default = default_point if default_point is not None else points[0].name
    if default not in {point.name for point in points}:
        raise PolicyError(f"default point {default!r} is not among the points")
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=name,
        version="",
        kinds=kinds_of(retention),
        model=ModelRecord(
            model_name, geometry.fingerprint(), geometry.config_hash, geometry, weight_hashes
        ),
        calibration=calibration,
        sinks=points[0].policy.sinks,
        points=tuple(_point_record(point) for point in points),
        default_point=default,
        files={file: hashlib.sha256(data).hexdigest() for file, data in sorted(files.items())},
        created_with=_created_with(),
        retention=retention,
    )


def _point_record(spec: PointSpec) -> Point:
    check_name(spec.name, "point name")
    return Point(spec.name, _residencies(spec.policy), spec.tau, spec.fidelity)


def _residencies(policy: WindowPolicy) -> dict[int, float]:
    # fixed contexts: max_context is not part of a policy's identity
    return {c: round(residency(policy, policy.geometry, c), 6) for c in RESIDENCY_CONTEXTS}


def _created_with() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("raggedkv", "numpy", "safetensors", "msgspec"):
        try:
            versions[package] = installed_version(package)
        except PackageNotFoundError:
            versions[package] = "source checkout"
    return versions


def _publish(target: Path, files: Mapping[str, bytes]) -> None:
    """Create ``target`` with ``files`` by one rename; on any failure leave nothing behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for name, data in files.items():
            with open(staging / name, "wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        staging.chmod(0o755)
        _fsync_folder(staging)
        os.rename(staging, target)
        _fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None


def _check_files(folder: Path, manifest: Manifest) -> None:
    if TENSOR_FILE not in manifest.files:
        raise PolicyError(f"{folder}: the manifest lists no {TENSOR_FILE}")
    present = {entry.name for entry in folder.iterdir()} - {MANIFEST_FILE}
    for name, expected in manifest.files.items():
        if name not in present or not (folder / name).is_file():
            raise PolicyError(f"{folder}: missing file {name}")
        if hashlib.sha256(_read(folder / name)).hexdigest() != expected:
            raise PolicyError(f"{folder}: {name} does not match its sha256 in the manifest")
    unlisted = sorted(present - set(manifest.files))
    if unlisted:
        raise PolicyError(f"{folder}: files not listed in the manifest: {', '.join(unlisted)}")


def _read_tensors(folder: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    try:
        tensors = load_tensors(_read(folder / TENSOR_FILE))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{folder}: {TENSOR_FILE} is not valid safetensors: {error}") from None
    record = manifest.retention
    wanted = [WINDOWS_TENSOR, *(RetentionTables.tensor_names(record.rule) if record else ())]
    if set(tensors) != set(wanted):
        raise PolicyError(
            f"{folder}: {TENSOR_FILE} must hold exactly [{', '.join(sorted(wanted))}], found "
            f"{sorted(tensors)}"
        )
    return tensors


def _checked_windows(
    folder: Path, manifest: Manifest, tensors: Mapping[str, np.ndarray]
) -> np.ndarray:
    windows = tensors[WINDOWS_TENSOR]
    geometry = manifest.model.geometry
    shape = (len(manifest.points), len(geometry.attention_layers), geometry.max_kv_heads)
    if windows.dtype != np.int32 or windows.shape != shape:
        raise PolicyError(
            f"{folder}: windows must be int32 {list(shape)}, found {windows.dtype} "
            f"{list(windows.shape)}"
        )
    return windows


def _retention_record(
    tables: RetentionTables | None,
    calibration: CalibrationRecord | None,
    transferred: TransferRecord | None,
) -> RetentionRecord | None:
    if tables is not None:
        return RetentionRecord(tables.rule, tables.budgets, calibration, transferred)
    if calibration is not None or transferred is not None:
        raise PolicyError("a calibration or transfer of retention tables needs the tables")
    return None


def _check_retention(
    tables: RetentionTables, record: RetentionRecord, geometry: ModelGeometry
) -> None:
    tables.check_fits(geometry)
    if record.transferred is not None:
        record.transferred.check_fits(geometry)


def _retention_tables(
    folder: Path, manifest: Manifest, tensors: Mapping[str, np.ndarray]
) -> RetentionTables | None:
    record = manifest.retention
    if record is None:
        return None
    try:
        tables = RetentionTables.from_tensors(record.rule, record.budgets, tensors)
        _check_retention(tables, record, manifest.model.geometry)
    except PolicyError as error:
        raise PolicyError(f"{folder}: {error}") from None
    return tables


def _check_points(artifact: Artifact) -> None:
    manifest = artifact.manifest
    names = [point.name for point in manifest.points]
    if len(set(names)) != len(names) or manifest.default_point not in names:
        raise PolicyError(f"{artifact.path}: points must be distinct and hold the default point")
    for point in manifest.points:
        try:
            policy = artifact.policy(point.name)
        except KvPolicyError as error:
            raise PolicyError(f"{artifact.path}: point {point.name!r}: {error}") from None
        if point.residency != _residencies(policy):
            raise PolicyError(
                f"{artifact.path}: point {point.name!r}: recorded residency is not its windows'"
            )

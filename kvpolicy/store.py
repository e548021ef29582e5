"""Find a policy by folder, by ``name[@version]``, or among the built-in kinds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.artifact import MANIFEST_FILE, Artifact, load_artifact, read_manifest
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention.tables import RetentionTables
from kvpolicy.windows import WindowPolicy

SEARCH_VARIABLE = "RAGGEDKV_ARTIFACTS"
BUILT_IN = {"native": WindowPolicy.native, "full": WindowPolicy.full}


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy ready to use: ``policy_id`` is ``name@version``, or the built-in's name.

    ``artifact`` and ``point`` are None for built-in kinds.
    """

    policy_id: str
    policy: WindowPolicy
    artifact: Artifact | None = None
    point: str | None = None

    @property
    def retention(self) -> RetentionTables | None:
        """Retention tables of the policy; None if it has windows only, or is built in."""
        return None if self.artifact is None else self.artifact.retention


def search_roots() -> list[Path]:
    """Folders searched for ``<model>/<policy>/<version>``, first match wins.

    $RAGGEDKV_ARTIFACTS (colon-separated), ./artifacts, then the policies that ship: packaged
    as ``kvpolicy/shipped`` in a wheel, the ``artifacts`` folder next to ``kvpolicy`` in a checkout.
    """
    listed = os.environ.get(SEARCH_VARIABLE, "").split(os.pathsep)
    package = Path(__file__).resolve().parent
    roots = [Path(entry) for entry in listed if entry]
    roots += [Path.cwd() / "artifacts", package / "shipped"]
    if (package.parent / "pyproject.toml").is_file():
        roots.append(package.parent / "artifacts")
    return _distinct(root for root in roots if root.is_dir())


def _distinct(roots: Iterator[Path]) -> list[Path]:
    return list({root.resolve(): root for root in roots}.values())


def find_folders(roots: Sequence[Path], name: str = "*", version: str = "*") -> list[Path]:
    """Version folders of policy ``name`` under ``roots``; the first root wins for equal ones."""
    found: dict[tuple[str, str, str], Path] = {}
    for root in roots:
        for manifest in sorted(root.glob(f"*/{name}/{version}/{MANIFEST_FILE}")):
            folder = manifest.parent
            hidden = folder.name.startswith(".")  # an interrupted write
            if not hidden:
                found.setdefault(folder.parts[-3:], folder)
    return list(found.values())


def resolve(
    spec: str,
    geom: ModelGeometry,
    search: Sequence[str | Path] | None = None,
    point: str | None = None,
) -> ResolvedPolicy:
    """Resolve ``spec`` for a model of geometry ``geom``, verifying everything.

    Args:
        spec: a built-in kind (``native``, ``full``), an artifact's version folder, or
            ``name[@version]`` looked up under the search roots.
        geom: the model to be served; the returned policy carries it.
        search: roots instead of ``search_roots()``.
        point: operating point; the manifest's default if None.

    Raises:
        PolicyError: not found, several versions fit, made for another model, or damaged.
    """
    if spec in BUILT_IN:
        if point is not None:
            raise PolicyError(f"built-in policy {spec!r} has no points, found {point!r}")
        return ResolvedPolicy(spec, BUILT_IN[spec](geom))
    artifact = find_artifact(spec, geom, search)
    name = point if point is not None else artifact.manifest.default_point
    return ResolvedPolicy(artifact.policy_id, artifact.policy(name, geom), artifact, name)


def find_artifact(
    spec: str,
    geom: ModelGeometry | None = None,
    search: Sequence[str | Path] | None = None,
) -> Artifact:
    """The artifact at a folder, or of ``name[@version]``, verified.

    With ``geom`` it must be made for such a model; without, for any. Raises PolicyError as
    ``resolve``.
    """
    return load_artifact(spec if _is_folder(spec) else _lookup(spec, geom, search), geom)


def _is_folder(spec: str) -> bool:
    """True if ``spec`` means a folder: one with a manifest, or any path with a separator."""
    return (Path(spec) / MANIFEST_FILE).is_file() or (os.sep in spec and Path(spec).is_dir())


def _lookup(spec: str, geom: ModelGeometry | None, search: Sequence[str | Path] | None) -> Path:
    name, _, version = spec.partition("@")
    if not name or os.sep in spec or any(mark in spec for mark in "*?["):
        raise PolicyError(
            f"no policy {spec!r}: give native, full, an artifact folder, or name[@version]"
        )
    roots = search_roots() if search is None else [Path(root) for root in search]
    folders = find_folders(roots, name, version or "*")
    fitting = [f for f in folders if geom is None or _made_for(f, geom)]
    if not folders:
        where = ", ".join(map(str, roots)) or "no folder"
        raise PolicyError(f"no policy {spec!r} found (searched {where}; ${SEARCH_VARIABLE} adds)")
    if not fitting:
        raise PolicyError(f"policy {spec!r} exists only for other models: {_labels(folders)}")
    if len(fitting) > 1:
        raise PolicyError(f"policy {spec!r} is ambiguous, give one of: {_labels(fitting)}")
    return fitting[0]


def _made_for(folder: Path, geom: ModelGeometry) -> bool:
    return read_manifest(folder).model.geometry_hash == geom.fingerprint()


def _labels(folders: Sequence[Path]) -> str:
    return ", ".join(f"{f.parts[-2]}@{f.parts[-1]} ({f.parts[-3]})" for f in folders)

"""``python -m kvpolicy merge``: windows of one artifact, retention tables of another."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpolicy.artifact import TENSOR_FILE, Artifact, PointSpec, describe, write_artifact
from kvpolicy.cli_find import MODEL_HELP, POLICY_HELP, find, geometry_of
from kvpolicy.errors import PolicyError
from kvpolicy.evidence import EVIDENCE_FILE, HELD_OUT_FILE
from kvpolicy.retention.units import retention_units
from kvpolicy.retention_evidence import RETENTION_EVIDENCE_FILE
from kvpolicy.store import BUILT_IN

# what was measured of the windows alone, or of the tables, stays true; a report shows another
_CARRIED = (EVIDENCE_FILE, HELD_OUT_FILE)
_OF_TABLES = RETENTION_EVIDENCE_FILE


def add_arguments(merge: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    text = f"windows, points and their calibration: {POLICY_HELP}"
    merge.add_argument("--windows", metavar="A", required=True, help=text)
    text = f"retention rule and tables: {POLICY_HELP}"
    merge.add_argument("--retention", metavar="B", required=True, help=text)
    merge.add_argument("--out", metavar="DIR", required=True, help="artifacts root to write under")
    merge.add_argument("--name", help="policy name (default: A's, a dash and the rule's)")
    merge.add_argument("--model", metavar="DIR", help=MODEL_HELP)


def run(args: argparse.Namespace) -> None:
    """Write the merged artifact, print its folder; say on stderr what was left out."""
    geom = geometry_of(args)
    windows, retention = find(args.windows, geom), find(args.retention, geom)
    path, dropped = merge(windows, retention, args.out, args.name)
    if dropped:
        print(f"kvpolicy: note: not carried over: {', '.join(dropped)}", file=sys.stderr)
    print(path)


def merge(
    windows: Artifact, retention: Artifact, root: str | Path, name: str | None = None
) -> tuple[Path, list[str]]:
    """Write an artifact with the points of ``windows`` and the tables of ``retention``.

    The windows' calibration record, evidence and held-out losses (which are of the windows alone)
    and the tables' calibration and transfer records and evidence come along; any other file does
    not.

    Returns:
        The new folder, and the files of ``windows`` that were left out.

    Raises:
        PolicyError: different geometries, no retention tables, no unit to freeze at any point, or
            a name that is not free.
    """
    tables, manifest = retention.retention, windows.manifest
    _check(windows, retention)
    name = name or f"{manifest.name}-{tables.rule.name}"
    if name in BUILT_IN:
        raise PolicyError(f"policy name {name!r} is taken by a built-in policy; choose another")
    carried = [file for file in _CARRIED if file in manifest.files]
    files = {file: (windows.path / file).read_bytes() for file in carried}
    if _OF_TABLES in retention.manifest.files:
        files[_OF_TABLES] = (retention.path / _OF_TABLES).read_bytes()
    path = write_artifact(
        root,
        model_name=manifest.model.name,
        name=name,
        points=[
            PointSpec(point.name, windows.policy(point.name), point.tau, point.fidelity)
            for point in manifest.points
        ],
        default_point=manifest.default_point,
        calibration=manifest.calibration,
        weight_hashes=manifest.model.weight_hashes,
        extra_files=files,
        retention=tables,
        retention_calibration=retention.manifest.retention.calibration,
        transferred=retention.manifest.retention.transferred,
    )
    return path, sorted(set(manifest.files) - {TENSOR_FILE, *files})


def _check(windows: Artifact, retention: Artifact) -> None:
    if retention.retention is None:
        raise PolicyError(f"{retention.policy_id} has no retention tables")
    if windows.manifest.model.geometry_hash != retention.manifest.model.geometry_hash:
        raise PolicyError(
            f"{windows.policy_id} and {retention.policy_id} are for different models: "
            f"{describe(windows.geometry)} and {describe(retention.geometry)}"
        )
    points = windows.manifest.points
    if not any(len(retention_units(windows.policy(point.name))[0]) for point in points):
        raise PolicyError(
            f"{windows.policy_id} gives every global unit a window, which leaves none to freeze"
        )

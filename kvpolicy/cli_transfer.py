"""``python -m kvpolicy transfer``: retention tables of one model, for another."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpolicy.artifact import Artifact, PointSpec, describe, write_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import read_geometry
from kvpolicy.names import folder_name
from kvpolicy.store import BUILT_IN, find_artifact
from kvpolicy.transfer import transfer_record, transfer_tables
from kvpolicy.windows import WindowPolicy


def add_arguments(transfer: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    text = "policy with retention tables: artifact folder, or name[@version]"
    transfer.add_argument("--policy", metavar="P", required=True, help=text)
    text = "folder of the model to write a policy for; it gets native windows"
    transfer.add_argument("--to", metavar="DIR", required=True, help=text)
    transfer.add_argument("--name", help="name of the new policy (default: P's and -transferred)")
    text = "artifacts root to write under"
    transfer.add_argument("--out", metavar="DIR", required=True, help=text)


def run(args: argparse.Namespace) -> None:
    """Write the transferred artifact, print its folder; say on stderr what stays behind."""
    if args.policy in BUILT_IN:
        raise PolicyError(f"{args.policy!r} is built in and has no retention tables")
    source = find_artifact(args.policy)
    path = transfer(source, args.to, args.out, args.name)
    if _has_windows(source):
        print("kvpolicy: note: windows do not transfer; calibrate them, then merge",
              file=sys.stderr)  # fmt: skip
    print(path)


def transfer(
    source: Artifact, model_dir: str | Path, root: str | Path, name: str | None = None
) -> Path:
    """Write a policy for another model with ``source``'s tables and native windows.

    The manifest says where the tables come from and how they were mapped (``TransferRecord``), and
    keeps the record of how they were compiled.

    Returns:
        The new folder.

    Raises:
        KvPolicyError: no readable config.json; a source without tables, itself transferred, or
            made for this model; a model without global layers; or a name that is not free.
    """
    target = read_geometry(model_dir)
    _check(source, target.fingerprint())
    name = name or f"{source.manifest.name}-transferred"
    if name in BUILT_IN:
        raise PolicyError(f"policy name {name!r} is taken by a built-in policy; choose another")
    record = transfer_record(source.policy_id, source.manifest.model.name, source.geometry, target)
    return write_artifact(
        root,
        model_name=folder_name(model_dir),
        name=name,
        points=[PointSpec("default", WindowPolicy.native(target))],
        retention=transfer_tables(source.retention, source.geometry, target, record),
        retention_calibration=source.manifest.retention.calibration,
        transferred=record,
    )


def _check(source: Artifact, target_hash: str) -> None:
    retention = source.manifest.retention
    if retention is None:
        raise PolicyError(f"{source.policy_id} has no retention tables")
    if retention.transferred is not None:
        # twice by nearest depth is not once, and the model behind the numbers would be lost
        raise PolicyError(
            f"{source.policy_id} was itself transferred; transfer {retention.transferred.policy} "
            "instead"
        )
    if source.manifest.model.geometry_hash == target_hash:
        raise PolicyError(
            f"{source.policy_id} was made for this model ({describe(source.geometry)}); use it "
            "directly"
        )


def _has_windows(source: Artifact) -> bool:
    points = source.manifest.points
    return any(share < 1 for point in points for share in point.residency.values())

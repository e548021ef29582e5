"""Policies and models that a command's arguments name."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpolicy.artifact import Artifact, load_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.store import resolve

POLICY_HELP = "artifact folder, or name[@version]"
MODEL_HELP = "model folder, needed to look up by name"


def geometry_of(args: argparse.Namespace) -> ModelGeometry | None:
    """Geometry of ``--model``, None if it is not given. Raises GeometryError."""
    return read_geometry(args.model) if args.model else None


def find(spec: str, geom: ModelGeometry | None) -> Artifact:
    """The artifact that ``spec`` names, verified, and with ``geom`` also that it fits.

    Raises:
        PolicyError: not found, damaged, for another model, or built in.
    """
    if Path(spec).is_dir():
        return load_artifact(spec, geom)
    if geom is None:
        raise PolicyError(f"no folder {spec}; to look a policy up by name give --model DIR")
    found = resolve(spec, geom).artifact
    if found is None:
        raise PolicyError(f"{spec!r} is built in and has no points; new --kind {spec} writes it")
    return found

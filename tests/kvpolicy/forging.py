"""Damage to artifacts, as an accident or a careful forger does it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load

from kvpolicy.artifact import read_manifest
from kvpolicy.manifest import content_version


def edit_manifest(folder: Path, edit: Callable[[dict], object]) -> None:
    """Apply ``edit`` to the parsed manifest and write it back, hashes and version as they were."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def resign(folder: Path) -> None:
    """Make hashes and version consistent again, as a careful forger would."""
    data = (folder / "policy.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    edit_manifest(folder, lambda m: m["files"].update({"policy.safetensors": digest}))
    version = content_version(read_manifest(folder), load(data))
    edit_manifest(folder, lambda m: m.update(version=version))

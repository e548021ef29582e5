"""Result files of every command: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from loadtest.errors import UserError


def write_json(path: Path, record: msgspec.Struct) -> Path:
    """Write ``record`` to ``path`` as JSON by one rename, and return the path.

    Raises UserError if it cannot be written; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path

"""Result files of every command: written whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadtest.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def output_folder(path: Path) -> Path:
    """``path``, made if it is absent. Raises UserError if nothing can be written there."""
    probe = path / f".probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error
    return path


def write_json(path: Path, record: msgspec.Struct) -> Path:
    """``write_bytes`` of ``record`` as JSON."""
    return write_bytes(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def write_png(path: Path, figure: Figure, dpi: int) -> Path:
    """``write_bytes`` of a matplotlib figure."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=dpi)
    return write_bytes(path, image.getvalue())


def write_bytes(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` by one rename, and return the path.

    Raises UserError if it cannot be written; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path

"""Names that are fit for folders and for ``name@version``."""

from __future__ import annotations

import re
from pathlib import Path

from kvpolicy.errors import PolicyError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def check_name(name: str, what: str = "policy name") -> str:
    """Return ``name`` if it is fit for a folder and ``name@version``, else raise PolicyError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PolicyError(
            f"{what} {name!r} is not accepted; use 1-64 of a-z 0-9 . _ - starting with a-z 0-9"
        )
    return name


def folder_name(model_dir: str | Path) -> str:
    """A model folder's name as artifacts spell it: lower case, odd characters dashed."""
    name = Path(model_dir).resolve().name.lower()
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-._")[:64] or "model"

"""Where relative paths point, on a laptop and inside ``ray job submit --working-dir .``.

Ray runs a submitted job in a temporary copy of the working folder that is deleted with the
session: a policy written there would be lost. Inside such a job a relative path therefore means
the folder in which the head node's ``ray start`` was run, which the job's shell knows as $OLDPWD.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from calib_cluster.errors import CalibrationError

_UPLOADED = "runtime_resources/working_dir_files"


def in_uploaded_folder() -> bool:
    """True if the current folder is Ray's temporary copy of a submitted working folder."""
    return _UPLOADED in Path.cwd().as_posix()


def output_folder(out: str) -> Path:
    """Absolute ``--out``, created if need be and proved writable.

    Raises:
        CalibrationError: it cannot be written, or would be lost with the job.
    """
    path = _absolute("--out", out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CalibrationError(
            f"--out {path}: not writable ({error.strerror}); give a folder that is"
        ) from error
    return path.resolve()


def output_file(flag: str, file: str) -> Path:
    """Absolute path of a file to write later, in a folder that exists.

    Raises:
        CalibrationError: its folder does not exist or cannot be written.
    """
    path = _absolute(flag, file)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise CalibrationError(f"{flag} {path}: not a file in a folder that can be written")
    return path


def _absolute(flag: str, text: str) -> Path:
    path = Path(text).expanduser()
    return path if path.is_absolute() else _base(flag, text) / path


def _base(flag: str, text: str) -> Path:
    if not in_uploaded_folder():
        return Path.cwd()
    started_in = os.environ.get("OLDPWD")
    if not started_in or not Path(started_in).is_dir():
        raise CalibrationError(
            f"{flag} {text}: inside a Ray job the current folder is a temporary copy; give an "
            "absolute path"
        )
    return Path(started_in)


def input_path(text: str) -> str:
    """``text`` as an absolute path if such a file or folder exists, else unchanged (a name).

    Looked up in the current folder, then, inside a Ray job, where ``ray start`` was run.
    """
    path = Path(text).expanduser()
    bases = [Path.cwd()]
    if in_uploaded_folder() and os.environ.get("OLDPWD"):
        bases.append(Path(os.environ["OLDPWD"]))
    for base in bases:
        if (base / path).exists():
            return str((base / path).resolve())
    return text

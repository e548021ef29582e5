"""What the judge writes: settings, one line a finished case, and the summary of a whole run."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

import kvpolicy
from calib_cluster.corpora.fetch import write_durably
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import Fingerprint
from calib_cluster.judge.scoring import Score
from kvpolicy.bootstrap import Interval

SCHEMA_VERSION = 1
CASES_FILE = "cases.jsonl"
RESULT_FILE = "judge.json"
PLOT_FILE = "judge.png"
_HERE = Path(__file__).parent
_SOURCES = {
    _HERE: (
        "arms.py", "bench.py", "haystack.py", "items.py", "labels.py", "scoring.py", "model.py",
        "names.py", "peers.py", "tasks.py",
    ),
    _HERE.parent: ("attention.py", "capture.py", "rewards"),
    Path(kvpolicy.__file__).parent: ("geometry.py", "retention"),
}  # fmt: skip
PACKAGES = ("raggedkv", "torch", "transformers", "numpy", "kvpress")


class Settings(Fingerprint, frozen=True, forbid_unknown_fields=True):
    """Everything that decides a run's scores; runs whose settings agree may be joined.

    ``policies``: name asked for -> full id and hash of its tables. ``peers``: name -> what it is.
    ``texts``: corpus -> sha256 of its documents; ``items``: sha256 over all items. ``code``: hash
    over the sources that decide scores.
    """

    schema: int
    model: str
    model_config: str
    model_weights: dict[str, str]
    policies: dict[str, str]
    peers: dict[str, str]
    budgets: tuple[int, ...]
    tasks: tuple[str, ...]
    protocols: tuple[str, ...]
    lengths: tuple[int, ...]
    per_task: int
    seed: int
    texts: dict[str, str]
    items: str
    code: str
    libraries: dict[str, str]


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scores of every arm on one item under one protocol.

    ``tokens`` of the prompt (T of the compression), ``scored`` answer tokens; ``depth`` and
    ``corpus`` as in the item; ``item`` its digest; ``seconds`` it took.
    """

    task: str
    protocol: str
    length: int
    index: int
    corpus: str
    depth: float | None
    item: str
    tokens: int
    scored: int
    seconds: float
    scores: list[Score]

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What no other case of a run shares."""
        return self.length, self.protocol, self.task, self.index


class Cell(msgspec.Struct, frozen=True):
    """Means of one arm over the ``n`` items of a length, protocol and task.

    ``task`` is ``answers`` for all tasks that have an answer together. ``budget`` None is the full
    cache. Measures as in ``Score``.
    """

    length: int
    protocol: str
    task: str
    arm: str
    budget: int | None
    n: int
    kept: float
    accuracy: float
    exact: float
    nll: float
    kl: float
    agreement: float


class Difference(msgspec.Struct, frozen=True):
    """``arm`` minus ``beside`` in one measure, item by item, with its interval.

    ``beside`` is at the same budget, or the full cache.
    """

    length: int
    protocol: str
    task: str
    budget: int
    arm: str
    beside: str
    measure: str
    interval: Interval


class Loss(msgspec.Struct, frozen=True):
    """How far ``arm`` falls behind the best arm of a column, over its ``columns``: ``worst``, where
    that is, and ``mean``. In [0, 1], see ``losses.losses``."""

    arm: str
    worst: float
    mean: float
    length: int
    protocol: str
    task: str
    budget: int
    columns: int


class Result(msgspec.Struct, frozen=True):
    """Contents of ``judge.json``. ``finished``: every case asked for is in it. ``losses``: the arm
    that loses least everywhere first; empty in files of before they were there."""

    schema: int
    command: list[str]
    versions: dict[str, str]
    settings: Settings
    finished: bool
    against: str | None
    resamples: int
    cells: list[Cell]
    differences: list[Difference]
    cases: list[CaseResult]
    losses: list[Loss] = []


C = TypeVar("C", bound=msgspec.Struct)


class CaseLog(Generic[C]):
    """Finished cases of one run on disk, a line each, the settings in the first.

    Args:
        folder: made if it is not there.
        settings: of this run.
        resume: go on with what is there; else there must be nothing.
        file: name in the folder.
        kind: of the cases; no two may have the same ``key``.

    Attributes:
        cases: those finished so far.

    Raises:
        CalibrationError: there is an earlier run and ``resume`` is off, or of other settings, or
            damaged; or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        resume: bool,
        file: str = CASES_FILE,
        kind: type[C] = CaseResult,
    ) -> None:
        self._path, self._kind = folder / file, kind
        self.cases: list[C] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                if not resume:
                    raise CalibrationError(
                        f"--out {folder} holds an earlier run: --resume goes on with it, or give "
                        "another folder"
                    )
                self._read(settings)
            else:
                write_durably(self._path, msgspec.json.encode(settings) + b"\n")
        except OSError as error:
            raise CalibrationError(f"--out {folder}: {error.strerror or error}") from error

    def _read(self, settings: Settings) -> None:
        content = self._path.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if torn:  # the run was killed while it wrote its last line
            write_durably(self._path, whole + b"\n")
        first, *lines = whole.split(b"\n")
        found = self._decoded(first, 1, type(settings))
        if differences := settings.differences(found):
            raise CalibrationError(
                f"{self._path} is of a run with other settings ({'; '.join(differences)}): give "
                "the same ones, or another --out"
            )
        self.cases = [self._decoded(line, n, self._kind) for n, line in enumerate(lines, start=2)]
        if len({case.key for case in self.cases}) < len(self.cases):
            raise CalibrationError(f"{self._path} holds a case twice")

    def _decoded(self, line: bytes, number: int, kind):
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise CalibrationError(
                f"{self._path}, line {number}, is damaged or of another version: {error}"
            ) from error

    def add(self, case: C) -> None:
        """Keep ``case``, on disk when this returns. Raises CalibrationError."""
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(case) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CalibrationError(f"cannot write {self._path}: {error.strerror}") from error
        self.cases.append(case)


def write_result(folder: Path, result: Result) -> Path:
    """Write ``judge.json``, whole or not at all. Raises CalibrationError."""
    raw = msgspec.json.format(msgspec.json.encode(result), indent=1)
    return write_file(folder / RESULT_FILE, raw + b"\n")


def write_file(path: Path, content: bytes) -> Path:
    """``write_durably`` that raises CalibrationError; returns ``path``."""
    try:
        write_durably(path, content)
    except OSError as error:
        raise CalibrationError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read_result(path: Path) -> Result:
    """A ``judge.json``. Raises CalibrationError if it is none of this schema."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CalibrationError(f"{path} is no result of the judge: {error}") from error
    if result.schema != SCHEMA_VERSION:
        raise CalibrationError(f"{path} has schema {result.schema}, this reads {SCHEMA_VERSION}")
    return result


@cache
def code_hash() -> str:
    """12 hex digits over the sources that decide scores, as they were when first asked for."""
    sources = [package / name for package, names in _SOURCES.items() for name in names]
    files = [f for s in sources for f in (sorted(s.rglob("*.py")) if s.is_dir() else [s])]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parent.name}/{file.name}".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def command() -> list[str]:
    """The command line that is running."""
    words = sys.argv[1:]
    for i, word in enumerate(words[:-1]):
        if word == "--model":  # where it lay is nobody's business
            words[i + 1] = Path(words[i + 1]).name
    return ["python", "-m", "calib_cluster", *words]


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python and those of ``packages`` that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found

"""Durable state of a run: its fingerprint, what is finished of it, and its result.

A run's folder is ``OUT/.calibration/<model>.<policy>/``. Every file is written under a temporary
name, synced and renamed, so a kill at any moment leaves whole files only. SeqCalib saves a record
a layer: hidden states follow from them and are computed again on resume.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import msgspec
from filelock import FileLock, Timeout

from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import Fingerprint, RunFingerprint
from calib_cluster.seqcalib import LayerRecord
from kvpolicy.evidence import HeldOut

STATE_FOLDER = ".calibration"
FINGERPRINT_FILE = "run.json"
HELD_OUT_FILE = "held_out.json"
RESULT_FILE = "result.json"


class RunResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished run: ``artifact`` is its folder relative to ``--out``."""

    artifact: str


class RunFolder:
    """A run's folder on disk; the caller holds ``locked`` while it uses it.

    Subclasses say what ``fingerprint_type`` and ``result_type`` they keep, and keep more.
    """

    fingerprint_type: ClassVar[type[Fingerprint]]
    result_type: ClassVar[type[RunResult]] = RunResult

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def at(cls, out: Path, model_name: str, policy_name: str) -> Self:
        """State of policy ``policy_name`` for ``model_name`` under ``out``."""
        return cls(out / STATE_FOLDER / f"{model_name}.{policy_name}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other driver out. Raises CalibrationError if one is running."""
        lock = FileLock(self.folder.with_name(f"{self.folder.name}.lock"), timeout=0)
        with self._writing():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                raise CalibrationError(
                    f"another calibration is writing to {self.folder}; wait for it or use --name"
                ) from None
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CalibrationError(
                f"--out: cannot write {self.folder}: {error.strerror or error}"
            ) from error

    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the run that is there, or None. Raises CalibrationError if unreadable."""
        return self._read(FINGERPRINT_FILE, self.fingerprint_type)

    def result(self) -> RunResult | None:
        """Result of a finished run, or None."""
        return self._read(RESULT_FILE, self.result_type)

    def begin(self, fingerprint: Fingerprint) -> None:
        """Start anew: whatever run was there is forgotten (its artifact is not touched)."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with self._writing():
            self.folder.mkdir(parents=True)
        self._write(FINGERPRINT_FILE, fingerprint)

    def restate(self, fingerprint: Fingerprint) -> None:
        """Say what the run is, leaving everything else as it is."""
        self._write(FINGERPRINT_FILE, fingerprint)

    def finish(self, result: RunResult) -> None:
        """Mark the run complete."""
        self._write(RESULT_FILE, result)

    def _read(self, name: str, kind: type) -> msgspec.Struct | None:
        path = self.folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise CalibrationError(
                f"{path} is damaged or of another version ({error}); start over with --restart"
            ) from error

    def _write(self, name: str, record: msgspec.Struct) -> None:
        data = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1)
        with self._writing():
            handle, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                file.write(data + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class RunState(RunFolder):
    """State of a SeqCalib run."""

    fingerprint_type = RunFingerprint

    def held_out(self) -> HeldOut | None:
        """The held-out evaluation, if it was done."""
        return self._read(HELD_OUT_FILE, HeldOut)

    def layers(self) -> list[LayerRecord]:
        """Records of the finished layers, from layer 0 on without a gap."""
        records = []
        while (record := self._read(_layer_file(len(records)), LayerRecord)) is not None:
            records.append(record)
        return records

    def save_layer(self, record: LayerRecord) -> None:
        """Make a layer's decisions durable."""
        self._write(_layer_file(record.layer), record)

    def save_held_out(self, held_out: HeldOut) -> None:
        """Make the held-out evaluation durable."""
        self._write(HELD_OUT_FILE, held_out)


def _layer_file(layer: int) -> str:
    return f"layer-{layer:04d}.json"


class Decision(msgspec.Struct, frozen=True):
    """What to do: ``result`` of a run that is already complete, else go on (``fresh`` False) or
    start anew (``fresh`` True: call ``RunState.begin`` once nothing more can be refused)."""

    fresh: bool
    result: RunResult | None = None


def decide(state: RunFolder, fingerprint: Fingerprint, *, resume: bool, restart: bool) -> Decision:
    """Decide what to do with the run that is there, if any. Writes nothing.

    Raises:
        CalibrationError: nothing to resume; the run differs in model, corpus, code or a
            parameter; or an unfinished run is there and neither flag was given.
    """
    if restart:
        return Decision(fresh=True)
    there = state.fingerprint()
    if resume:
        return _resumed(state, there, fingerprint)
    check_finished(state, there)
    return Decision(fresh=True)


def check_finished(state: RunFolder, there: Fingerprint | None) -> None:
    """Raise CalibrationError if ``there``, the run in the folder, is not finished."""
    if there is not None and state.result() is None:
        raise CalibrationError(
            f"an unfinished run is in {state.folder}: --resume continues it, --restart drops it"
        )


def _resumed(state: RunFolder, there: Fingerprint | None, fingerprint: Fingerprint) -> Decision:
    if there is None:
        raise CalibrationError(f"nothing to resume in {state.folder}; leave --resume out")
    if differences := there.differences(fingerprint):
        raise CalibrationError(
            "--resume: this is another run than the one begun; "
            + "; ".join(differences)
            + " (--restart drops the old one)"
        )
    return Decision(fresh=False, result=state.result())

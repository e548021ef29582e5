"""``gpu-check``: the kernels' tests and benchmarks on a machine with a CUDA GPU.

``python -m flashinfer_ext.gpu_check`` runs from a bare checkout: nothing but torch and Triton is
needed, and what ``gpu_bundle`` laid down is used where it is found. Results are lines of a JSON
file, each on disk as soon as it is known, so that a run which is cut off keeps what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_ext.bench_cases import KINDS, full_cases, small_cases
from flashinfer_ext.bench_journal import (
    FILE,
    Budget,
    Journal,
    JournalError,
    describe_run,
    read_lines,
)
from flashinfer_ext.bench_report import print_report
from flashinfer_ext.gpu_bundle import BundleError, make_bundle, python_environment, use_bundle

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests"
TEST_SHARE = 0.45
"""Of the budget, what the tests may take."""
SILENCE = 120
"""Seconds without a word after which a worker is taken to hang."""
GRACE = 45
"""Seconds that a case begun within the budget may still take."""
BREAKS = 2
"""After so many losses of the device a contender is not tried again."""


class GpuCheckError(Exception):
    """The check cannot run; one line says why."""


def add_gpu_check(commands: argparse._SubParsersAction) -> None:
    """Add the command's options."""
    parser = commands.add_parser("gpu-check", help="test and benchmark the kernels on a CUDA GPU")
    _options(parser)
    parser.set_defaults(command=run_gpu_check)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "gpu-check", metavar="DIR",
        help=f"where {FILE} and logs go (default: out/gpu-check)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=_seconds, default=480.0, help="no case is begun later (default: 480)"
    )
    parser.add_argument(
        "--only", action="append", choices=(TESTS, *KINDS), metavar="PART",
        help=f"{', '.join((TESTS, *KINDS))}; repeatable (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--bundle", type=Path, default=ROOT / "out" / "gpu-check-bundle", metavar="DIR",
        help="what --make-bundle wrote (default: out/gpu-check-bundle)",
    )  # fmt: skip
    parser.add_argument(
        "--make-bundle", action="store_true",
        help="write that folder, to be carried to a machine without a network, and stop",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="walk through it on a CPU, in Triton's interpreter, on tiny sizes",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="print the tables of a results file, and stop"
    )


def _seconds(text: str) -> float:
    if not text.isdecimal() or not 1 <= int(text) <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 to 86400 is wanted")
    return float(text)


def run_gpu_check(args: argparse.Namespace) -> int:
    """Run what was asked for. Returns 0; 1 if a test failed or a case was wrong or failed; 2 after
    one line on stderr if it cannot run."""
    try:
        if args.report:
            print_report(read_lines(args.report))
            return 0
        if args.make_bundle:
            for note in make_bundle(ROOT, args.bundle):
                print(note)
            return 0
        return _check(args)
    except (GpuCheckError, BundleError, JournalError) as error:
        sys.stdout.flush()
        colon = "" if isinstance(error, GpuCheckError) else ":"
        print(f"gpu-check{colon} {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _check(args: argparse.Namespace) -> int:
    bundle = args.bundle if use_bundle(args.bundle) else None
    gpu = "none (dry run)" if args.dry_run else find_gpu()
    budget = Budget(args.seconds)
    run = describe_run(ROOT, bundle, sys.orig_argv[1:], gpu)
    journal = Journal(args.out / FILE, {**run, "dry_run": True} if args.dry_run else run)
    parts = args.only or [TESTS, *KINDS]
    if TESTS in parts:
        _tests(journal, bundle, budget, args)
    kinds = set(parts) & set(KINDS)
    if kinds:
        cases = small_cases() if args.dry_run else full_cases()
        names = [case.name for case in cases if case.kind in kinds | {"copy"}]
        Workers(journal, budget, args.dry_run).run(names)
    print_report([{**line, "run": journal.run} for line in journal.lines])
    print(f"results: {journal.path}")
    bad = [line for line in journal.lines if line.get("status") in ("failed", "wrong")]
    return 1 if bad else 0


def find_gpu() -> str:
    """Name of the first CUDA GPU.

    Raises:
        GpuCheckError: there is none, or kernels would be interpreted.
    """
    try:
        import torch
        import triton
    except ImportError as error:
        raise GpuCheckError(f"needs a CUDA GPU; {error.name} is not installed here") from error
    if not torch.cuda.is_available():
        raise GpuCheckError(
            f"needs a CUDA GPU; torch {torch.__version__} sees none (--dry-run needs none)"
        )
    if triton.knobs.runtime.interpret:
        raise GpuCheckError("needs compiled kernels; unset TRITON_INTERPRET")
    return torch.cuda.get_device_name(0)


def _tests(journal: Journal, bundle: Path | None, budget: Budget, args) -> None:
    from flashinfer_ext.gpu_tests import run_tests

    log = args.out / "gpu-tests.log"
    print(f"tests: output goes to {log}", flush=True)
    seconds = budget.left() * (TEST_SHARE if args.only != [TESTS] else 1)
    missing = _missing_modules(args.dry_run)
    result = run_tests(ROOT, bundle, missing, seconds, log, args.dry_run)
    journal.add({"kind": TESTS, **result})


def _missing_modules(dry: bool) -> list[str]:
    """Why the FlashInfer variants' tests cannot run without compiling for minutes; [] if they
    can."""
    try:
        from flashinfer_ext.flashinfer_source import ModuleSpec
        from flashinfer_ext.flashinfer_store import VariantError, default_folder, find_module
    except ImportError as error:
        return [f"FlashInfer's tests are left out: {error.name} is not installed"]
    if dry:
        return []
    import torch

    try:
        for kind in ("decode", "prefill"):
            for head_dim in (64, 128):
                for dtype in ("bf16", "fp16"):
                    spec = ModuleSpec(kind, head_dim, dtype)
                    find_module(default_folder(), spec, torch.cuda.get_device_capability(0))
    except VariantError as error:
        return [f"FlashInfer's tests are left out: {error}"]
    return []


class Workers:
    """Has cases run in one worker process after another, each until it ends, breaks or hangs.

    Args:
        command: of a worker, to which options and cases are added.
        silence: seconds without an event after which a worker is ended.
    """

    def __init__(
        self, journal: Journal, budget: Budget, dry: bool, command: Sequence[str] | None = None,
        silence: float = SILENCE,
    ) -> None:  # fmt: skip
        self.journal, self.budget, self.dry, self.silence = journal, budget, dry, silence
        self.command = command or [sys.executable, "-m", "flashinfer_ext.bench_worker"]
        self.broken: Counter[str] = Counter()
        self._begun = self._trying = ""

    def run(self, names: Sequence[str]) -> None:
        """Run the cases in order while there is time; note those that were not begun."""
        left = list(names)
        while left and self.budget.left() > 0:
            seen = self._worker(left)
            if not seen:
                break
            left = left[seen:]
        self.journal.add({"kind": "end", "not_begun": left})

    def _worker(self, names: list[str]) -> int:
        """Start one worker; returns how many of the cases it began."""
        process = self._start(names)
        events: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []
        readers = [
            threading.Thread(target=_forward, args=(process.stdout, events), daemon=True),
            threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True),
        ]
        for reader in readers:
            reader.start()
        self._begun, self._trying, began, reason = "", "", 0, ""
        try:
            while (text := events.get(timeout=self._patience())) is not None:
                began += self._event(json.loads(text))
        except queue.Empty:
            reason = "out of time" if self.budget.left() <= 0 else f"silent for {self.silence} s"
        finally:
            if reason or sys.exc_info()[0]:
                _end(process)
            code = process.wait()
            readers[1].join(1)
        if reason or code != 0:
            last = next((line.strip() for line in reversed(errors) if line.strip()), "")
            self._broke(reason or f"the worker ended with {code}: {last}"[:300])
        return began

    def _start(self, names: list[str]) -> subprocess.Popen[str]:
        skip = [name for name, count in self.broken.items() if count >= BREAKS]
        command = [*self.command, "--seconds", f"{self.budget.left():.1f}"]
        command += ["--dry-run"] * self.dry + ["--skip", *skip, "--cases", *names]
        environment = python_environment(ROOT)
        environment["PYTHONPATH"] += os.pathsep + os.pathsep.join(sys.path[1:])
        environment["TRITON_INTERPRET"] = "1" if self.dry else "0"
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def _patience(self) -> float:
        return min(self.silence, self.budget.left() + GRACE)

    def _event(self, event: dict[str, Any]) -> int:
        """Note one event. Returns 1 where a case begins."""
        if "begin" in event:
            self._begun, self._trying = event["begin"], ""
            print(f"[{self.budget.left():4.0f} s left] {self._begun}", flush=True)
            return 1
        if "trying" in event:
            self._trying = event["trying"]
            return 0
        self.journal.add(event)
        return 0

    def _broke(self, reason: str) -> None:
        kind, _, contender = self._trying.partition("/")
        if self._trying:
            self.broken[self._trying] += 1
        line = {"kind": kind or self._begun.partition(" ")[0] or "worker", "status": "failed"}
        if self._begun:
            line["case"] = self._begun
        if contender:
            line["contender"] = contender
        self.journal.add({**line, "reason": reason})


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker, with what it had started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its session's, and nobody else's


def _forward(lines, events: queue.Queue) -> None:
    for line in lines:
        events.put(line)
    events.put(None)


def main(argv: Sequence[str] | None = None) -> int:
    """The command by itself, without the rest of ``python -m flashinfer_ext``."""
    parser = argparse.ArgumentParser(
        prog="python -m flashinfer_ext.gpu_check", description=(__doc__ or "").splitlines()[0]
    )
    _options(parser)
    try:
        return run_gpu_check(parser.parse_args(argv))
    except KeyboardInterrupt:
        print("gpu-check: interrupted; what was measured is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

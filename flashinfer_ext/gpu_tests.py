"""The tests marked ``gpu``, in a process of their own with a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashinfer_ext.gpu_bundle import LAUNCH, python_environment

WORKERS = 8
"""Processes of pytest-xdist, where it is installed: compiling kernels takes most of the time."""
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_SUMMARY = re.compile(r"^=+ (FAILURES|ERRORS|warnings summary|short test summary)")
_REASON = re.compile(r"^(FAILED|ERROR) (\S+)(?: - (.*))?")


def count_outcomes(output: str) -> dict[str, Any]:
    """What ``pytest -v`` printed, cut off or not: outcomes counted, and the first failures."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    progress = True
    for line in output.splitlines():
        progress = progress and not _SUMMARY.match(line)
        if progress and "::" in line and (found := _OUTCOME.search(line)):
            counts[found[1].lower()] += 1
        elif not progress and (reason := _REASON.match(line)):
            failures.append(f"{reason[2]}: {reason[3] or reason[1].lower()}"[:300])
            if reason[1] == "ERROR" and "::" not in reason[2]:
                counts["error"] += 1  # a file that does not load has no line of its own above
    return {"counts": dict(counts), "failures": failures[:20]}


def pytest_command(root: Path, bundle: Path | None, missing: Sequence[str], dry: bool) -> list[str]:
    """The command line. ``missing``: why FlashInfer's own tests cannot run, if they cannot."""
    command = [sys.executable, "-c", LAUNCH, str(bundle / "site") if bundle else "", "-m", "gpu"]
    command += ["tests/flashinfer_ext", "-p", "no:cacheprovider"]
    if missing:
        command += ["--ignore-glob=*/test_flashinfer*"]
    if find_spec("msgspec") is None:
        command += [f"--ignore-glob=*/test_{name}.py" for name in ("aot", "balance")]
    if dry:
        return [*command, "--collect-only", "-q"]
    if find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    return [*command, "-v", "--continue-on-collection-errors"]


def _limited(
    command: list[str], root: Path, environment: dict[str, str], seconds: float, log: Path
) -> int | None:
    """Exit status; None if it was ended, with the processes it had started, after ``seconds``."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its session's, and nobody else's
                process.wait()


def run_tests(
    root: Path, bundle: Path | None, missing: Sequence[str], seconds: float, log: Path, dry: bool
) -> dict[str, Any]:
    """Run them and return the result; a dry run only collects.

    Side effect: ``log`` holds their output.
    """
    if find_spec("pytest") is None:
        return {"status": "unavailable", "reason": "pytest is not installed"}
    environment = python_environment(root)
    environment["TRITON_INTERPRET"] = "0"
    command = pytest_command(root, bundle, missing, dry)
    code = _limited(command, root, environment, max(seconds, 1), log)
    output = log.read_text(errors="replace")
    result: dict[str, Any] = {"notes": list(missing)} if missing else {}
    if dry:
        found = re.search(r"(\d+)(?:/\d+)? tests collected", output)
        if code == 0 and found:
            return {**result, "status": "collected", "counts": {"collected": int(found[1])}}
        last = (output.strip().splitlines() or ["no output"])[-1]
        return {**result, "status": "failed", "reason": last}
    result |= count_outcomes(output)
    counts = result["counts"]
    if counts.get("failed") or counts.get("error"):
        return {**result, "status": "failed"}
    if code is None:
        return {**result, "status": "cut off", "reason": f"not done after {seconds:.0f} s"}
    if code != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return {**result, "status": "failed", "reason": f"pytest ended with {code}: {last}"}
    return {**result, "status": "ok"}

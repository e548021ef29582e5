"""Starts that are meant to fail: real launches, and many command lines parsed in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PREFIX = "raggedkv: refusing to start: "
LAUNCH_TIMEOUT = 150  # seconds; a server that comes up instead of failing runs into it
_QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Outcome:
    """How a start ended: exit status (negative: a signal), stderr, and processes left running."""

    returncode: int
    stderr: str
    leftovers: tuple[str, ...] = ()

    @property
    def refusals(self) -> list[str]:
        """RaggedKV's lines, without their prefix."""
        lines = self.stderr.splitlines()
        return [line.removeprefix(PREFIX) for line in lines if line.startswith("raggedkv")]

    def refused(self) -> str:
        """The one line of a clean refusal. Fails the test on anything else."""
        assert self.returncode not in (None, 0), self.stderr[-3000:]
        assert self.leftovers == ()
        assert len(self.refusals) == 1, self.stderr[-3000:]
        return self.refusals[0]


def launch(*argv: str, env: Mapping[str, str] | None = None) -> Outcome:
    """Run ``python -m sglang.launch_server`` until it ends by itself.

    Raises:
        AssertionError: it still runs after ``LAUNCH_TIMEOUT``. Nothing is left running either way.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--device", "cpu", *argv]
    process = subprocess.Popen(
        command, env={**os.environ, **_QUIET, **(env or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        # ends with the last process that holds stderr, children included
        stderr = process.communicate(timeout=LAUNCH_TIMEOUT)[1]
        return Outcome(process.returncode, stderr, _left_in_session(process.pid))
    except subprocess.TimeoutExpired:
        _kill_session(process.pid)
        stderr = process.communicate()[1]
        raise AssertionError(f"the server did not give up:\n{stderr[-3000:]}") from None
    finally:
        _kill_session(process.pid)


def _session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _left_in_session(leader: int, patience: float = 10.0) -> tuple[str, ...]:
    deadline = time.monotonic() + patience
    while _session(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    return tuple(str(process) for process in _session(leader))


def _kill_session(leader: int) -> None:
    for process in _session(leader):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


# Loads SGLang and its plugins once, as launch_server does, then parses each command line in a
# forked child, which ends as the launching process would.
_PARSE_MANY = """
import json, os, sys, tempfile
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
import sglang.srt.managers.scheduler, sglang.srt.entrypoints.engine

def parse(argv):
    with tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(err.fileno(), 2)
            code = 1
            try:
                prepare_server_args(argv)
                code = 0
            except SystemExit as leave:
                code = leave.code
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            sys.stderr.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        err.seek(0)
        return [status, err.read().decode(errors="replace")]

cases = json.load(open(sys.argv[1]))
json.dump([parse(argv) for argv in cases], open(sys.argv[2], "w"))
"""


def parse_many(
    cases: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str] | None = None
) -> list[Outcome]:
    """What the launching process does with each command line before it starts anything.

    Exit status 0: the arguments were accepted. ``folder`` takes two scratch files.
    """
    asked, answered = folder / "cases.json", folder / "outcomes.json"
    asked.write_text(json.dumps([list(map(str, argv)) for argv in cases]))
    subprocess.run(
        [sys.executable, "-c", _PARSE_MANY, str(asked), str(answered)],
        env={**os.environ, **_QUIET, **(env or {})}, check=True, timeout=240,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return [Outcome(code, text) for code, text in json.loads(answered.read_text())]


def run_python(code: str, env: Mapping[str, str] | None = None) -> object:
    """Run ``code`` in a fresh interpreter and return the JSON on its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **_QUIET, **(env or {})},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])

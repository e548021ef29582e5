"""SGLang's own benchmark client in a subprocess: ``python -m sglang.benchmark.serving``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest.capacity.serve import Remote
from loadtest.capacity.texts import Prompt
from loadtest.servers import Server, ServerError, die_with_parent

POLL_SECONDS = 0.25
LAST_CHARS = 300
GRACE_SECONDS = 10.0
BEGINS = "Starting main benchmark run"
"""What the client says a second before its first request, some 20 seconds after its own start."""


class Report(msgspec.Struct, frozen=True):
    """The line that the client writes, as far as it is used here. Times in milliseconds."""

    duration: float
    completed: int
    total_output_tokens: int
    output_throughput: float
    total_throughput: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float
    input_lens: list[int]
    output_lens: list[int]
    errors: list[str]
    cache_report: dict[str, Any] = {}

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return int(self.cache_report.get("total_cached_tokens") or 0)


def command(url: str, model: Path, dataset: Path, output: Path, count: int, tokens: int) -> list:
    """The client's command line: ``count`` prompts at once, cold, greedy, ``tokens`` each."""
    return [
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang",
        "--base-url", url, "--model", str(model), "--tokenizer", str(model),
        "--dataset-name", "custom", "--dataset-path", str(dataset),
        "--num-prompts", str(count), "--sharegpt-output-len", str(tokens),
        "--warmup-requests", "0", "--flush-cache", "--cache-report", "--disable-tqdm",
        "--ready-check-timeout-sec", "0", "--output-file", str(output), "--output-details",
    ]  # fmt: skip


def drive(
    server: Server | Remote,
    model: Path,
    prompts: Sequence[Prompt],
    output_tokens: int,
    limit_seconds: float,
    look: Callable[[], None],
    began: Callable[[], None],
) -> Report:
    """Send ``prompts`` at once through SGLang's client and read its report.

    Args:
        limit_seconds: after which the server is taken for hung.
        look: called a few times a second meanwhile.
        began: called once, when the client is about to send.

    Side effects: a client process and a temporary folder, both gone on every way out; the server's
    prefix cache is emptied first. Raises ServerError if it dies, hangs, or leaves an answer out.
    """
    with tempfile.TemporaryDirectory(prefix="raggedkv-client-") as root:
        dataset, written, log = (Path(root) / name for name in ("in.jsonl", "out.jsonl", "log"))
        dataset.write_bytes(b"\n".join(_row(prompt) for prompt in prompts))
        words = command(server.url, model, dataset, written, len(prompts), output_tokens)
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, env=_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            _wait(process, server, limit_seconds, _Teller(log, look, began))
        finally:
            _end(process)
        return _read(written, log, process.returncode, len(prompts))


def _row(prompt: Prompt) -> bytes:
    turns = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": ""}]
    return msgspec.json.encode({"conversations": turns})


def _environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}


@dataclass
class _Teller:
    """Calls ``look``, and ``began`` once the client's ``log`` says so."""

    log: Path
    look: Callable[[], None]
    began: Callable[[], None]
    _told: bool = False

    def __call__(self) -> None:
        self.look()
        if not self._told and BEGINS in self.log.read_text(errors="replace"):
            self._told = True
            self.began()


def _wait(
    process: subprocess.Popen,
    server: Server | Remote,
    limit_seconds: float,
    look: Callable[[], None],
) -> None:
    """Return once the client is done, calling ``look`` meanwhile. Raises ServerError."""
    deadline = time.monotonic() + limit_seconds
    while process.poll() is None:
        if server.returncode is not None:
            raise ServerError(f"the server exited with {server.returncode}")
        if time.monotonic() > deadline:
            raise ServerError(f"no end of the run after {limit_seconds:.0f} s")
        look()
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE_SECONDS)


def _read(written: Path, log: Path, status: int, count: int) -> Report:
    said = " ".join(log.read_text(errors="replace").split())[-LAST_CHARS:]
    if not written.is_file():
        raise ServerError(f"SGLang's client ended with {status} and no report; it said: {said}")
    try:
        # not msgspec's parser: the client writes an infinite rate as Infinity
        report = msgspec.convert(json.loads(written.read_bytes()), Report)
    except (ValueError, msgspec.ValidationError) as error:
        raise ServerError(f"SGLang's client wrote a report that is none: {error}") from error
    if report.completed < count:
        failed = next((error for error in report.errors if error), "no reason given")
        reason = " ".join(failed.split())[-LAST_CHARS:]
        raise ServerError(f"{report.completed} of {count} requests were answered: {reason}")
    return report

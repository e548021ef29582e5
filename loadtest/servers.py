"""A real SGLang server in a subprocess, and a thin client of its HTTP API."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT = 300.0
REQUEST_TIMEOUT = 600.0
STOP_TIMEOUT = 10.0
PAGE_SIZE = 16
TOKENS = 16384  # KV of 0.6 to 0.8 GB on the demo models
STATES = 160  # recurrent states, of a model that has some: a running request takes five
_MEMORY_FLAGS = ("--kv-policy", "--kv-arena-bytes", "--max-total-tokens", "--mem-fraction-static")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a forked child must not load libraries


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request; the message ends with its log.

    ``summary`` is the first part of the message: what happened, without command and log.
    """

    def __init__(self, message: str, summary: str | None = None) -> None:
        super().__init__(message)
        self.summary = summary or message


@dataclass(frozen=True)
class Completion:
    """One answer of ``/generate``."""

    output_ids: list[int]
    logprobs: list[float] | None  # of output_ids, nats; None without return_logprob
    text: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: dict[str, Any]
    input_logprobs: list[float | None] | None  # from logprob_start_len on; the first is None
    meta: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class TextCompletion:
    """One answer of OpenAI's ``/v1/completions``; ``logprobs`` of ``output_ids`` in nats."""

    output_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str | None
    usage: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One Prometheus sample."""

    labels: Mapping[str, str]
    value: float


class Client:
    """SGLang's HTTP API at ``url``. Thread-safe. Every method raises ServerError on non-2xx."""

    def __init__(self, url: str):
        self.url = url
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)  # uvicorn's is 5 s
        self._http = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT, limits=limits)

    def _send(self, method: str, path: str, **kwargs) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.TransportError as error:
            raise self._error(f"{method} {path}: {error!r}") from error
        if response.is_error:
            status = f"{method} {path}: {response.status_code} {response.text[:500]}"
            raise self._error(status)
        return response

    def _error(self, message: str) -> ServerError:
        return ServerError(message)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        return_logprob: bool = True,
        logprob_start_len: int | None = None,
        rid: str | None = None,
        **sampling,
    ) -> Completion:
        """Complete a text or token ids; greedy and through EOS unless ``sampling`` says else.

        ``logprob_start_len`` also returns the prompt's logprobs from that position on (SGLang
        then recomputes the prompt from there, whatever is cached). An aborted request returns
        what it has, with ``finish_reason["type"] == "abort"``.
        """
        body = _body(prompt, max_new_tokens, sampling) | {"return_logprob": return_logprob}
        if logprob_start_len is not None:
            body["logprob_start_len"] = logprob_start_len
        if rid is not None:
            body["rid"] = rid
        return _completion(self._send("POST", "/generate", json=body).json())

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        rid: str | None = None,
        *,
        return_logprob: bool = True,
        **sampling,
    ) -> Iterator[Completion]:
        """``generate``, yielding the answer so far at each token; closing it drops the request."""
        body = _body(prompt, max_new_tokens, sampling)
        body |= {"return_logprob": return_logprob, "stream": True}
        if rid is not None:
            body["rid"] = rid
        try:
            with self._http.stream("POST", "/generate", json=body) as response:
                if response.is_error:
                    told = response.read().decode(errors="replace")[:500]
                    raise self._error(f"POST /generate: {response.status_code} {told}")
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        answer = json.loads(line.removeprefix("data: "))
                        if "error" in answer:
                            raise self._error(f"POST /generate: {str(answer['error'])[:500]}")
                        yield _completion(answer)
        except httpx.TransportError as error:
            raise self._error(f"POST /generate: {error!r}") from error

    def generate_many(
        self, prompts: Iterable[str | Sequence[int]], max_new_tokens: int, concurrency: int, **rest
    ) -> list[Completion]:
        """``generate`` for each prompt, ``concurrency`` at a time; answers in prompt order."""
        with ThreadPoolExecutor(concurrency) as threads:
            one = lambda prompt: self.generate(prompt, max_new_tokens, **rest)  # noqa: E731
            return list(threads.map(one, prompts))

    def chat(self, messages: list[dict[str, str]], max_tokens: int, **body) -> dict[str, Any]:
        """``/v1/chat/completions``, greedy by default. The parsed JSON answer."""
        defaults = {"model": "default", "temperature": 0.0, "max_tokens": max_tokens}
        return self._send(
            "POST", "/v1/chat/completions", json=defaults | {"messages": messages} | body
        ).json()

    def complete(self, prompt_ids: Sequence[int], max_tokens: int, **body) -> TextCompletion:
        """OpenAI's ``/v1/completions``: greedy, and through EOS, unless ``body`` says else.

        ``ignore_eos`` and ``return_token_ids`` are SGLang's additions to OpenAI's fields.
        """
        defaults = {"model": "default", "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
        sent = {"prompt": list(prompt_ids), "max_tokens": max_tokens, "return_token_ids": True}
        answer = self._send("POST", "/v1/completions", json=defaults | sent | body).json()
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else None
        return TextCompletion(
            choice["token_ids"], logprobs, choice["text"], choice["finish_reason"], answer["usage"]
        )

    def info(self) -> dict[str, Any]:
        """``/server_info``: resolved flags and the scheduler's state."""
        return self._send("GET", "/server_info").json()

    def metrics(self) -> dict[str, list[Sample]]:
        """``/metrics`` by sample name (needs ``--enable-metrics``)."""
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(self._send("GET", "/metrics").text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
        return samples

    def flush_cache(self, timeout: float = 30.0) -> None:
        """Empty the prefix cache, waiting up to ``timeout`` seconds for running requests."""
        self._send("POST", "/flush_cache", params={"timeout": timeout})

    def abort(self, rid: str | None = None) -> None:
        """Abort request ``rid``, or every request."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        self._send("POST", "/abort_request", json=body)

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests right now."""
        load = self.loads()
        return load["num_running_reqs"], load["num_waiting_reqs"]

    def loads(self) -> dict[str, Any]:
        """``/v1/loads`` of the one scheduler: its last published requests and tokens."""
        (load,) = self._send("GET", "/v1/loads").json()["loads"]
        return load

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Return once nothing has run or waited for a while. Raises ServerError on timeout [s].

        For requests answered or aborted before the call: one that was sent a moment ago may
        not show yet.
        """
        deadline = time.monotonic() + timeout
        quiet_polls = 0
        while quiet_polls < 3:
            self.info()  # the scheduler answers in order: it has seen all that came before
            quiet_polls = quiet_polls + 1 if self.load() == (0, 0) else 0
            if time.monotonic() > deadline:
                raise self._error(f"not idle after {timeout} s: {self.load()}")
            time.sleep(0.1)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class Server(Client):
    """``sglang.launch_server`` on a free port; a context manager that never leaks a process.

    Args:
        model_dir: Hugging Face folder.
        flags: more command-line flags; they win over the defaults here.
        env: environment variables on top of the current ones.
        port: default: a free one.
        threads: OMP_NUM_THREADS of every server process; more threads than free cores cost 8x.
        warmup: let SGLang send its warm-up request (it leaves a few cached tokens).
        log: file for stdout and stderr; default: a temporary file, kept if start-up fails.

    Entering blocks until /health answers. Raises ServerError with the end of the log if the
    process exits or ``START_TIMEOUT`` passes before that; ``returncode`` then has its status.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *flags: str,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        threads: int = 1,
        warmup: bool = False,
        log: Path | None = None,
    ):
        self.port = port or free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.command = _command(Path(model_dir), self.port, warmup, flags)
        self.env = {**os.environ, **_quiet(threads), **(env or {})}
        self.log = log or Path(tempfile.mkstemp(prefix="raggedkv-server-", suffix=".log")[1])
        self._keep_log = log is not None
        self.start_seconds = 0.0
        self._process: subprocess.Popen | None = None
        self._killed = False

    def __enter__(self) -> Server:
        began = time.monotonic()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        atexit.register(self.stop)
        try:
            self._wait_healthy(began + START_TIMEOUT)
        except BaseException:
            self._keep_log = True
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def returncode(self) -> int | None:
        """Exit status of the launcher; None while it runs."""
        return None if self._process is None else self._process.poll()

    def exited_within(self, seconds: float) -> bool:
        """True once the launcher has exited; False if it still runs after ``seconds``."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def cpu_seconds(self) -> float:
        """CPU seconds that the launcher and its living children have taken so far."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int:
        """Memory of the launcher and its living children: PSS, or RSS where the system has none."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                used = process.memory_full_info()
                total += getattr(used, "pss", used.rss)
        return total

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._process.pid)
            return [launcher, *launcher.children(recursive=True)]
        return []

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the server's output."""
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[:500] for line in tail)  # SGLang logs all its flags on one line

    def kill(self) -> None:
        """End the launcher and all it started: SIGTERM, then SIGKILL. Safe to repeat.

        Requests in flight in other threads then raise ServerError; the client stays open.
        """
        atexit.unregister(self.stop)
        if self._process is not None and not self._killed:
            _kill_tree(self._process)
            self._killed = True  # its process id may be another's from now on

    def stop(self) -> None:
        """``kill``, close the client, and remove a log that nobody asked for. Safe to repeat.

        In that order: a thread that waits on a socket is not woken by another one closing it.
        """
        self.kill()
        self.close()
        if not self._keep_log:
            self.log.unlink(missing_ok=True)

    def _wait_healthy(self, deadline: float) -> None:
        while not self._healthy():
            if self.returncode is not None:
                raise self._error(f"the server exited with {self.returncode}")
            if time.monotonic() > deadline:
                raise self._error(f"not healthy after {START_TIMEOUT:.0f} s")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/health", timeout=30).is_success
        return False

    def _error(self, message: str) -> ServerError:
        command = " ".join(self.command)
        text = f"{message}\n$ {command}\n{self.log_tail()}\n(log: {self.log})"
        return ServerError(text, summary=message)


PORTS = range(20000, 32000)
"""Below what systems hand to connections: a server binds long after its port was chosen."""


def free_port() -> int:
    """A TCP port that is free now, and that nobody is likely to take soon.

    Raises:
        ServerError: none of many tried is free.
    """
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no free TCP port among 100 of {PORTS.start} to {PORTS.stop - 1}")


def _command(model_dir: Path, port: int, warmup: bool, flags: Sequence[str]) -> list[str]:
    """Defaults for a small shared CPU machine.

    Stock SGLang would fill 70% of the memory with KV (27 s for 14 GB), so without any flag that
    sizes the cache it gets ``TOKENS``; of recurrent states ``STATES``.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command += ["--dtype", "float32", "--page-size", str(PAGE_SIZE), "--random-seed", "0"]
    # An idle scheduler polls without pause otherwise and eats one of the machine's cores.
    command += ["--sleep-on-idle", "--load-snapshot-publish-interval", "1"]
    if not any(flag.split("=")[0] in _MEMORY_FLAGS for flag in flags):
        command += ["--max-total-tokens", str(TOKENS)]
    if _is_recurrent(model_dir):
        command += ["--max-mamba-cache-size", str(STATES)]
    return command + ([] if warmup else ["--skip-server-warmup"]) + list(flags)


def _is_recurrent(model_dir: Path) -> bool:
    try:
        return '"linear_num_key_heads"' in (model_dir / "config.json").read_text()
    except OSError:
        return False  # SGLang says what is wrong with it


def _quiet(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # as the model, of one with recurrent layers
        # /health would otherwise run a request of its own and wait a second for it.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }


def die_with_parent() -> None:
    """In the child before exec: get SIGKILL when the parent dies (SGLang's own children follow)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_tree(process: subprocess.Popen) -> None:
    """End a session leader, its process group and its descendants; reap the leader."""
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
        _signal_group(process.pid, signal.SIGTERM)
        psutil.wait_procs([psutil.Process(process.pid), *descendants], timeout=STOP_TIMEOUT)
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _body(prompt: str | Sequence[int], max_new_tokens: int, sampling: dict) -> dict[str, Any]:
    defaults = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": max_new_tokens}
    key, value = ("text", prompt) if isinstance(prompt, str) else ("input_ids", list(prompt))
    return {key: value, "sampling_params": defaults | sampling}


def _completion(answer: dict[str, Any]) -> Completion:
    meta = answer["meta_info"]
    return Completion(
        output_ids=answer["output_ids"],
        logprobs=_values(meta.get("output_token_logprobs")),
        text=answer.get("text", ""),  # none with --skip-tokenizer-init
        prompt_tokens=meta.get("prompt_tokens", 0),  # not told if aborted while it waited
        cached_tokens=meta.get("cached_tokens", 0),
        finish_reason=meta["finish_reason"],
        input_logprobs=_values(meta.get("input_token_logprobs")),
        meta=meta,
    )


def _values(triples: list[tuple[float, int, str]] | None) -> list[float] | None:
    return None if triples is None else [logprob for logprob, _, _ in triples]

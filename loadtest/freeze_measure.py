"""Measure one server: batches of requests that decode together, and cold prompts in pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

from loadtest.freeze_results import Batch, Pair
from loadtest.servers import Server, ServerError

POLL_SECONDS = 0.2
CLOCK_TICK = 0.01  # seconds; the kernel counts CPU time in these
UNDER_WAY = 6
"""Tokens that a request has once it certainly decodes; the first is the prefill's. A few more, so
that first tokens of others, which a busy machine may deliver late, are seen too."""

Progress = Callable[[str], None]
"""Called with a line on what a server is doing now."""


@dataclass
class _Followed:
    """One streamed request: when its tokens came, in seconds since the batch began."""

    rid: str
    prompt: Sequence[int]
    tokens: int = 0
    first: float | None = None
    last: float = 0.0
    withdrawn: bool = False

    def note(self, tokens: int, now: float) -> None:
        self.first = now if self.first is None and tokens else self.first
        self.tokens, self.last = tokens, now


@dataclass
class _Drive:
    """Streams a batch and withdraws what is still waiting once others decode.

    Prefill goes before decoding in SGLang, so a request without a token by then did not fit.
    """

    server: Server
    output_tokens: int
    requests: list[_Followed]
    peak_frozen: int | None
    peak_decoding: int = 0
    lock: Lock = field(default_factory=Lock)
    began: float = field(default_factory=time.monotonic)

    def run(self, progress: Progress) -> None:
        with ThreadPoolExecutor(len(self.requests)) as threads:
            try:
                futures = [threads.submit(self._follow, request) for request in self.requests]
                while wait(futures, timeout=POLL_SECONDS).not_done:
                    if any(future.done() and future.exception() for future in futures):
                        break
                    self._look(progress)
                for future in futures:
                    if future.done():
                        future.result()
            except BaseException:
                self.server.kill()  # the threads would wait for its answers
                raise

    def _follow(self, request: _Followed) -> None:
        try:
            for answer in self.server.stream(
                request.prompt, self.output_tokens, request.rid, return_logprob=False
            ):
                if answer.finish_reason and answer.finish_reason["type"] == "abort":
                    break
                request.note(len(answer.output_ids), time.monotonic() - self.began)
                if request.tokens >= UNDER_WAY:
                    self._withdraw()
        except ServerError:
            if not request.withdrawn:
                raise
        if request.tokens < self.output_tokens and not request.withdrawn:
            raise ServerError(f"{request.tokens} of {self.output_tokens} tokens were answered")

    def _look(self, progress: Progress) -> None:
        decoding = self.server.loads()["num_running_reqs"]
        if decoding > self.peak_decoding:
            self.peak_decoding = decoding
            self._look_at_frozen()
        done = sum(request.tokens == self.output_tokens for request in self.requests)
        progress(f"{decoding} decoding, {done} answered" if decoding else "reading prompts")

    def _look_at_frozen(self) -> None:
        if self.peak_frozen is not None:
            state = self.server.info()["internal_states"][0]["raggedkv"]
            self.peak_frozen = max(self.peak_frozen, state["frozen"]["requests"])

    def _withdraw(self) -> None:
        with self.lock:
            idle = [r for r in self.requests if not r.tokens and not r.withdrawn]
            if not idle or len(idle) > self.server.loads()["num_waiting_reqs"]:
                return  # some first token is on its way
            for request in idle:
                request.withdrawn = True
                self.server.abort(request.rid)


def measure_batch(
    server: Server,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    freezes: bool,
    progress: Progress,
) -> Batch:
    """Send ``prompts`` at once, cold, and follow them to ``output_tokens`` tokens each.

    Side effects: the server's prefix cache is emptied first; requests that do not fit beside the
    others are withdrawn. Raises ServerError.
    """
    server.flush_cache()
    stamp = time.monotonic_ns()
    requests = [_Followed(f"batch-{stamp}-{i}", prompt) for i, prompt in enumerate(prompts)]
    before = server.cpu_seconds()
    drive = _Drive(server, output_tokens, requests, 0 if freezes else None)
    drive.run(progress)
    return _figures(drive, server.cpu_seconds() - before)


def _figures(drive: _Drive, cpu_seconds: float) -> Batch:
    finished = [request for request in drive.requests if not request.withdrawn]
    tokens = sum(request.tokens for request in finished)
    seconds = max(request.last for request in finished)
    decoded_from = max(request.first or 0.0 for request in finished)
    return Batch(
        sent=len(drive.requests),
        finished=len(finished),
        withdrawn=len(drive.requests) - len(finished),
        peak_decoding=drive.peak_decoding,
        peak_frozen=drive.peak_frozen,
        output_tokens=tokens,
        seconds=round(seconds, 2),
        cpu_seconds=round(cpu_seconds, 2),
        tokens_per_second=round(tokens / seconds, 3),
        tokens_per_cpu_second=round(tokens / max(cpu_seconds, CLOCK_TICK), 3),
        decode_tokens_per_second=round(
            (tokens - len(finished)) / max(seconds - decoded_from, 1e-3), 3
        ),
    )


def measure_pairs(
    server: Server, prompts: Sequence[Sequence[int]], budget: int, progress: Progress
) -> list[Pair]:
    """Time each prompt alone and cold, once without and once with the freeze.

    The order alternates from pair to pair. Raises ServerError, also if a prompt was not frozen, or
    not cold.
    """
    pairs = []
    for i, prompt in enumerate(prompts):
        progress(f"pair {i + 1} of {len(prompts)}")
        found = {}
        for freeze in (False, True) if i % 2 == 0 else (True, False):
            found[freeze] = _first_token(server, prompt, budget if freeze else None)
        (off, off_cpu), (on, on_cpu) = found[False], found[True]
        pairs.append(Pair(off, on, off_cpu, on_cpu))
    return pairs


def _first_token(server: Server, prompt: Sequence[int], budget: int | None) -> tuple[float, float]:
    """Seconds to the first token of a cold prompt, and the server's CPU seconds until its end."""
    wish = {"kv_retention": "off"} if budget is None else {"kv_budget_tokens": budget}
    server.flush_cache()
    before, began = server.cpu_seconds(), time.monotonic()
    answers = server.stream(prompt, 1, return_logprob=False, custom_params=wish)
    answer = next(answers)
    seconds = time.monotonic() - began
    list(answers)
    cpu_seconds = max(server.cpu_seconds() - before, CLOCK_TICK)
    report = answer.meta["raggedkv"]
    if report["frozen"] is (budget is None) or answer.cached_tokens:
        raise ServerError(
            f"a cold prompt with a budget of {budget} was reported as {report}, "
            f"{answer.cached_tokens} of its tokens cached"
        )
    return seconds, cpu_seconds

"""Run one server of the demo, watch it while it answers, and check its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvpolicy.residency import ceil_div
from loadtest.demo_workload import Contender, Workload, page_bytes
from loadtest.errors import UserError
from loadtest.servers import PAGE_SIZE, Server, ServerError, TextCompletion

POLL_SECONDS = 0.2
ATOL = 1e-4  # nats
RETRACTIONS = "sglang:num_retracted_requests_total"
LAST_LINES = 2
LINE_CHARS = 160

Progress = Callable[[int, int], None]
"""Called as ``progress(answered, running)`` while a server works."""


class Measured(msgspec.Struct, frozen=True):
    """What one server did.

    ``peak_running`` requests at once, as ``/v1/loads`` reported them; ``peak_pages`` are pages of
    16 tokens of one KV head, held by running requests; bytes are of K and V; ``seconds`` from the
    first request sent to the last answer. ``windows`` counts the policy's different windows.
    ``kept_share`` of all prompt tokens were decoded from; None where no prompt was frozen.
    """

    name: str
    policy_id: str | None
    windows: int
    predicted: int
    peak_running: int
    retractions: int
    peak_pages: int
    peak_bytes: int
    request_bytes: int
    seconds: float
    tokens_per_second: float
    start_seconds: float
    command: list[str]
    log: str
    kept_share: float | None = None


class Checked(msgspec.Struct, frozen=True):
    """``answers`` compared with the reference, ``equal`` of them in every token.

    ``worst`` is the largest |logprob - reference| in nats; None if nothing was compared.
    """

    answers: int
    equal: int
    tokens: int
    equal_tokens: int
    worst: float | None


@dataclass
class _Peak:
    """Largest values seen in ``/v1/loads``."""

    running: int = 0
    tokens: int = 0
    now: int = field(default=0, repr=False)

    def update(self, load: dict) -> None:
        self.now = load["num_running_reqs"]
        self.running = max(self.running, self.now)
        self.tokens = max(self.tokens, load["num_used_tokens"])


def measure(
    contender: Contender,
    work: Workload,
    prompts: Sequence[list[int]],
    log: Path,
    progress: Progress,
) -> tuple[Measured, list[TextCompletion]]:
    """Start the server, send all prompts at once, stop it; its figures and its answers.

    Side effects: a server process on a free port, ended on every way out; ``log`` is written.
    Raises UserError with the server's last lines if it does not start, dies or refuses.
    """
    flags = (*contender.flags, "--enable-metrics")
    server = Server(work.model, *flags, log=log)
    try:
        with server:
            began = time.monotonic()
            peak, answers = _drive(server, prompts, work.output_tokens, progress)
            seconds = time.monotonic() - began
            return _figures(contender, work, server, peak, seconds), answers
    except ServerError as error:
        raise UserError(one_line(contender.name, server, error)) from error


def _drive(
    server: Server, prompts: Sequence[list[int]], output_tokens: int, progress: Progress
) -> tuple[_Peak, list[TextCompletion]]:
    peak = _Peak()
    with ThreadPoolExecutor(len(prompts)) as threads:
        try:
            futures = [threads.submit(server.complete, p, output_tokens) for p in prompts]
            while not _ended(futures):
                peak.update(server.loads())
                progress(sum(future.done() for future in futures), peak.now)
                wait(futures, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
            answers = [future.result() for future in futures]
        except BaseException:
            server.kill()  # the threads would wait for its answers
            raise
    progress(len(prompts), 0)
    return peak, answers


def _ended(futures: Sequence[Future]) -> bool:
    return all(f.done() for f in futures) or any(f.done() and f.exception() for f in futures)


def _figures(
    contender: Contender, work: Workload, server: Server, peak: _Peak, seconds: float
) -> Measured:
    pages = ceil_div(peak.tokens, PAGE_SIZE) * work.geometry.num_units
    page, kept = page_bytes(work.geometry), None
    if contender.policy_id is not None:
        state = server.info()["internal_states"][0]["raggedkv"]
        pages, page = state["pages"]["peak_pinned"], state["page_bytes"]
        kept = kept_share(state) if contender.budget is not None else None
    retracted = sum(sample.value for sample in server.metrics().get(RETRACTIONS, []))
    return Measured(
        name=contender.name,
        policy_id=contender.policy_id,
        windows=1 if contender.windows is None else len(contender.windows.levels()),
        predicted=contender.predicted,
        peak_running=peak.running,
        retractions=int(retracted),
        peak_pages=pages,
        peak_bytes=pages * page,
        request_bytes=contender.request_bytes,
        seconds=round(seconds, 2),
        tokens_per_second=round(work.requests * work.output_tokens / seconds, 2),
        start_seconds=round(server.start_seconds, 2),
        command=server.command,
        log=str(server.log),
        kept_share=kept,
    )


def kept_share(state: dict) -> float | None:
    """Share of all frozen prompts' tokens that stayed; None if none was frozen."""
    counters = state["counters"]
    if not counters["freezes"]:
        return None
    return counters["freeze_kept_tokens"] / counters["freeze_prompt_tokens"]


def one_line(name: str, server: Server, error: ServerError) -> str:
    lines = [line.strip()[:LINE_CHARS] for line in server.log_tail(50).splitlines()]
    told = [line for line in lines if line.startswith("raggedkv:")]
    told = told or [line for line in lines if line and "kill_process_tree" not in line]
    told = told[-LAST_LINES:]
    return f"{name}: {error.summary}; it said: {' / '.join(told)}; log: {server.log}"


def sample(count: int, total: int) -> list[int]:
    """``count`` indices spread over ``range(total)``, first and last included."""
    if count < 2:
        return list(range(count))
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def check(
    reference,
    prompts: Sequence[list[int]],
    answers: Sequence[TextCompletion],
    chosen: Sequence[int],
    progress: Callable[[int], None],
) -> Checked:
    """Compare the ``chosen`` answers with a ``MaskedReference``, token by token.

    A token is equal if the reference, given the same text so far, would pick it too and its
    log-probability differs by at most 1e-4 nats.
    """
    equal = tokens = equal_tokens = 0
    worst = None
    for count, index in enumerate(chosen, start=1):
        answer = answers[index]
        compared = reference.compare_greedy(prompts[index], answer.output_ids, answer.logprobs)
        same = compared.equal(ATOL)
        equal += bool(same.all())
        tokens += len(same)
        equal_tokens += int(same.sum())
        worst = max(worst or 0.0, float(compared.difference.max()))
        progress(count)
    return Checked(len(chosen), equal, tokens, equal_tokens, worst)


class Agreement(msgspec.Struct, frozen=True):
    """How far answers follow stock's: ``same`` whole ones, and tokens before the first other."""

    answers: int
    same: int
    tokens: int
    same_tokens: int


def agreement(stock: Sequence[TextCompletion], other: Sequence[TextCompletion]) -> Agreement:
    """Compare two servers' answers to the same prompts."""
    prefixes = [
        _common_prefix(a.output_ids, b.output_ids) for a, b in zip(stock, other, strict=True)
    ]
    lengths = [len(answer.output_ids) for answer in stock]
    same = sum(p == n for p, n in zip(prefixes, lengths, strict=True))
    return Agreement(len(stock), same, sum(lengths), sum(prefixes))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

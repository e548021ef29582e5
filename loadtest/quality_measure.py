"""Measure one contender: its policy in the real engine, over HTTP."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.residency import page_residency, residency
from kvpolicy.windows import FULL, WindowPolicy
from loadtest.demo_measure import one_line
from loadtest.errors import UserError
from loadtest.quality_contenders import Contender, Kind
from loadtest.quality_results import NeedleScore, Row, TextScore
from loadtest.quality_setup import ANSWER_TOKENS, CHUNK, Setup
from loadtest.quality_texts import Excerpt, Needle, Prompts
from loadtest.servers import Completion, Server, ServerError

Tick = Callable[[], None]
"""Called when a prompt was answered; not always in the same thread."""


class Fleet:
    """The servers alive now, so that another thread can end them all."""

    def __init__(self) -> None:
        self._alive: set[Server] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def serve(self, server: Server) -> Iterator[Server]:
        """Start ``server``, stop it on the way out. Raises ServerError, also once closed."""
        with self._lock:
            self._alive.add(server)
        try:
            self._refuse_if_closed()
            with server:
                self._refuse_if_closed()
                yield server
        finally:
            with self._lock:
                self._alive.discard(server)

    def close(self) -> None:
        """End every server, and let no other start. Their threads get a ServerError."""
        with self._lock:
            self._closed = True
            servers = list(self._alive)
        for server in servers:
            server.kill()

    def _refuse_if_closed(self) -> None:
        with self._lock:
            if self._closed:
                raise ServerError("stopped")


@dataclass(frozen=True)
class Bench:
    """What every contender is measured with."""

    setup: Setup
    prompts: Prompts
    fleet: Fleet

    def measure(self, contender: Contender, fingerprint: str, tick: Tick) -> Row:
        """Serve the contender, ask everything, stop it.

        Side effects: a server process on a free port, its log in the output folder. Raises
        UserError with the server's last lines if it does not start, dies, or serves other windows.
        """
        log = self.setup.out / f"{contender.name}.log"
        with tempfile.TemporaryDirectory(prefix="raggedkv-policy-") as root:
            policy = serving_spec(contender, Path(root))
            flags = self._flags()
            server = Server(
                self.setup.model, "--kv-policy", policy, *flags,
                threads=self.setup.threads, log=log,
            )  # fmt: skip
            try:
                with self.fleet.serve(server):
                    return self._ask(server, contender, fingerprint, flags, tick)
            except ServerError as error:
                raise UserError(one_line(contender.name, server, error)) from error

    def _flags(self) -> list[str]:
        flags = ["--kv-arena-bytes", str(self.setup.arena_bytes)]
        return [*flags, "--chunked-prefill-size", str(CHUNK)]

    def _ask(
        self, server: Server, contender: Contender, fingerprint: str, flags: list[str], tick: Tick
    ) -> Row:
        check_served(server, contender.policy)
        context, many = self.setup.context, self.setup.concurrency
        began = time.monotonic()
        scored = ask_all(server, self.prompts.texts, _score, many, tick)
        between = time.monotonic()
        answered = ask_all(server, self.prompts.needles, _answer, many, tick)
        ended = time.monotonic()
        geometry, policy = self.setup.geometry, contender.policy
        return Row(
            name=contender.name,
            kind=contender.kind,
            beside=contender.beside,
            fingerprint=fingerprint,
            residency=residency(policy, geometry, context),
            page_residency=page_residency(policy, geometry, context),
            sinks=policy.sinks,
            windows=policy.windows.tolist(),
            flags=flags,
            start_seconds=round(server.start_seconds, 2),
            text_seconds=round(between - began, 2),
            needle_seconds=round(ended - between, 2),
            peak_pages=_state(server)["pages"]["peak_pinned"],
            cached_tokens=sum(c.cached_tokens for c in (*scored, *answered)),
            texts=_text_scores(self.prompts.texts, scored),
            needles=_needle_scores(self.prompts.needles, answered),
        )


def serving_spec(contender: Contender, root: Path) -> str:
    """What ``--kv-policy`` gets: ``full``, or an artifact of one point written under ``root``."""
    if contender.kind is Kind.FULL:
        return "full"
    points = [PointSpec("default", contender.policy)]
    return str(write_artifact(root, model_name="model", name=contender.name, points=points))


def check_served(server: Server, policy: WindowPolicy) -> None:
    """Raise ServerError unless the server says that it serves exactly ``policy``'s windows."""
    served = [
        (FULL if level["window"] == "full" else level["window"], level["sinks"], level["units"])
        for level in _state(server)["levels"]
    ]
    wanted = [(level.window, level.sinks, len(level.units)) for level in policy.levels()]
    if served != wanted:
        raise ServerError(f"the server holds (window, sinks, units) {served}, not {wanted}")


def _state(server: Server) -> dict:
    return server.info()["internal_states"][0]["raggedkv"]


def ask_all(
    server: Server,
    prompts: Sequence[Excerpt] | Sequence[Needle],
    ask: Callable[[Server, list[int]], Completion],
    concurrency: int,
    tick: Tick,
) -> list[Completion]:
    """``ask`` for each prompt, ``concurrency`` at a time; answers in the prompts' order.

    The first failure ends the server, or the other threads would wait for its answers.
    """
    with ThreadPoolExecutor(concurrency) as threads:
        futures = [threads.submit(ask, server, prompt.ids) for prompt in prompts]
        try:
            for future in as_completed(futures):
                future.result()
                tick()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            server.kill()
            raise
    return [future.result() for future in futures]


def _score(server: Server, ids: list[int]) -> Completion:
    return server.generate(ids, 1, logprob_start_len=0)


def _answer(server: Server, ids: list[int]) -> Completion:
    return server.generate(ids, ANSWER_TOKENS, return_logprob=False)


def _text_scores(texts: Sequence[Excerpt], scored: Sequence[Completion]) -> list[TextScore]:
    return [
        text_score(text, answer.input_logprobs or [])
        for text, answer in zip(texts, scored, strict=True)
    ]


def text_score(text: Excerpt, logprobs: Sequence[float | None]) -> TextScore:
    """Means over a prompt's log-probabilities, one a token, None for the first.

    Raises ServerError if their number or a value is not what a scored prompt has.
    """
    values = np.array(logprobs[1:], dtype=np.float64)
    if len(logprobs) != len(text.ids) or logprobs[0] is not None or not np.isfinite(values).all():
        raise ServerError(
            f"the server scored {len(logprobs)} tokens of a prompt of {len(text.ids)}, or gave a "
            "log-probability that is no number"
        )
    late = values[len(text.ids) // 2 - 1 :]  # from position len // 2 on: the first has no score
    return TextScore(text.corpus, -float(values.mean()), -float(late.mean()))


def _needle_scores(needles: Sequence[Needle], answered: Sequence[Completion]) -> list[NeedleScore]:
    return [
        NeedleScore(
            needle.corpus, round(needle.depth, 4), needle.code, answer.text, answer.output_ids,
            needle.found_in(answer.text),
        )
        for needle, answer in zip(needles, answered, strict=True)
    ]  # fmt: skip

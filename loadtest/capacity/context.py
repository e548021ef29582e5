"""One server and one prompt at a time: the longest that completes, and that is still understood."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.capacity.ask import ask_needles, server_record
from loadtest.capacity.boundary import boundary
from loadtest.capacity.flags import Setup
from loadtest.capacity.needles import LEAST_CONTEXT, Needle, needles, spread
from loadtest.capacity.results import Attempt, ContextSide, Depths, Point
from loadtest.capacity.serve import Remote, alive, grown_peak, peak_bytes
from loadtest.capacity.sides import Side
from loadtest.capacity.watch import Watch
from loadtest.servers import Completion, Server, ServerError

POLL_SECONDS = 0.5
STUCK_POLLS = 4
"""So many looks in a row at a waiting request and an idle server: it will never be admitted."""
CURVE_POINTS = 24
COARSE = 16
"""The search for the longest prompt understood halves down to this part of the longest one."""

ANSWERED, SHORT, REFUSED, WAITING = "answered", "short", "refused", "waiting"


@dataclass(frozen=True)
class Search:
    """What bounds the search: lengths are multiples of ``step``, or ``up_to`` itself."""

    up_to: int
    step: int
    depths: int
    ladder: tuple[int, ...]

    @property
    def rungs(self) -> int:
        """Number of lengths."""
        return -(-self.up_to // self.step)

    def length(self, rung: int) -> int:
        """Length of rung 1.. ``rungs``."""
        return min(rung * self.step, self.up_to)


@dataclass
class ContextBench:
    """Measures one side."""

    setup: Setup
    side: Side
    search: Search
    say: Callable[[str], None]
    attempts: dict[int, Attempt] = field(default_factory=dict)
    depths: dict[int, Depths] = field(default_factory=dict)

    def measure(self, server: Server | Remote, asked: list[Needle]) -> ContextSide:
        """Find both lengths, then ask ``asked``. Raises ServerError if the server dies or hangs."""
        setup, store = self.setup, self.side.store
        predicted = store.longest(setup.output, self.search.up_to)
        for length in self.search.ladder:
            if length <= predicted:
                self._attempt(server, length)
        longest = self._longest(server, predicted)
        answered = self._answered(server, longest)
        kept = self.attempts.get(longest)
        return ContextSide(
            server=server_record(self.side, server),
            predicted=predicted,
            longest=longest,
            answered=answered,
            kv_bytes=kept.kv_bytes if kept else None,
            predicted_kv_bytes=store.peak_bytes(longest, setup.output) if longest else 0,
            memory_bytes=kept.memory_bytes if kept else None,
            prefill_seconds=kept.prefill_seconds if kept else None,
            curve=self._curve(predicted),
            attempts=[self.attempts[length] for length in sorted(self.attempts)],
            depths=[self.depths[length] for length in sorted(self.depths)],
            needles=ask_needles(server, asked, 1, setup.limit_seconds, self.say),
        )

    def _longest(self, server: Server | Remote, predicted: int) -> int:
        search = self.search
        lowest = max(0, -(-LEAST_CONTEXT // search.step) - 1)

        def fits(rung: int) -> bool:
            return self._attempt(server, search.length(rung)).outcome == ANSWERED

        guess = search.rungs if predicted >= search.up_to else predicted // search.step
        rung = boundary(fits, lowest, search.rungs, guess)
        return search.length(rung) if rung > lowest else 0

    def _answered(self, server: Server | Remote, longest: int) -> int:
        """Longest prompt whose needles are found in most depths, to a part of ``longest``."""
        if not longest:
            return 0
        if self._asked(server, longest).answered:
            return longest
        step = max(self.search.step, longest // COARSE // self.search.step * self.search.step)
        rungs = (longest - 1) // step
        lowest = min(rungs, max(0, -(-LEAST_CONTEXT // step) - 1))

        def understood(rung: int) -> bool:
            return self._asked(server, rung * step).answered

        rung = boundary(understood, lowest, rungs, rungs // 2)
        return rung * step if rung > lowest else 0

    def _asked(self, server: Server | Remote, length: int) -> Depths:
        """Needles of one length, until the majority is clear."""
        if length in self.depths:
            return self.depths[length]
        questions = needles(
            self.setup.tokenizer, length, spread(self.search.depths), self.setup.seed
        )
        hits: list[bool] = []
        for needle in questions:
            if max(sum(hits), len(hits) - sum(hits)) * 2 > len(questions):
                break
            known = self.attempts.get(length) if needle.depth == self._depth else None
            if known is not None and known.found is not None:
                hits.append(known.found)
                continue
            self.say(f"needles at {length} tokens: {sum(hits)} of {len(hits)} found")
            found = ask_needles(server, [needle], 1, self.setup.limit_seconds, lambda _: None)
            hits.append(found.hits[0])
        self.depths[length] = Depths(length, hits)
        return self.depths[length]

    @property
    def _depth(self) -> float:
        """Depth of the needle in the prompts that test how long one may be: the middle one."""
        return spread(self.search.depths)[self.search.depths // 2]

    def _attempt(self, server: Server | Remote, length: int) -> Attempt:
        if length not in self.attempts:
            (needle,) = [
                needle
                for needle in needles(
                    self.setup.tokenizer, length, spread(self.search.depths), self.setup.seed
                )
                if needle.depth == self._depth
            ]
            self.say(f"a prompt of {length} tokens")
            self.attempts[length] = self._send(server, needle)
        return self.attempts[length]

    def _send(self, server: Server | Remote, needle: Needle) -> Attempt:
        length, before = len(needle.ids), peak_bytes(server)
        server.flush_cache()
        with Watch(server, self.setup.geometry) as seen:
            sent = _Sent(server, needle.ids, self.setup.output, f"context-{time.monotonic_ns()}")
            outcome, said = sent.follow(self.setup.limit_seconds)
            server.wait_idle(self.setup.limit_seconds)
        done = outcome == ANSWERED
        return Attempt(
            length, outcome, said,
            None if sent.first is None else round(sent.first, 3),
            (grown_peak(before, peak_bytes(server), seen.kv_bytes) or None) if done else None,
            seen.memory_bytes if done else None,
            needle.found_in(sent.text) if done else None,
        )  # fmt: skip

    def _curve(self, predicted: int) -> list[Point]:
        """Predicted bytes by length, up to the longest that is predicted to fit."""
        if not predicted:
            return []
        lengths = {predicted * i // CURVE_POINTS for i in range(1, CURVE_POINTS + 1)} - {0}
        output = self.setup.output
        return [Point(n, self.side.store.peak_bytes(n, output)) for n in sorted(lengths)]


class _Sent:
    """One prompt on its way, followed in a thread; ``first`` is when its first token came [s]."""

    def __init__(self, server: Server | Remote, ids: list[int], tokens: int, rid: str) -> None:
        self._server, self._ids, self._tokens, self._rid = server, ids, tokens, rid
        self.first: float | None = None
        self.text = ""
        self._count = 0
        self._error: ServerError | None = None
        self._reason: dict | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._stream, daemon=True, name="prompt")
        self._thread.start()

    def _stream(self) -> None:
        try:
            for answer in self._server.stream(
                self._ids, self._tokens, self._rid, return_logprob=False
            ):
                self._note(answer)
        except ServerError as error:
            self._error = error

    def _note(self, answer: Completion) -> None:
        self._reason = answer.finish_reason
        self._count, self.text = len(answer.output_ids), answer.text
        if self.first is None and self._count:
            self.first = time.monotonic() - self._began

    def follow(self, limit_seconds: float) -> tuple[str, str]:
        """(outcome, what the server said). Raises ServerError if it died or hangs."""
        try:
            stuck = self._wait(limit_seconds)
        except BaseException:
            self._server.kill()  # the thread would wait for its answer
            raise
        if stuck:
            return WAITING, "it waits although nothing else runs: its pages never suffice"
        if self._error is not None:
            if not alive(self._server):
                raise self._error
            return REFUSED, self._error.summary
        if self._count < self._tokens:
            reason = (self._reason or {}).get("message") or f"{self._count} tokens came"
            return (SHORT if self._count else REFUSED), str(reason)
        return ANSWERED, ""

    def _wait(self, limit_seconds: float) -> bool:
        """Return once the answer is there, or True once it is clear that none will come."""
        waits = 0
        while not self._joined():
            if self._server.returncode is not None:
                raise ServerError(f"the server exited with {self._server.returncode}")
            if time.monotonic() - self._began > limit_seconds:
                raise ServerError(f"no answer after {limit_seconds:.0f} s")
            waits = waits + 1 if self.first is None and self._is_waiting() else 0
            if waits >= STUCK_POLLS:
                self._server.abort(self._rid)
                self._thread.join(limit_seconds)
                return True
        return False

    def _joined(self) -> bool:
        self._thread.join(POLL_SECONDS)
        return not self._thread.is_alive()

    def _is_waiting(self) -> bool:
        """True if the request waits and nothing runs, as of now: the scheduler answers in order."""
        with contextlib.suppress(ServerError):
            self._server.info()
            return self._server.load() == (0, 1)
        return False

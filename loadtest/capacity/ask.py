"""What both commands ask of a server beside the load: needle questions, and what it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from loadtest.capacity.needles import ANSWER_TOKENS, Needle
from loadtest.capacity.results import Needles
from loadtest.capacity.results import Server as Record
from loadtest.capacity.serve import Remote
from loadtest.capacity.sides import Side
from loadtest.servers import Server, ServerError

POLL_SECONDS = 0.25


def ask_needles(
    server: Server | Remote,
    needles: Sequence[Needle],
    at_once: int,
    limit_seconds: float,
    say: Callable[[str], None],
) -> Needles | None:
    """Ask every needle's question, greedy, through ``/v1/completions``; None if there are none.

    Side effects: the prefix cache is emptied first. Raises ServerError if the server dies, refuses
    one, or takes longer than ``limit_seconds`` for all.
    """
    if not needles:
        return None
    server.flush_cache()
    deadline = time.monotonic() + limit_seconds

    def ask(needle: Needle) -> str:
        return server.complete(needle.ids, ANSWER_TOKENS, logprobs=None).text

    with ThreadPoolExecutor(at_once) as threads:
        futures = [threads.submit(ask, needle) for needle in needles]
        try:
            while (now := wait(futures, POLL_SECONDS, FIRST_EXCEPTION)).not_done:
                if any(future.exception() for future in now.done):
                    break
                if time.monotonic() > deadline:
                    raise ServerError(f"no answers after {limit_seconds:.0f} s")
                say(f"needle questions: {len(now.done)} of {len(needles)} answered")
            answers = [future.result() for future in futures if future.done()]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            server.kill()  # the threads would wait for its answers
            raise
    return judged(needles, answers)


def judged(needles: Sequence[Needle], answers: Sequence[str]) -> Needles:
    """Which of the answers hold their needle's code."""
    hits = [needle.found_in(answer) for needle, answer in zip(needles, answers, strict=True)]
    depths = [round(needle.depth, 3) for needle in needles]
    return Needles(
        len(needles[0].ids), len(needles), sum(hits), depths, list(answers), hits
    )  # fmt: skip


def server_record(side: Side, server: Server | Remote) -> Record:
    """What the side was, for the results."""
    started = server.start_seconds
    return Record(
        side.role, side.name, side.what, side.policy_id, side.point, side.budget,
        list(side.flags), side.url, None if started is None else round(started, 2),
    )  # fmt: skip

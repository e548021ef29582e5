"""One server under load: how many requests run together, and how fast at several batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.capacity.ask import ask_needles, server_record
from loadtest.capacity.boundary import boundary
from loadtest.capacity.client import drive
from loadtest.capacity.flags import Setup
from loadtest.capacity.needles import Needle
from loadtest.capacity.results import BatchSide, Probe, Timed
from loadtest.capacity.serve import Remote, grown_peak, peak_bytes, retractions, since
from loadtest.capacity.sides import Side
from loadtest.capacity.texts import Prompt, exact_prompts
from loadtest.capacity.watch import Watch
from loadtest.demo_workload import MAX_REQUESTS
from loadtest.errors import UserError
from loadtest.freeze_measure import measure_batch
from loadtest.freeze_results import load_now
from loadtest.servers import Server, ServerError

SURPLUS = 2
"""Requests sent beyond what is predicted to fit, so that a peak is a limit and not a choice."""

SayLine = Callable[[str], None]


@dataclass
class Texts:
    """The run's prompts, made as they are needed; the first n are the same for every side."""

    setup: Setup
    _made: list[Prompt] = field(default_factory=list)

    def first(self, count: int) -> list[Prompt]:
        """``count`` prompts of exactly the context's length. Raises UserError."""
        if len(self._made) < count:
            setup = self.setup
            self._made = exact_prompts(setup.tokenizer, count, setup.context, setup.seed)
        return self._made[:count]


@dataclass
class BatchBench:
    """Measures one side. ``equal`` requests at once is what the first side holds; None for it."""

    setup: Setup
    side: Side
    texts: Texts
    equal: int | None
    say: SayLine
    probes: list[Probe] = field(default_factory=list)

    def measure(self, server: Server | Remote, needles: list[Needle]) -> BatchSide:
        """Find the largest batch, time the batches, ask the needles. Raises ServerError."""
        setup, side = self.setup, self.side
        predicted, before = side.store.at_once(setup.context, setup.output), peak_bytes(server)
        largest = self._largest(server, predicted)
        batches = sorted({1, min(self.equal or largest, largest), largest})
        runs = [self._timed(server, batch) for batch in batches]
        peak = peak_bytes(server)
        asked = ask_needles(server, needles, min(largest, 4), setup.limit_seconds, self.say)
        return BatchSide(
            server=server_record(side, server),
            predicted=predicted,
            largest=largest,
            request_bytes=side.store.decoding_bytes(setup.context, setup.output),
            probes=self.probes,
            runs=runs,
            kv_bytes=grown_peak(before, peak, max(run.kv_bytes for run in runs)),
            needles=asked,
        )

    def _largest(self, server: Server | Remote, predicted: int) -> int:
        """Most requests that run together without a retraction, from the prediction on."""
        count = min(predicted + SURPLUS, MAX_REQUESTS)
        while True:
            probe = self._probe(server, count)
            if probe.retractions:
                return self._below(server, count, predicted)
            if probe.together < count:
                largest = probe.together
                break
            if count == MAX_REQUESTS:
                largest = count
                break
            count = min(2 * count, MAX_REQUESTS)
        if not largest:
            raise ServerError(f"none of {count} requests of {self.setup.context} tokens ran")
        return largest

    def _below(self, server: Server | Remote, too_many: int, guess: int) -> int:
        """Bisect below a batch that ended in retractions."""

        def fits(count: int) -> bool:
            probe = self._probe(server, count)
            return not probe.retractions and probe.together == count

        largest = boundary(fits, 0, too_many - 1, guess)
        if not largest:
            raise ServerError("even one request was retracted")
        return largest

    def _probe(self, server: Server | Remote, count: int) -> Probe:
        prompts = [prompt.ids for prompt in self.texts.first(count)]
        before = retractions(server)
        limit = self.setup.limit_seconds
        deadline = time.monotonic() + limit

        def say(text: str) -> None:
            if time.monotonic() > deadline:
                raise ServerError(f"{count} requests were not answered in {limit:.0f} s")
            self.say(f"{count} sent at once: {text}")

        batch = measure_batch(server, prompts, self.setup.output, False, say)
        retracted = since(before, retractions(server))
        probe = Probe(count, batch.peak_decoding, batch.withdrawn, retracted, batch.seconds)
        self.probes.append(probe)
        return probe

    def _timed(self, server: Server | Remote, batch: int) -> Timed:
        setup, before, load = self.setup, retractions(server), load_now()
        cpu = [server.cpu_seconds()]
        with Watch(server, setup.geometry) as seen:

            def look() -> None:
                self.say(f"timing a batch of {batch}: {seen.running} running")

            report = drive(
                server, setup.model, self.texts.first(batch), setup.output, setup.limit_seconds,
                look, lambda: cpu.append(server.cpu_seconds()),
            )  # fmt: skip
        if set(report.input_lens) != {setup.context} or set(report.output_lens) != {setup.output}:
            raise ServerError(
                f"asked for {setup.context} + {setup.output} tokens, SGLang's client counted "
                f"{sorted(set(report.input_lens))} + {sorted(set(report.output_lens))}"
            )
        spent = None if isinstance(server, Remote) else server.cpu_seconds() - cpu[-1]
        return Timed(
            batch=batch,
            peak_running=seen.peak_running,
            seconds=round(report.duration, 2),
            output_tokens=report.total_output_tokens,
            output_tokens_per_second=round(report.output_throughput, 3),
            total_tokens_per_second=round(report.total_throughput, 3),
            ttft_median_ms=round(report.median_ttft_ms, 1),
            ttft_p99_ms=round(report.p99_ttft_ms, 1),
            tpot_median_ms=round(report.median_tpot_ms, 1),
            tpot_p99_ms=round(report.p99_tpot_ms, 1),
            cached_tokens=report.cached_tokens,
            retractions=since(before, retractions(server)),
            kv_bytes=seen.kv_bytes,
            memory_bytes=seen.memory_bytes,
            cpu_seconds=None if spent is None else round(spent, 2),
            cpu_ms_per_output_token=None
            if spent is None
            else round(1000 * spent / report.total_output_tokens, 2),
            load=round(load, 2),
        )


def check_room(setup: Setup) -> None:
    """Raise UserError unless every side is predicted to hold one request, and not too many."""
    for side in setup.sides:
        fits = side.store.at_once(setup.context, setup.output)
        where = "the server's memory" if side.url else "--kv-bytes"
        if not fits:
            raise UserError(
                f"{where}: no request of {setup.context} + {setup.output} tokens fits in "
                f"{side.name}; give more, or a smaller --context"
            )
        if fits + SURPLUS > MAX_REQUESTS:
            raise UserError(
                f"{where}: {fits} requests would fit in {side.name}, at most "
                f"{MAX_REQUESTS - SURPLUS} are measured; give less, or a larger --context"
            )

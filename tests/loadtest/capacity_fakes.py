"""Pretended servers for the tests of max-batch and max-context, and a client that starts at once.

The model is a folder with a configuration and a tokenizer whose ids are bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from loadtest import servers
from loadtest.capacity.client import Report
from loadtest.capacity.texts import Prompt
from loadtest.servers import Client, Completion
from tests.loadtest import capacity_server
from tests.loadtest.capacity_server import Behaviour

UNITS, PAGE_BYTES = 8, 16 * 2 * 8 * 4
"""KV heads of the model of ``quality_model``; K and V of 16 tokens of one, in float32."""
TOKEN_BYTES = UNITS * PAGE_BYTES // 16


def launching(monkeypatch, behaviour_of: Callable[[Sequence[str]], Behaviour]) -> None:
    """Every server started from now on is a pretended one, as ``behaviour_of(flags)`` says."""

    def command(model_dir: Path, port: int, warmup: bool, flags: Sequence[str]) -> list[str]:
        behaviour = behaviour_of(flags)
        return [sys.executable, capacity_server.__file__, str(port), behaviour.words()]

    monkeypatch.setattr(servers, "_command", command)


def by_side(**behaviours: Behaviour) -> Callable[[Sequence[str]], Behaviour]:
    """``stock``, ``full``, ``windows`` and ``frozen`` told apart by their flags."""

    def choose(flags: Sequence[str]) -> Behaviour:
        if "--kv-policy" not in flags:
            return behaviours["stock"]
        if "--kv-budget-tokens" in flags:
            return behaviours["frozen"]
        kind = "full" if flags[flags.index("--kv-policy") + 1] == "full" else "windows"
        return behaviours[kind]

    return choose


def quick_client(
    server: Client,
    model: Path,
    prompts: Sequence[Prompt],
    output_tokens: int,
    limit_seconds: float,
    look: Callable[[], None],
    began: Callable[[], None],
) -> Report:
    """Does what SGLang's client does, without the 20 seconds that its imports take."""

    def one(prompt: Prompt) -> tuple[float, float, Completion]:
        began = time.monotonic()
        answers = server.stream(prompt.text, output_tokens, return_logprob=False)
        answer = next(answers)
        first = time.monotonic() - began
        for answer in answers:  # noqa: B007 - the last one is what counts
            pass
        return first, time.monotonic() - began, answer

    server.flush_cache()
    began()
    start = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(one, prompts))
    look()
    seconds = time.monotonic() - start
    output = sum(len(answer.output_ids) for _, _, answer in answers)
    entered = [answer.prompt_tokens for _, _, answer in answers]
    first = np.array([first for first, _, _ in answers]) * 1000
    between = np.array([(last - a) / (output_tokens - 1) for a, last, _ in answers]) * 1000
    return Report(
        duration=seconds, completed=len(prompts), total_output_tokens=output,
        output_throughput=output / seconds, total_throughput=(output + sum(entered)) / seconds,
        median_ttft_ms=float(np.median(first)), p99_ttft_ms=float(first.max()),
        median_tpot_ms=float(np.median(between)), p99_tpot_ms=float(between.max()),
        input_lens=entered, output_lens=[len(answer.output_ids) for _, _, answer in answers],
        errors=[""] * len(prompts), cache_report={"total_cached_tokens": 0},
    )  # fmt: skip

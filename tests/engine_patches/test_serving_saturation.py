"""An arena too small for its load: retractions, aborts in every phase, and still exact answers.

Freed pages are NaN, SGLang retracts on purpose every few forwards and checks its memory while
busy. Whatever completes must equal the reference, and afterwards no page may be missing.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from kvpolicy.geometry import read_geometry
from kvpolicy.residency import peak_bytes
from kvpolicy.retention import RetentionRule
from tests.engine_patches import frozen_server, policies
from tests.engine_patches.frozen_server import FrozenServer
from tests.harness import corpora

LONGEST, OUTPUT, CHUNK, BUDGET = 520, 40, 128, 90
RULE = RetentionRule("gated", alpha_scope="head", keep_window=False, gate="table", share="head")
ENV = {
    "RAGGEDKV_POISON_FREED_PAGES": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "23",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}


@pytest.fixture(scope="module")
def frozen(server_factory, tokenizer, smollm2, tmp_path_factory) -> FrozenServer:
    policy = policies.mixed(smollm2, sinks=4, seed=2)
    geometry = read_geometry(smollm2).with_kv_dtype_bytes(4)
    room = int(2.6 * peak_bytes(policy.levels(), geometry, LONGEST + OUTPUT))
    return frozen_server.start(
        server_factory, tokenizer, tmp_path_factory.mktemp("policy"), smollm2, policy, RULE, BUDGET,
        "--kv-arena-bytes", str(room), "--chunked-prefill-size", str(CHUNK),
        "--max-running-requests", "6", env=ENV,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(frozen: FrozenServer):
    return frozen.server


def test_every_answer_is_exact_under_forced_retraction(frozen, tokenizer, smollm2):
    """Half of the requests are frozen at the end of their prompts, half keep everything."""
    lengths = np.random.default_rng(3).integers(30, LONGEST, size=10)
    prompts = corpora.prompts(tokenizer(smollm2), lengths.tolist(), seed=11)
    prompts += corpora.branching(tokenizer(smollm2), 200, [60, 130], seed=12)
    custom = [{"kv_retention": "off"} if i % 2 else {} for i in range(len(prompts))]
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(frozen.ask, prompt, OUTPUT, **mine)
            for prompt, mine in zip(prompts, custom, strict=True)
        ]
        answers = [future.result() for future in asked]
    for prompt, answer, mine in zip(prompts, answers, custom, strict=True):
        assert len(answer.output_ids) == OUTPUT
        if mine:
            frozen.check_unfrozen(prompt, answer)
        else:
            frozen.check(prompt, answer)
    seen = frozen.state()
    assert seen["counters"]["retractions"] > 0
    assert seen["pages"]["peak_used"] > 0.9 * seen["pages"]["capacity"], "never saturated"
    frozen.check_nothing_is_left()


def test_json_constrained_output_at_a_full_pool(frozen, server, tokenizer, smollm2):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    prompts = corpora.prompts(tokenizer(smollm2), [300, 420, 250, 480], seed=13)
    answers = server.generate_many(
        prompts, 48, concurrency=4, json_schema=json.dumps(schema), ignore_eos=False
    )
    for answer in answers:
        parsed = json.loads(answer.text)
        assert set(parsed) == {"name", "ok"} and isinstance(parsed["ok"], bool)
    frozen.check_nothing_is_left()


class Stream:
    """A streamed request that can be aborted once it has emitted some tokens."""

    def __init__(self, server, prompt, rid: str) -> None:
        self.server, self.rid, self.tokens, self.reason = server, rid, 0, None
        self.last = ""
        sampling = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        self.body = {"input_ids": prompt, "rid": rid, "stream": True, "sampling_params": sampling}
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        url = f"http://127.0.0.1:{self.server.port}/generate"
        with httpx.stream("POST", url, json=self.body, timeout=240) as lines:
            for line in lines.iter_lines():
                self.last = line or self.last
                if line.startswith("data: {"):
                    meta = json.loads(line[6:])["meta_info"]
                    self.tokens = meta["completion_tokens"]
                    self.reason = meta["finish_reason"] or self.reason

    def abort_after(self, tokens: int) -> None:
        deadline = time.monotonic() + 120
        while self.tokens < tokens and time.monotonic() < deadline:
            time.sleep(0.02)
        while self.thread.is_alive() and time.monotonic() < deadline:
            self.server.abort(self.rid)  # again: an abort that overtakes its request is lost
            time.sleep(0.05)


def test_aborts_in_every_phase_leak_nothing(frozen, server, tokenizer, smollm2):
    prompts = corpora.prompts(tokenizer(smollm2), [LONGEST] * 5 + [90] * 4, seed=14)
    decoding = Stream(server, prompts[5], "decoding")
    decoding.abort_after(3)
    chunking = Stream(server, prompts[0], "chunking")
    time.sleep(0.3)  # 520 tokens are five chunks
    chunking.abort_after(0)
    prefilling = Stream(server, prompts[6], "prefilling")
    prefilling.abort_after(0)
    crowd = [Stream(server, prompt, f"crowd-{i}") for i, prompt in enumerate(prompts[1:5])]
    waiting = [Stream(server, prompt, f"waiting-{i}") for i, prompt in enumerate(prompts[7:])]
    for stream in (*reversed(waiting), *crowd[::2]):
        stream.abort_after(0)
    for stream in crowd[1::2]:
        stream.abort_after(5)
    streams = [decoding, chunking, prefilling, *crowd, *waiting]
    for stream in streams:
        stream.thread.join(timeout=240)
    ends = {s.rid: (s.reason or {}).get("type", s.last) for s in streams}
    assert set(ends.values()) == {"abort"}, ends
    frozen.check_nothing_is_left()
    frozen.check(prompts[0], frozen.ask(prompts[0], OUTPUT))


def test_a_prompt_that_can_never_fit_is_refused_and_the_rest_goes_on(
    frozen, server, tokenizer, smollm2
):
    longer = corpora.prompts(tokenizer(smollm2), [6000], seed=15)[0]
    answer = httpx.post(
        f"http://127.0.0.1:{server.port}/generate",
        json={"input_ids": longer, "sampling_params": {"max_new_tokens": 4}},
        timeout=120,
    )
    text = answer.text
    assert answer.status_code != 200 or '"abort"' in text
    assert "KV memory budget" in text or "longer" in text
    assert server.generate(longer[:50], 4).output_ids
    frozen.check_nothing_is_left()

"""An arena too small for its load: retractions, aborts in every phase, and still exact answers.

Freed pages are NaN, SGLang retracts on purpose every few forwards and checks its memory while
busy. Whatever completes must equal the reference, and afterwards no page may be missing.
"""

from __future__ import annotations

import json
import threading
import time

import httpx
import numpy as np
import pytest

from kvpolicy.geometry import read_geometry
from kvpolicy.residency import peak_bytes
from tests.engine_patches import policies
from tests.harness import corpora
from tests.harness.reference import MaskedReference

ATOL = 1e-4
LONGEST, OUTPUT, CHUNK = 520, 40, 128
ENV = {
    "RAGGEDKV_POISON_FREED_PAGES": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "7",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}


@pytest.fixture(scope="module")
def policy(smollm2):
    return policies.mixed(smollm2, sinks=4, seed=2)


@pytest.fixture(scope="module")
def server(server_factory, smollm2, policy, tmp_path_factory):
    geometry = read_geometry(smollm2).with_kv_dtype_bytes(4)
    room = int(2.6 * peak_bytes(policy.levels(), geometry, LONGEST + OUTPUT))
    folder = policies.write(policy, tmp_path_factory.mktemp("policy"))
    flags = ("--kv-policy", str(folder), "--kv-arena-bytes", str(room))
    flags += ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "6")
    return server_factory(smollm2, *flags, env=ENV)


@pytest.fixture(scope="module")
def reference(smollm2, policy):
    return MaskedReference(smollm2, policy.windows, sinks=4)


def state(server) -> dict:
    return server.info()["internal_states"][0]["raggedkv"]


def check_nothing_is_lost(server) -> None:
    server.wait_idle()
    seen = state(server)
    assert seen["requests"] == 0 and seen["pages"]["pinned"] == 0
    assert seen["counters"]["audits"] > 0 and seen["counters"]["audit_faults"] == 0
    server.flush_cache()
    pages = state(server)["pages"]
    assert pages["free"] == pages["capacity"]


def test_every_answer_is_exact_under_forced_retraction(server, reference, tokenizer, smollm2):
    lengths = np.random.default_rng(3).integers(30, LONGEST, size=10)
    prompts = corpora.prompts(tokenizer(smollm2), lengths.tolist(), seed=11)
    prompts += corpora.branching(tokenizer(smollm2), 200, [60, 130], seed=12)
    answers = server.generate_many(prompts, OUTPUT, concurrency=len(prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == OUTPUT
        reference.check_greedy(prompt, answer.output_ids, answer.logprobs, atol=ATOL)
    seen = state(server)
    assert seen["counters"]["retractions"] > 0
    assert seen["pages"]["peak_used"] > 0.9 * seen["pages"]["capacity"], "never saturated"
    check_nothing_is_lost(server)


def test_json_constrained_output_at_a_full_pool(server, tokenizer, smollm2):
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
    check_nothing_is_lost(server)


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


def test_aborts_in_every_phase_leak_nothing(server, reference, tokenizer, smollm2):
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
    check_nothing_is_lost(server)
    answer = server.generate(prompts[0], OUTPUT)
    reference.check_greedy(prompts[0], answer.output_ids, answer.logprobs, atol=ATOL)


def test_a_prompt_that_can_never_fit_is_refused_and_the_rest_goes_on(server, tokenizer, smollm2):
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
    check_nothing_is_lost(server)

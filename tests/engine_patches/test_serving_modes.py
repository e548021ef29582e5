"""Flags that users keep: no radix cache, no overlap, streaming, chat, priorities."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.engine_patches import policies
from tests.harness import corpora
from tests.harness.reference import MaskedReference

ATOL = 1e-4
POISON = {"RAGGEDKV_POISON_FREED_PAGES": "1"}


@pytest.fixture(scope="module")
def policy(smollm2):
    return policies.mixed(smollm2, sinks=17, seed=4)


@pytest.fixture(scope="module")
def server(server_factory, smollm2, policy, tmp_path_factory):
    folder = policies.write(policy, tmp_path_factory.mktemp("policy"))
    flags = ("--kv-policy", str(folder), "--kv-arena-bytes", "60MB")
    flags += ("--disable-radix-cache", "--disable-overlap-schedule")
    flags += ("--chunked-prefill-size", "112", "--enable-metrics")
    return server_factory(smollm2, *flags, env=POISON)


@pytest.fixture(scope="module")
def reference(smollm2, policy):
    return MaskedReference(smollm2, policy.windows, sinks=17)


def test_without_radix_cache_and_overlap(server, reference, tokenizer, smollm2):
    """Seventeen sinks take two pages, chunks of 112 end mid-window, five prompts share 60 MB."""
    prompts = corpora.prompts(tokenizer(smollm2), [500, 77, 340, 16, 611], seed=20)
    answers = server.generate_many(prompts, 30, concurrency=5)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.cached_tokens == 0
        reference.check_greedy(prompt, answer.output_ids, answer.logprobs, atol=ATOL)


def test_nothing_is_cached_when_idle(server):
    server.wait_idle()
    pages = server.info()["internal_states"][0]["raggedkv"]["pages"]
    assert pages["cached"] == pages["pinned"] == 0 and pages["free"] == pages["capacity"]


def test_streaming_chat_through_the_openai_api(server):
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=120).json()["choices"][0]["message"]["content"]
    parts = []
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                parts.append(delta.get("content") or "")
    assert "".join(parts) == whole and len(parts) > 3


def test_metrics_prove_the_policy(server, policy):
    server.generate("The capital of France is", 4)
    server.wait_idle()
    metrics = server.metrics()
    pages = {s.labels["state"]: s.value for s in metrics["raggedkv:pages"]}
    assert pages["capacity"] > 0 and pages["pinned"] == 0
    units = {
        (s.labels["window"], s.labels["sinks"]): s.value for s in metrics["raggedkv:level_units"]
    }
    expected = {
        ("full" if level.is_full else str(level.window), str(level.sinks)): len(level.units)
        for level in policy.levels()
    }
    assert units == expected
    assert metrics["raggedkv:admitted_total"][0].value >= 1
    assert metrics["raggedkv:audit_faults_total"][0].value == 0

"""Flags that users keep: no radix cache, no overlap, streaming, chat, priorities."""

from __future__ import annotations

import json

import httpx
import pytest

from kvpolicy.retention import RULES
from tests.engine_patches import frozen_server, policies
from tests.engine_patches.frozen_server import FrozenServer
from tests.harness import corpora


@pytest.fixture(scope="module")
def policy(smollm2):
    return policies.mixed(smollm2, sinks=17, seed=4)


@pytest.fixture(scope="module")
def frozen(server_factory, tokenizer, smollm2, policy, tmp_path_factory) -> FrozenServer:
    """Freezes only where a request asks for it."""
    return frozen_server.start(
        server_factory, tokenizer, tmp_path_factory.mktemp("policy"), smollm2, policy,
        RULES["head"], None, "--kv-arena-bytes", "60MB", "--disable-radix-cache",
        "--disable-overlap-schedule", "--chunked-prefill-size", "112", "--enable-metrics",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(frozen: FrozenServer):
    return frozen.server


def test_without_radix_cache_and_overlap(frozen, tokenizer, smollm2):
    """Seventeen sinks take two pages, chunks of 112 end mid-window, five prompts share 60 MB."""
    prompts = corpora.prompts(tokenizer(smollm2), [500, 77, 340, 16, 611], seed=20)
    for answers, budget in (
        (frozen.ask_many(prompts, 30), None),
        (frozen.ask_many(prompts, 30, kv_budget_tokens=90), 90),
    ):
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.cached_tokens == 0
            frozen.check(prompt, answer, budget=budget)


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
    info = metrics["raggedkv:policy_info"][0].labels
    assert (info["retention"], info["prompt_budget"]) == ("head", "")
    assert metrics["raggedkv:freezes_total"][0].value >= 3
    assert metrics["raggedkv:frozen_requests"][0].value == 0
    assert metrics["raggedkv:admitted_total"][0].value >= 1
    assert metrics["raggedkv:audit_faults_total"][0].value == 0

"""Against stock SGLang: the same answers where nothing is lost, more requests in the same bytes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvpolicy.geometry import read_geometry
from kvpolicy.residency import peak_bytes, peak_pages
from kvpolicy.store import resolve
from kvpolicy.windows import WindowPolicy
from tests.engine_patches import policies
from tests.harness import corpora

ATOL = 1e-4
KV_BYTES = 120_000_000
PROMPT, OUTPUT = 600, 24
WINDOWS = (32, 48, 96, 160)
STOCK = ("--attention-backend", "torch_native")


def kv_tokens(model: Path) -> int:
    """Tokens of a dense fp32 cache of ``KV_BYTES``, whole pages."""
    per_token = read_geometry(model).with_kv_dtype_bytes(4).bytes_per_token()
    return KV_BYTES // per_token // 16 * 16


def stock(server_factory, model: Path):
    return server_factory(model, *STOCK, "--max-total-tokens", str(kv_tokens(model)))


def ragged(server_factory, model: Path, policy: str):
    return server_factory(model, "--kv-policy", policy, "--kv-arena-bytes", str(KV_BYTES))


@pytest.mark.parametrize(
    ("model_name", "lossless"),
    [
        pytest.param("smollm2", ("full",), marks=pytest.mark.slow),  # two servers
        pytest.param("gemma3", ("full", "native"), marks=pytest.mark.slow),  # three servers
    ],
)
def test_lossless_policies_answer_as_stock_does(
    request, server_factory, tokenizer, model_name, lossless
):
    model = request.getfixturevalue(model_name)
    prompts = corpora.prompts(tokenizer(model), [40, 620], seed=7)

    def answers(server):
        return server.generate_many(prompts, 16, concurrency=2)

    wanted = answers(stock(server_factory, model))
    for policy in lossless:
        for want, got in zip(wanted, answers(ragged(server_factory, model, policy)), strict=True):
            assert got.output_ids == want.output_ids, policy
            assert np.abs(np.subtract(got.logprobs, want.logprobs)).max() <= ATOL, policy


@pytest.mark.slow
def test_native_policy_holds_local_layers_by_their_window(server_factory, gemma3, tokenizer):
    """Gemma's 15 local layers stop growing; a cold run's peak is the formula's."""
    server = ragged(server_factory, gemma3, "native")
    prompt = corpora.prompts(tokenizer(gemma3), [1500], seed=8)[0]
    before = server.info()["internal_states"][0]["raggedkv"]["pages"]["peak_pinned"]
    server.generate(prompt, 4)
    pages = server.info()["internal_states"][0]["raggedkv"]["pages"]
    geometry = read_geometry(gemma3)
    native, full = (
        peak_pages(resolve(kind, geometry).policy.levels(), 1500, 3, 16, chunk=4096)
        for kind in ("native", "full")
    )
    assert before < pages["peak_pinned"] == native < 0.55 * full


def peak_running(server, prompts) -> tuple[int, list]:
    """(largest number of requests running at once, answers)."""
    answers: list = []
    sender = threading.Thread(
        target=lambda: answers.extend(
            server.generate_many(prompts, OUTPUT, concurrency=len(prompts))
        )
    )
    sender.start()
    peak = 0
    while sender.is_alive():
        peak = max(peak, server.load()[0])
        time.sleep(0.1)
    return peak, answers


@pytest.mark.slow  # two servers, each filled to its last page
def test_same_bytes_run_as_many_more_requests_as_predicted(
    server_factory, smollm2, tokenizer, tmp_path
):
    policy = policies.mixed(smollm2, sinks=4, sizes=WINDOWS, seed=1)
    geometry = read_geometry(smollm2).with_kv_dtype_bytes(4)
    stored = PROMPT + OUTPUT
    dense = WindowPolicy.full(geometry).levels()
    predicted = [KV_BYTES // peak_bytes(k, geometry, stored) for k in (dense, policy.levels())]
    prompts = corpora.prompts(tokenizer(smollm2), [PROMPT] * (predicted[1] + 2), seed=9)
    folder = policies.write(policy, tmp_path)

    few, _ = peak_running(stock(server_factory, smollm2), prompts[: predicted[0] + 2])
    server = ragged(server_factory, smollm2, str(folder))
    many, answers = peak_running(server, prompts)

    assert abs(few - predicted[0]) <= 1 and abs(many - predicted[1]) <= 1
    assert many >= 2.5 * few
    assert all(len(answer.output_ids) == OUTPUT for answer in answers)
    state = server.info()["internal_states"][0]["raggedkv"]
    assert state["counters"]["retractions"] == 0
    assert KV_BYTES - state["page_bytes"] < state["arena_bytes"] <= KV_BYTES


@pytest.mark.slow  # a server of its own
def test_peak_pages_of_one_request_equal_the_formula(server_factory, smollm2, tokenizer, tmp_path):
    policy = policies.mixed(smollm2, sinks=4, sizes=WINDOWS, seed=1)
    server = ragged(server_factory, smollm2, str(policies.write(policy, tmp_path)))
    server.flush_cache()  # also forgets earlier peaks
    server.generate(corpora.prompts(tokenizer(smollm2), [777], seed=10)[0], 60)
    pages = server.info()["internal_states"][0]["raggedkv"]["pages"]
    assert pages["peak_pinned"] == peak_pages(policy.levels(), 777, 59, 16, chunk=4096)
    server.wait_idle()
    server.flush_cache()
    pages = server.info()["internal_states"][0]["raggedkv"]["pages"]
    assert pages["free"] == pages["capacity"]

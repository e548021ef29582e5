"""A frozen request keeps what Algorithm 1 says and answers as a dense model masked to it.

Real weights and servers, fp32; freed pages are NaN. Each server has its own chunk size, so that
agreement with one reference also says that the kept set does not depend on it.
"""

from __future__ import annotations

import httpx
import pytest

from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RULES, RetentionRule
from kvpolicy.windows import WindowPolicy
from tests.engine_patches import frozen_server, policies
from tests.engine_patches.frozen_server import FrozenServer
from tests.harness import corpora

LENGTHS = (700, 33, 512, 161, 400, 129, 300, 60)
LAYERED = RetentionRule(
    "layered", observe=32, alpha_scope="layer", pool=3, gate="table", floor=40, share="layer"
)
RAGGED = RetentionRule("ragged", alpha_scope="global", keep_window=True, gate="table", share="head")
MIXED = RetentionRule(
    "mixed", observe=24, pool=1, keep_window=True, gate="off", share="head", mix="table", sinks=7,
    focus=20,
)  # fmt: skip


def _native(model):
    return WindowPolicy.native(read_geometry(model))


def _mixed(model):
    return policies.mixed(model, sinks=4)


CASES = {
    # model, rule, policy of windows, budget, chunk size
    "smollm2-paper-windows": ("smollm2", RULES["paper"], _mixed, 128, 256),
    "smollm2-paper": ("smollm2", RULES["paper"], _native, 128, 224),
    "smollm2-head-windows": ("smollm2", RULES["head"], _mixed, 100, 160),
    "gemma3-paper": ("gemma3", RULES["paper"], _native, 128, 256),
    "smollm2-layered": ("smollm2", LAYERED, _native, 96, 96),
    "smollm2-ragged": ("smollm2", RAGGED, _native, 80, 4096),
    "gemma3-head": ("gemma3", RULES["head"], _native, 100, 112),
    "smollm2-mix-windows": ("smollm2", RULES["mix"], _mixed, 100, 160),
    "smollm2-mix": ("smollm2", RULES["mix"], _native, 96, 96),
    "gemma3-mix": ("gemma3", MIXED, _native, 100, 112),
}
FAST = ("smollm2-paper-windows",)


def _param(name: str):
    return pytest.param(name, marks=() if name in FAST else pytest.mark.slow)


@pytest.fixture(scope="module", params=[_param(name) for name in CASES])
def case(request) -> tuple:
    return CASES[request.param]


@pytest.fixture(scope="module")
def frozen(request, case, server_factory, tokenizer, tmp_path_factory) -> FrozenServer:
    model_name, rule, make_policy, budget, chunk = case
    model = request.getfixturevalue(model_name)
    return frozen_server.start(
        server_factory, tokenizer, tmp_path_factory.mktemp("policy"), model, make_policy(model),
        rule, budget, "--kv-arena-bytes", "250MB", "--chunked-prefill-size", str(chunk),
    )  # fmt: skip


def test_eight_concurrent_prompts_cold_then_warm(frozen: FrozenServer):
    frozen.server.flush_cache()
    prompts = corpora.prompts(frozen.tokenizer, LENGTHS, seed=1)
    cold = frozen.ask_many(prompts, 24)
    warm = frozen.ask_many(prompts, 24)
    for prompt, first, again in zip(prompts, cold, warm, strict=True):
        frozen.check(prompt, first)
        for field in ("positions", "risk_bin"):
            assert again.meta["raggedkv"].get(field) == first.meta["raggedkv"].get(field)
        frozen.check(prompt, again)
        if len(prompt) > 130:
            assert first.cached_tokens == 0 < again.cached_tokens


def test_a_chunk_border_among_the_last_queries(frozen: FrozenServer, case):
    """A prompt alone is cut at whole chunks: what the last queries see comes from two forwards."""
    frozen.server.flush_cache()
    length = 2 * min(case[-1], 160) + 3
    prompt = corpora.prompts(frozen.tokenizer, [length], seed=6)[0]
    frozen.check(prompt, frozen.ask(prompt, 8))


@pytest.mark.parametrize(
    ("custom", "budget"),
    [
        ({"kv_budget_tokens": 5}, 5),
        ({"kv_budget_tokens": 17}, 17),
        ({"kv_budget_ratio": 0.8}, 296),
        ({"kv_budget_ratio": 1.0}, 370),
    ],
)
def test_a_request_may_name_its_budget(frozen: FrozenServer, custom, budget):
    prompt = corpora.prompts(frozen.tokenizer, [370], seed=2)[0]
    frozen.check(prompt, frozen.ask(prompt, 12, **custom), budget=budget)


def test_a_request_may_opt_out(frozen: FrozenServer):
    prompt = corpora.prompts(frozen.tokenizer, [370], seed=2)[0]
    frozen.check_unfrozen(prompt, frozen.ask(prompt, 12, kv_retention="off"))


def test_the_next_turn_equals_a_cold_run(frozen: FrozenServer):
    frozen.server.flush_cache()
    prompt: list[int] = []
    for i, turn in enumerate(corpora.turns(frozen.tokenizer, [330, 60, 75], seed=3)):
        prompt = prompt + turn
        answer = frozen.ask(prompt, 30)
        frozen.check(prompt, answer)
        assert i == 0 or answer.cached_tokens > 0
        prompt = prompt + answer.output_ids


@pytest.mark.slow  # half a minute
def test_two_hundred_tokens_after_the_freeze(frozen: FrozenServer):
    prompt = corpora.prompts(frozen.tokenizer, [240], seed=5)[0]
    frozen.check(prompt, frozen.ask(prompt, 200))


@pytest.mark.parametrize(
    "custom",
    [
        {"kv_budget_tokens": 0},
        {"kv_budget_tokens": "many"},
        {"kv_budget_ratio": 1.5},
        {"kv_budget_tokens": 5, "kv_budget_ratio": 0.5},
        {"kv_retention": "maybe"},
        {"kv_retention": "off", "kv_budget_tokens": 7},
        {"kv_budget": 7},
    ],
    ids=str,
)
def test_a_malformed_budget_is_a_400_with_one_line(frozen: FrozenServer, custom):
    url = f"http://127.0.0.1:{frozen.server.port}"
    sampling = {"max_new_tokens": 2, "custom_params": custom}
    bodies = {
        "/generate": {"input_ids": [1, 2, 3], "sampling_params": sampling},
        "/v1/completions": {
            "model": "default", "prompt": "a", "max_tokens": 2, "custom_params": custom
        },
    }  # fmt: skip
    for path, body in bodies.items():
        answer = httpx.post(url + path, json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "kv_" in answer.text


def test_the_openai_api_takes_a_budget_and_reports(frozen: FrozenServer):
    if frozen.tokenizer.chat_template is None:
        pytest.skip("a base model: no chat template")
    words = [{"role": "user", "content": "Count the sheep, please. " * 30}]
    custom = {"kv_budget_tokens": 48}
    answer = frozen.server.chat(words, 8, custom_params=custom, return_meta_info=True)
    report = answer["choices"][0]["meta_info"]["raggedkv"]
    assert report["frozen"] and report["budget"] == 48
    assert report["prompt_tokens"] == answer["usage"]["prompt_tokens"] > 150
    layers, heads = report["kept_tokens_per_layer"], report["kept_tokens_per_head"]
    assert 1 <= layers["min"] <= layers["mean"] <= layers["max"]
    assert heads["min"] <= layers["min"] and layers["max"] <= heads["max"]
    if frozen.reference.tables.rule.mixes:
        assert heads["mean"] == 48 and heads["min"] < 48 < heads["max"]
    else:
        assert heads["max"] <= 48
    assert "positions" not in report


def test_nothing_is_pinned_or_lost_afterwards(frozen: FrozenServer):
    frozen.check_nothing_is_left()
    counters = frozen.state()["counters"]
    assert counters["freezes"] >= 15
    assert 0 < counters["freeze_kept_tokens"] < counters["freeze_prompt_tokens"]

"""A served policy answers as a dense model with a per-head mask does: real weights, real server.

The prompt is cut into chunks of 256 tokens, freed pages are filled with NaN, and what is compared
are fp32 log-probabilities of the emitted tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_patches import policies
from tests.harness import corpora
from tests.harness.reference import MaskedReference

ATOL = 1e-4
CHUNK = 256
LENGTHS = (700, 33, 512, 161, 900, 48, 300, 16)
FLAGS = ("--kv-arena-bytes", "250MB", "--chunked-prefill-size", str(CHUNK))
POISON = {"RAGGEDKV_POISON_FREED_PAGES": "1"}
CASES = {"smollm2": 4, "gemma3": 0}  # model -> sinks
# A server each. The same windows under a freeze are quick: test_serving_freeze, whose requests may
# opt out of it, and test_serving_saturation.
pytestmark = pytest.mark.slow


class Served:
    """A server with a mixed policy, its tokenizer and its masked reference."""

    def __init__(self, server, tokenizer, reference: MaskedReference) -> None:
        self.server, self.tokenizer, self.reference = server, tokenizer, reference

    def check(self, prompt, answer) -> None:
        """The answer is the reference's greedy one, token by token."""
        self.reference.check_greedy(prompt, answer.output_ids, answer.logprobs, atol=ATOL)

    def state(self) -> dict:
        return self.server.info()["internal_states"][0]["raggedkv"]


@pytest.fixture(scope="module", params=list(CASES))
def served(request, server_factory, tokenizer, tmp_path_factory) -> Served:
    model: Path = request.getfixturevalue(request.param)
    sinks = CASES[request.param]
    policy = policies.mixed(model, sinks)
    folder = policies.write(policy, tmp_path_factory.mktemp("policy"))
    server = server_factory(model, "--kv-policy", str(folder), *FLAGS, env=POISON)
    return Served(server, tokenizer(model), MaskedReference(model, policy.windows, sinks))


def test_eight_concurrent_prompts_of_mixed_lengths_cold_then_warm(served: Served):
    served.server.flush_cache()
    prompts = corpora.prompts(served.tokenizer, LENGTHS, seed=1)
    for expect_hits in (False, True):
        answers = served.server.generate_many(prompts, 24, concurrency=len(prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            served.check(prompt, answer)
            assert (answer.cached_tokens > 0) == (expect_hits and len(prompt) > 16)


def test_identical_prompts_at_once_share_their_pages(served: Served):
    served.server.flush_cache()
    prompt = corpora.prompts(served.tokenizer, [400], seed=2)[0]
    for answer in served.server.generate_many([prompt] * 4, 20, concurrency=4):
        served.check(prompt, answer)


def test_multi_turn_conversation_hits_and_stays_exact(served: Served):
    served.server.flush_cache()
    prompt: list[int] = []
    for i, turn in enumerate(corpora.turns(served.tokenizer, [300, 60, 75], seed=3)):
        prompt = prompt + turn
        answer = served.server.generate(prompt, 30)
        served.check(prompt, answer)
        assert i == 0 or answer.cached_tokens >= (len(prompt) - len(turn) - 1) // 16 * 16
        prompt = prompt + answer.output_ids


def test_a_shared_system_prompt_is_learned_as_a_branch_point(served: Served):
    served.server.flush_cache()
    shared = 600
    branches = corpora.branching(served.tokenizer, shared, [40, 90, 55], seed=4)
    cached = []
    for prompt in branches:
        answer = served.server.generate(prompt, 20)
        served.check(prompt, answer)
        cached.append(answer.cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= shared // CHUNK * CHUNK, "the second branch hits at a chunk end"
    assert cached[2] == shared // 16 * 16, "the third branch hits where the second left the first"


def test_long_decode_slides_every_window(served: Served):
    prompt = corpora.prompts(served.tokenizer, [90], seed=5)[0]
    served.check(prompt, served.server.generate(prompt, 200))


def test_nothing_is_pinned_or_lost_afterwards(served: Served):
    served.server.wait_idle()
    state = served.state()
    assert state["pages"]["pinned"] == 0 and state["requests"] == 0
    assert state["counters"]["audits"] > 0 and state["counters"]["audit_faults"] == 0
    served.server.flush_cache()
    pages = served.state()["pages"]
    assert pages["free"] == pages["capacity"]

"""A server on the Triton kernels, in Triton's interpreter: the reference's answers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine_patches import policies
from tests.harness import corpora

ATOL = 1e-4
BYTES = str(60_000_000)

pytestmark = pytest.mark.slow  # four servers; an interpreted step takes seconds


def answers(server_factory, model, prompts, kernel: str, hits: bool, *flags: str):
    env = {"TRITON_INTERPRET": "1"} if kernel == "triton" else {}
    server = server_factory(
        model, "--kv-arena-bytes", BYTES, "--kv-kernel", kernel, *flags, env=env
    )
    found = server.generate_many(prompts, 5, concurrency=len(prompts))
    again = server.generate(prompts[0], 3)
    assert (again.cached_tokens > 0) == hits
    state = server.info()["internal_states"][0]["raggedkv"]
    assert state["kernel"] == kernel
    server.wait_idle()
    assert server.info()["internal_states"][0]["raggedkv"]["pages"]["pinned"] == 0
    return [*found, again], state["counters"]


@pytest.mark.parametrize("frozen", [False, True], ids=["windows", "frozen"])
def test_answers_are_the_references(server_factory, smollm2, tokenizer, tmp_path, frozen):
    prompts = corpora.prompts(tokenizer(smollm2), [75, 20], seed=3)
    if frozen:
        flags = ["--kv-policy", "compiled", "--kv-budget-tokens", "16"]
    else:
        policy = policies.mixed(smollm2, sinks=4, sizes=(16, 40), seed=1)
        flags = ["--kv-policy", str(policies.write(policy, tmp_path))]
    hits = not frozen  # a freeze observes the last 64 tokens of this short prompt anew
    wanted, _ = answers(server_factory, smollm2, prompts, "reference", hits, *flags)
    found, counters = answers(server_factory, smollm2, prompts, "triton", hits, *flags)
    assert counters["freezes"] == (3 if frozen else 0)
    for want, got in zip(wanted, found, strict=True):
        assert got.output_ids == want.output_ids
        assert np.abs(np.subtract(got.logprobs, want.logprobs)).max() <= ATOL

"""SGLang serves Gated DeltaNet models on the CPU platform: as transformers, in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.engine_patches.gdn import models
from tests.harness.server import Server

TOLERANCE = 1e-4  # nats
FLAGS = (
    "--skip-tokenizer-init", "--dtype", "float32", "--page-size", "16",
    "--max-total-tokens", "8192", "--max-mamba-cache-size", "48", "--max-running-requests", "8",
    "--chunked-prefill-size", "128",
)  # fmt: skip


# A server each. With policies, which are quicker to go wrong: test_serving_policies.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = models.save(request.param, folder)
    with Server(folder, *FLAGS) as server:
        yield server, reference


def prompt(seed: int, length: int) -> list[int]:
    told = torch.randint(2, models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return told.tolist()


def check(served, ids: list[int], answer) -> None:
    expected = models.log_probs(served[1], ids, answer.output_ids)
    worst = max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))
    assert worst < TOLERANCE, worst


@pytest.mark.parametrize("length", [5, 64, 100, 300])
def test_cold_and_warm(served, length):
    """300 tokens are prefilled in chunks of 128; the second time a snapshot is hit."""
    ids = prompt(length, length)
    cold = served[0].generate(ids, 20)
    warm = served[0].generate(ids, 20)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (length - 1) // 64 * 64
    assert warm.output_ids == cold.output_ids
    check(served, ids, cold)
    check(served, ids, warm)


def test_many_at_once(served):
    prompts = [prompt(10 + i, 30 + 40 * i) for i in range(8)]
    for ids, answer in zip(
        prompts, served[0].generate_many(prompts, 24, concurrency=8), strict=True
    ):
        check(served, ids, answer)


def test_branches_of_a_shared_prefix(served):
    shared = prompt(3, 200)
    served[0].generate(shared, 1)
    for seed in (4, 5):
        ids = shared + prompt(seed, 50)
        answer = served[0].generate(ids, 16)
        assert answer.cached_tokens >= 64
        check(served, ids, answer)


def test_long_decode(served):
    """Snapshots are also taken while decoding: the next turn hits them."""
    ids = prompt(6, 70)
    answer = served[0].generate(ids, 300)
    check(served, ids, answer)
    turn = ids + answer.output_ids + prompt(7, 9)
    following = served[0].generate(turn, 8)
    assert following.cached_tokens > len(ids)
    check(served, turn, following)

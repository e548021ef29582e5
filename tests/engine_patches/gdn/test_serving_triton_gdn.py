"""The Triton kernels, in their interpreter, on the full-attention layers of a hybrid."""

from __future__ import annotations

import pytest

from tests.engine_patches import frozen_server, policies
from tests.engine_patches.gdn import models
from tests.engine_patches.gdn.test_serving_policies import FLAGS, prompt
from tests.harness.reference import MaskedReference

pytestmark = pytest.mark.slow  # an interpreted step takes a second


def test_windows_of_a_hybrid(server_factory, tmp_path):
    model = tmp_path / "qwen3_5"
    models.save("qwen3_5", model)
    policy = policies.mixed(model, sinks=4, sizes=(16, 40, 64), seed=1)
    folder = policies.write(policy, tmp_path)
    env = frozen_server.POISON | {"TRITON_INTERPRET": "1"}
    server = server_factory(
        model, "--kv-policy", str(folder), "--kv-kernel", "triton", "--kv-arena-bytes", "2MB",
        *FLAGS, env=env,
    )  # fmt: skip
    reference = MaskedReference(model, policy.windows, policy.sinks)
    ids = prompt(1, 150)
    for cached in (0, 128):
        answer = server.generate(ids, 6)
        assert answer.cached_tokens == cached
        reference.check_greedy(ids, answer.output_ids, answer.logprobs)
    assert server.info()["internal_states"][0]["raggedkv"]["kernel"] == "triton"

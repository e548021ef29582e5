"""Policies on the full-attention layers of a Gated DeltaNet model: exact, warm hits included.

Real servers and random weights, fp32, freed pages filled with NaN; the reference is transformers
with a mask per KV head, its recurrent layers untouched. A prefix hit needs a snapshot of the
recurrent state and live windows at the same length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvpolicy.geometry import read_geometry
from kvpolicy.residency import peak_bytes
from kvpolicy.retention import RULES
from kvpolicy.windows import WindowPolicy
from tests.engine_patches import frozen_server, policies
from tests.engine_patches.frozen_server import FrozenServer
from tests.engine_patches.gdn import models
from tests.harness.reference import MaskedReference

CHUNK, GRID, BUDGET = 128, 64, 60
FLAGS = (
    "--skip-tokenizer-init", "--dtype", "float32", "--max-running-requests", "8",
    "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip
RETRACT = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "23",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
OFF = {"kv_retention": "off"}


def windows(model):
    return policies.mixed(model, sinks=4)


def full(model):
    return WindowPolicy.full(read_geometry(model))


MODES = {  # windows, budget of every prompt: a request without one is served by windows alone
    "windows": (windows, None),
    "freeze": (full, BUDGET),
    "both": (windows, BUDGET),
}
FAST = ("qwen3_5-both",)
CASES = [f"{model}-{mode}" for model in models.CONFIGS for mode in MODES]


def _param(name: str):
    return pytest.param(name, marks=() if name in FAST else pytest.mark.slow)


@pytest.fixture(scope="module", params=[_param(name) for name in CASES])
def case(request, tmp_path_factory) -> tuple:
    name, mode = request.param.split("-")
    folder = tmp_path_factory.mktemp(name)
    models.save(name, folder)
    return (folder, *MODES[mode])


def serve(case, server_factory, tmp_path_factory, *flags: str, env=None) -> FrozenServer:
    model, make_policy, budget = case
    return frozen_server.start(
        server_factory, lambda _: None, tmp_path_factory.mktemp("policy"), model,
        make_policy(model), RULES["mix"], budget, *FLAGS, *flags, env=env,
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(case, server_factory, tmp_path_factory) -> FrozenServer:
    flags = ("--kv-arena-bytes", "8MB", "--max-mamba-cache-size", "64")
    return serve(case, server_factory, tmp_path_factory, *flags)


def prompt(seed: int, length: int) -> list[int]:
    told = torch.randint(2, models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return told.tolist()


def both_ways(served: FrozenServer) -> Iterator[dict]:
    """Parameters of a request: as the server is set, and kept whole."""
    yield from ({}, OFF) if served.budget is not None else ({},)


def check(served: FrozenServer, ids: list[int], answer, custom: dict) -> None:
    if custom or served.budget is None:
        served.check_unfrozen(ids, answer)
    else:
        served.check(ids, answer)


def test_eight_at_once_cold_then_warm(served):
    prompts = [prompt(i, n) for i, n in enumerate((500, 33, 256, 129, 400, 90, 200, 300))]
    for custom in both_ways(served):
        served.server.flush_cache()
        for warm in (False, True):
            answers = served.ask_many(prompts, 24, **custom)
            for ids, answer in zip(prompts, answers, strict=True):
                check(served, ids, answer, custom)
            hits = [answer.cached_tokens > 0 for answer in answers]
            assert sum(hits) >= len(hits) // 2 if warm else not any(hits)


def test_a_prompt_alone_is_hit_on_the_grid(served):
    ids = prompt(10, 300)
    for custom in both_ways(served):
        served.server.flush_cache()
        answers = [served.ask(ids, 16, **custom) for _ in range(3)]
        for answer in answers:
            check(served, ids, answer, custom)
        frozen = answers[0].meta["raggedkv"]["frozen"]
        # the last queries of a frozen prompt are always run: up to there a chunk ended at 128,
        # and the first hit leaves a branch point at the last of the grid
        hits = [128, 192] if frozen else [256, 256]
        assert [answer.cached_tokens for answer in answers] == [0, *hits]


def test_a_shared_prefix_is_hit_where_state_and_windows_are(served):
    """Between chunk ends there is neither, until a branch was seen there once."""
    for custom in both_ways(served):
        served.server.flush_cache()
        shared = prompt(20, 330)
        cached = []
        for seed in (21, 22, 23):
            ids = shared + prompt(seed, 150)
            answer = served.ask(ids, 16, **custom)
            check(served, ids, answer, custom)
            cached.append(answer.cached_tokens)
        assert cached[0] == 0 and cached[1] == 2 * CHUNK
        assert cached[2] == 330 // GRID * GRID, "the second branch leaves both behind"


def test_long_decode_and_the_turn_after_it(served):
    """Snapshots are also taken while decoding; of a frozen prompt only the prompt is reused."""
    for custom in both_ways(served):
        served.server.flush_cache()
        ids = prompt(30, 150)
        answer = served.ask(ids, 300, **custom)
        check(served, ids, answer, custom)
        turn = ids + answer.output_ids + prompt(31, 90)
        following = served.ask(turn, 12, **custom)
        check(served, turn, following, custom)
        frozen = answer.meta["raggedkv"]["frozen"]
        assert following.cached_tokens == (2 * GRID if frozen else 256)


def test_requests_that_are_aborted_leave_nothing(served):
    """Some while their prompt is cut into chunks, some while they decode, some in the queue."""
    prompts = [prompt(90 + i, 100 + 90 * i) for i in range(10)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(served.server.generate, ids, 3000, rid=f"long-{i}")
            for i, ids in enumerate(prompts)
        ]
        for i, one in enumerate(asked):
            while not one.done():  # again: an abort that overtakes its request is lost
                time.sleep(0.1)
                served.server.abort(f"long-{i}")
    assert all(one.result().finish_reason["type"] == "abort" for one in asked)
    ids = prompt(100, 200)
    check(served, ids, served.ask(ids, 8), {})


def test_nothing_is_pinned_or_lost_afterwards(served):
    states = served.state()["recurrent"]
    assert states["slots"] == 64 and states["slot_bytes"] > 0 and states["per_request"] >= 3
    served.check_nothing_is_left()


@pytest.mark.slow  # a server of its own
def test_exact_under_forced_retraction(case, server_factory, tmp_path_factory):
    """Arena and state slots too small for the load, prefixes shared, half of the prompts frozen."""
    model, make_policy, _ = case
    geometry = read_geometry(model).with_kv_dtype_bytes(4)
    room = int(2.6 * peak_bytes(make_policy(model).levels(), geometry, 640))
    served = serve(
        case, server_factory, tmp_path_factory, "--kv-arena-bytes", str(room),
        "--max-mamba-cache-size", "24", env=RETRACT,
    )  # fmt: skip
    lengths = np.random.default_rng(3).integers(30, 420, size=10)
    prompts = [prompt(40 + i, int(n)) for i, n in enumerate(lengths)]
    prompts += [prompt(60, 200) + prompt(61 + i, n) for i, n in enumerate((60, 150))]
    ways = list(both_ways(served))
    custom = [ways[i % len(ways)] for i in range(len(prompts))]
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(served.ask, ids, 150, **mine)
            for ids, mine in zip(prompts, custom, strict=True)
        ]
        answers = [future.result() for future in asked]
    for ids, answer, mine in zip(prompts, answers, custom, strict=True):
        check(served, ids, answer, mine)
    # what a retracted answer left in the tree is what its tokens say, also after a freeze
    turns = [
        ids + answer.output_ids + prompt(80, 40)
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    for turn, mine in zip(turns, custom, strict=True):
        check(served, turn, served.ask(turn, 12, **mine), mine)
    seen = served.state()
    assert seen["counters"]["retractions"] > 0
    assert seen["pages"]["peak_used"] > 0.9 * seen["pages"]["capacity"], "never saturated"
    served.check_nothing_is_left()


@pytest.mark.slow  # a server of its own
def test_a_state_whose_windows_are_gone_is_no_hit(server_factory, tmp_path_factory):
    """Every head has a window: other requests take the cached ones, the tree keeps the states."""
    model = tmp_path_factory.mktemp("qwen3_5")
    models.save("qwen3_5", model)
    policy = policies.mixed(model, sinks=4, sizes=(64, 100, 200))
    folder = policies.write(policy, tmp_path_factory.mktemp("policy"))
    flags = ("--kv-policy", str(folder), "--kv-arena-bytes", "600KB", *FLAGS)
    server = server_factory(model, *flags, "--max-mamba-cache-size", "64", env=frozen_server.POISON)
    reference = MaskedReference(model, policy.windows, policy.sinks)

    def shortened() -> int:
        counters = server.info()["internal_states"][0]["raggedkv"]["counters"]
        return counters["prefix_hits_shortened"]

    def cached(ids: list[int]) -> int:
        answer = server.generate(ids, 8)
        reference.check_greedy(ids, answer.output_ids, answer.logprobs)
        return answer.cached_tokens

    first, *others = (prompt(70 + i, 400) for i in range(5))
    assert [cached(ids) for ids in (first, *others)] == [0] * 5
    before = shortened()
    assert cached(first) < 384 and shortened() > before
    assert cached(others[-1]) == 384, "the most recent one still has both"


@pytest.mark.slow  # a server each
@pytest.mark.parametrize(
    ("flags", "turn"),
    [
        (("--disable-radix-cache",), 0),
        (("--disable-overlap-schedule",), 256),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), 256),
        (("--mamba-track-interval", "64"), 320),
    ],
    ids=lambda flags: flags[0] if isinstance(flags, tuple) else "",
)
def test_other_modes_of_the_scheduler(server_factory, tmp_path, flags, turn):
    """``turn``: tokens of a 379-token second turn that are hit, the last state of its first."""
    model = tmp_path / "qwen3_5"
    models.save("qwen3_5", model)
    policy = policies.mixed(model, sinks=4)
    arena = ("--kv-arena-bytes", "8MB", "--max-mamba-cache-size", "64")
    server = server_factory(
        model, "--kv-policy", str(policies.write(policy, tmp_path)), *FLAGS, *arena, *flags,
        env=frozen_server.POISON,
    )  # fmt: skip
    reference = MaskedReference(model, policy.windows, policy.sinks)

    def exact(ids: list[int], answer) -> None:
        reference.check_greedy(ids, answer.output_ids, answer.logprobs)

    prompts = [prompt(i, n) for i, n in enumerate((300, 90, 200, 410))]
    for _ in range(2):
        for ids, answer in zip(prompts, server.generate_many(prompts, 20, 4), strict=True):
            exact(ids, answer)
            assert turn or not answer.cached_tokens
    first = prompt(6, 70)
    answer = server.generate(first, 300)
    exact(first, answer)
    second = first + answer.output_ids + prompt(7, 9)
    following = server.generate(second, 8)
    exact(second, following)
    assert following.cached_tokens == turn
    server.wait_idle()
    state = server.info()["internal_states"][0]["raggedkv"]
    assert state["pages"]["pinned"] == 0 and state["counters"]["audit_faults"] == 0

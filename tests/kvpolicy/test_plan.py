"""Capacity plans, checked by arithmetic written out here, not by the code under test."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.errors import KvPolicyError, PolicyError
from kvpolicy.plan import longest_context, make_plan, parse_bytes, with_served_dtype
from kvpolicy.render import human_bytes
from kvpolicy.windows import FULL, WindowPolicy

# Qwen3.6-27B-like, by hand: 16 global layers of 4 kv heads; K and V of 256 bf16 numbers.
UNIT_TOKEN = 2 * 256 * 2
DENSE_TOKEN = 16 * 4 * UNIT_TOKEN
# 48 recurrent layers: conv (2 * 16 * 128 + 48 * 128) channels * 3 steps in bf16,
# and 48 heads of 128 x 128 in fp32
STATE = 48 * ((2 * 2048 + 6144) * 3 * 2 + 48 * 128 * 128 * 4)


def mixed(geom, full_units: int, window: int, sinks: int) -> WindowPolicy:
    """The first ``full_units`` of the 64 units full, the others windowed."""
    windows = np.full(64, window, dtype=np.int32)
    windows[:full_units] = FULL
    return WindowPolicy(geom, windows.reshape(16, 4), sinks)


def test_hybrid_constants_by_hand(geometry):
    geom = geometry("qwen3_6_27b")
    assert DENSE_TOKEN == 65_536 == geom.bytes_per_token()
    assert STATE == 153_944_064 == geom.state_bytes_per_request()
    kinds = [layer.kind.value for layer in geom.layers]
    assert kinds.count("global") == 16 and kinds.count("recurrent") == 48


def test_hybrid_weights_by_hand(geometry):
    h = 5120
    attention = h * 6144 * 2 + 2 * h * 1024 + 6144 * h  # q with its gate, k and v, o
    delta = h * (2048 + 2048 + 6144 + 6144 + 48 + 48) + 6144 * h + (2 * 2048 + 6144) * 4
    total = 16 * attention + 48 * delta + 64 * 3 * h * 17408 + 2 * 248320 * h
    assert geometry("qwen3_6_27b").weight_parameters == total
    assert total == pytest.approx(27e9, rel=0.01)


def test_dense_plan_by_hand(geometry):
    geom = geometry("qwen3_6_27b")
    plan = make_plan(
        WindowPolicy.native(geom),
        "native",
        memory_bytes=80 * 10**9,
        weight_bytes=54 * 10**9,
        overhead_bytes=6 * 10**9,
        context=131072,
    )
    assert plan.kv_budget_bytes == 20 * 10**9
    assert plan.state_bytes_per_request == STATE
    assert plan.dense.bytes_per_request == 131072 * DENSE_TOKEN
    assert plan.dense.max_batch == 20 * 10**9 // (131072 * DENSE_TOKEN + STATE) == 2
    pages = (20 * 10**9 - STATE) // (16 * DENSE_TOKEN)
    assert plan.dense.max_context == pages * 16
    assert plan.dense.usable_context == 262144
    assert plan.native.bytes_per_request == plan.dense.bytes_per_request


def test_mixed_plan_by_hand(geometry):
    policy = mixed(geometry("qwen3_6_27b"), 40, 2048, 4)
    plan = make_plan(
        policy, "p", memory_bytes=10**10, weight_bytes=0, overhead_bytes=0, context=131072
    )
    # peak at 131057 = 8191 * 16 + 1 tokens: 8192 pages of a full unit; a windowed one keeps
    # pages from (131057 - 2064) // 16 = 8062 on, i.e. 130, and one sink page
    pages = 40 * 8192 + 24 * (8192 - 8062 + 1)
    assert plan.policy.bytes_per_request == pages * 16 * UNIT_TOKEN
    assert plan.policy.max_batch == 10**10 // (pages * 16 * UNIT_TOKEN + STATE)
    assert plan.policy.residency == pytest.approx((40 * 131072 + 24 * 2052) / (64 * 131072))


def fits(length: int, full_units: int, window: int, budget: int) -> bool:
    """Peak over all lengths up to ``length``, unit by unit, against a budget."""

    def held(s: int) -> int:
        last = -(-s // 16)
        first = max(0, s - window - 16) // 16
        return full_units * last + (64 - full_units) * (last - first + (1 if first else 0))

    # held pages only step at page borders, so two pages of lengths show the peak
    peak = max(held(s) for s in range(max(1, length - 32), length + 1))
    return peak * 16 * UNIT_TOKEN <= budget


@pytest.mark.parametrize("full_units, window", [(32, 1024), (45, 1024), (45, 4096), (63, 64)])
def test_longest_context_is_the_last_that_fits(full_units, window, geometry):
    budget = 114 * 1024 * DENSE_TOKEN
    policy = mixed(geometry("qwen3_6_27b"), full_units, window, 4)
    plan = make_plan(
        policy, "p", memory_bytes=budget + STATE, weight_bytes=0, overhead_bytes=0, context=1024
    )
    longest = plan.policy.max_context
    assert fits(longest, full_units, window, budget)
    assert not fits(longest + 1, full_units, window, budget)
    assert plan.dense.max_context == 114 * 1024


def test_the_paper_s_capacity_needs_45_full_units_of_64(geometry):
    """114K -> 161K is what 45 full units and 19 of 1024 tokens predict."""
    geom = geometry("qwen3_6_27b")
    budget = 114 * 1024 * DENSE_TOKEN + STATE
    longest = {}
    for full_units in (45, 46):
        plan = make_plan(
            mixed(geom, full_units, 1024, 4),
            "p",
            memory_bytes=budget,
            weight_bytes=0,
            overhead_bytes=0,
            context=112 * 1024,
        )
        longest[full_units] = plan.policy.max_context / 1024
    assert longest[46] < 161 < longest[45] < 162


def test_a_cache_that_stops_growing_is_unlimited(geometry):
    geom = geometry("qwen3_6_27b")
    plan = make_plan(
        WindowPolicy.uniform(geom, 4096, 4), "u", memory_bytes=80 * 10**9, context=131072
    )
    assert plan.policy.max_context is None
    assert plan.policy.usable_context == geom.max_context
    assert plan.weights_estimated and plan.overhead_bytes == 8 * 10**9


def test_native_windows_alone_save_most_of_gemma(geometry):
    geom = geometry("gemma3")
    plan = make_plan(WindowPolicy.native(geom), "native", memory_bytes=10**9, context=32768)
    # peak at 32753 tokens: 2048 pages full; native pages from (32753 - 528) // 16 = 2014 on
    pages = 3 * 2048 + 15 * (2048 - 2014)
    assert plan.native.bytes_per_request == pages * 16 * 1024
    assert plan.dense.bytes_per_request == 18 * 2048 * 16 * 1024
    assert plan.native.residency == 1.0


def test_no_room_for_one_request(geometry):
    geom = geometry("qwen3_6_27b")
    plan = make_plan(
        WindowPolicy.full(geom), "full", memory_bytes=10**8, weight_bytes=0, overhead_bytes=0
    )
    assert (plan.policy.max_batch, plan.policy.max_context, plan.policy.usable_context) == (0, 0, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory_bytes": 10**9}, "no memory is left for KV"),
        ({"memory_bytes": 10**12, "context": 0}, "context >= 1"),
        ({"memory_bytes": 10**12, "page_size": 0}, "page size >= 1"),
    ],
)
def test_impossible_plans_are_refused(options, message, geometry):
    with pytest.raises(KvPolicyError, match=message):
        make_plan(WindowPolicy.native(geometry("qwen3_6_27b")), "native", **options)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("512", 512),
        ("7 MB", 7 * 10**6),
        ("3KiB", 3072),
        ("50kB", 50_000),
        ("50 KB", 50_000),
        ("1.5kB", 1500),
        ("2TB", 2 * 10**12),
        ("0", 0),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("count", [0, 999, 1500, 50_000, 2_340_000, 7 * 10**9, 3 * 10**12])
def test_sizes_are_read_as_they_are_printed(count):
    assert parse_bytes(human_bytes(count)) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "80G", "80kiB", "80gb", "-1GB", "1e9", "80 GB x", "1.GB"]
)
def test_bad_sizes(text):
    with pytest.raises(PolicyError, match=r"not understood; use e\.g\. 80GB, 80GiB"):
        parse_bytes(text)


def test_served_dtype(geometry):
    fp32 = geometry("gemma2")
    assert [with_served_dtype(fp32, d).kv_dtype_bytes for d in ("auto", "bf16", "fp32")] == [
        2,
        2,
        4,
    ]
    with pytest.raises(PolicyError, match="accepted: auto, bf16, fp16, fp32"):
        with_served_dtype(fp32, "fp8")


def test_longest_context_searches_any_growing_cost():
    assert longest_context(lambda n: n * 3, 31) == 10
    assert longest_context(lambda n: min(n, 5), 5) is None
    assert longest_context(lambda n: 7, 6) == 0

"""Random programs of requests whose prompts are frozen, against the brute-force model.

As ``test_residents_properties``, with budgets: every forward of a frozen request must read exactly
what its heads kept and what came after, with the right bytes, and every page must be accounted for,
whatever else shares the prompt, is evicted, retracted, aborted or lost on the way.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from engine_patches.budget import Budget
from kvpolicy.windows import FULL, Level
from tests.engine_patches.model import Engine
from tests.engine_patches.model_freezing import most_pages
from tests.engine_patches.model_memory import Setup
from tests.engine_patches.test_residents_properties import WINDOWS, do, endings, stable, steps

PROGRAMS = 120
"""Programs of one test."""

CUSTOM = (
    None,
    None,
    None,
    {"kv_retention": "off"},
    {"kv_budget_tokens": 1},
    {"kv_budget_tokens": 16},
    {"kv_budget_tokens": 47},
    {"kv_budget_ratio": 0.5},
)


@st.composite
def policies(draw) -> tuple[Level, ...]:
    """A full level of one to three units and up to two windowed ones; their units are mixed."""
    sinks = draw(st.sampled_from([0, 4, 17]))
    windows = draw(st.lists(st.sampled_from(WINDOWS[:7]), max_size=2, unique=True))
    keys = [*((w, sinks) for w in sorted(windows)), (FULL, 0)]
    owners = [k for k in range(len(keys)) for _ in range(draw(st.integers(1, 3)))]
    owners = draw(st.permutations(owners))
    return tuple(
        Level(k, w, s, tuple(u for u, owner in enumerate(owners) if owner == k))
        for k, (w, s) in enumerate(keys)
    )


budgets = st.sampled_from(
    [
        None,
        Budget(tokens=3),
        Budget(tokens=16),
        Budget(tokens=16),
        Budget(tokens=33),
        Budget(ratio=0.25),
    ]
)


@st.composite
def setups(draw, cached: bool) -> Setup:
    """An arena of one to six times what one frozen request of medium length may hold."""
    levels, budget = draw(policies()), draw(budgets)
    size = draw(st.sampled_from([4, 4, 16]))
    prompt = draw(st.sampled_from([33, 49, 65, 97]))
    shares = draw(st.sampled_from([(), (0.31, 2.9), (3.7, 0.27, 0.9)]))
    sizes = Setup(levels, size, capacity=0, logical=0, shares=shares)
    one = most_pages(sizes, prompt, prompt + 20, prompt // 2)
    return Setup(
        levels,
        size,
        capacity=int(one * draw(st.sampled_from([1.0, 1.4, 2.0, 2.5, 3.3, 5.0]))),
        logical=draw(st.sampled_from([200, 330])) // size + 30,
        cache=cached,
        overlap=draw(st.booleans()),
        ahead=draw(st.sampled_from([0.0, 0.0, 0.0, 0.3, 1.0])),
        hostile=draw(st.integers(0, 3)) == 3,
        freezes=True,
        budget=budget,
        observe=draw(st.sampled_from([1, 5, 16, 64])),
        shares=shares,
        lag=draw(st.sampled_from([0, 0, 3])),
    )


asks = st.tuples(
    st.just("ask"),
    st.integers(0, 7),
    st.sampled_from([0, 16, 20, 33, 48, 64, 90, 130]),
    st.sampled_from([0, 0, 1, 9, 16, 30, 50]),
    st.integers(0, 2),
    st.sampled_from([1, 2, 12, 35, 60]),
    st.sampled_from(CUSTOM),
)
twins = st.tuples(
    st.just("twins"),
    st.sampled_from([33, 48, 64, 90]),
    st.sampled_from([9, 35, 90]),
    st.sampled_from(CUSTOM),
    st.sampled_from(CUSTOM),
)
crowds = st.tuples(
    st.just("crowd"),
    st.integers(3, 6),
    st.just(32),
    st.sampled_from([1, 9]),
    st.sampled_from([25, 45]),
)
retractions = st.tuples(st.just("retract"), st.integers(1, 7))
losses = st.tuples(st.just("lose_forward"), st.sampled_from([8, 48, 130]))
programs = st.lists(
    st.one_of(asks, asks, twins, crowds, steps, steps, losses, retractions), min_size=8, max_size=20
)


def retract_all(engine: Engine, batches: int) -> None:
    """After some batches every running request goes back to the queue, as a test of SGLang does."""
    for _ in range(batches):
        engine.step(64)
        engine.check()
    for req in list(engine.running):
        engine.release(req, req.computed, checkpoint=False)
        engine.events["forced"] += 1
        if len(req.output_ids) < req.max_new:
            engine.waiting.insert(0, req)
        engine.check()


def step(engine: Engine, name: str, *args) -> None:
    """One step of a program, then all checks."""
    if name == "twins":  # one prompt, twice, with a budget each
        length, answer, *customs = args
        for custom in customs:
            engine.ask(0, 0, length, 2, answer, custom)
    elif name == "retract":
        retract_all(engine, *args)
    else:
        do(engine, name, *args)
    full = len(engine.levels) - 1
    for req in engine.running:
        pages = req.raggedkv.freeze.pages if req.kept is not None else None
        engine.events["uneven"] += pages is not None and len({*pages.counts.tolist()}) > 1
        if req.kept is not None and not engine.ledger.live[full, [n.page for n in req.lock]].all():
            engine.events["prompt evicted"] += 1


def run(setup: Setup, program: list[tuple], batches: int | None) -> Counter[str]:
    """Run a program to its end; returns how often each thing happened."""
    engine = Engine(setup)
    engine.ask(0, 40, 25, 1, 9)
    for name, *args in program:
        step(engine, name, *args)
    engine.finish(batches)
    if setup.ahead == 1.0:
        assert not engine.events["retract"], "what was reserved did not suffice"
    return engine.events


def run_programs(cached: bool, start: int) -> Counter[str]:
    """Run random programs from a seed; returns how often each thing happened in all of them."""
    tally: Counter[str] = Counter()

    @seed(start)
    @settings(stable, max_examples=PROGRAMS)
    @given(setups(cached=cached), programs, endings)
    def every_check_passes(setup, program, batches):
        tally.update(run(setup, program, batches))
        tally["programs"] += 1

    every_check_passes()
    return tally


HAPPENED = ("frozen", "uneven", "frozen again", "lost", "wait", "forced", "abort", "finish", "done")


@pytest.mark.parametrize("start", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_programs_with_the_prefix_cache(start):
    tally = run_programs(True, start)
    assert tally["programs"] >= PROGRAMS
    for happened in (*HAPPENED, "hit", "branch", "dedup", "prompt evicted", "frozen on a hit"):
        assert tally[happened] >= 10, tally


def test_programs_without_the_prefix_cache():
    tally = run_programs(False, start=2)
    assert tally["programs"] >= PROGRAMS
    for happened in HAPPENED:
        assert tally[happened] >= 10, tally
    assert not tally["hit"], tally

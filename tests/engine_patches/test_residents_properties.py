"""Random programs of requests against a brute-force model of every owner and every byte.

A program is a list of steps (ask, prefill, decode, abort, evict, ...) on a small arena, run by the
model engine of ``model.py`` over the real ledger, residents, planner, allocator and admission
arithmetic. After every step all holds, counts and readable bytes are recomputed from scratch, and
every read of every forward is compared with the token it must see.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from engine_patches.snapshots import SnapshotGrid
from kvpolicy.residency import peak_pages, request_pages
from kvpolicy.windows import FULL, Level
from tests.engine_patches.model import Engine
from tests.engine_patches.model_memory import Setup

PROGRAMS = 400
"""Programs of one test; six tests make 2,400, three of them quick."""

WINDOWS = [1, 5, 16, 17, 24, 40, 40, FULL, FULL]

torch.set_num_threads(1)
stable = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def policies(draw, windows=WINDOWS, sinks=(0, 4, 17), native=True) -> tuple[Level, ...]:
    """One to three levels of one to three units; the units' order mixes the levels."""
    common = draw(st.sampled_from(sinks))
    bare = st.booleans() if native else st.just(False)
    keys = draw(
        st.lists(st.tuples(st.sampled_from(windows), bare), min_size=1, max_size=3, unique=True)
    )
    keys = sorted({(w, 0 if w == FULL or no_sinks else common) for w, no_sinks in keys})
    owners = [k for k in range(len(keys)) for _ in range(draw(st.integers(1, 3)))]
    owners = draw(st.permutations(owners))
    return tuple(
        Level(k, w, s, tuple(u for u, owner in enumerate(owners) if owner == k))
        for k, (w, s) in enumerate(keys)
    )


@st.composite
def setups(draw, cached: bool) -> Setup:
    """An arena of one to six times what one request of medium length may hold."""
    levels = draw(policies())
    size = draw(st.sampled_from([4, 4, 16]))
    one = request_pages(levels, draw(st.sampled_from([33, 49, 65, 97])), size)
    return Setup(
        levels,
        size,
        capacity=int(one * draw(st.sampled_from([1.0, 1.7, 2.5, 3.3, 4.0, 6.0]))),
        logical=draw(st.sampled_from([130, 260])) // size + 30,
        cache=cached,
        overlap=draw(st.booleans()),
        ahead=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        hostile=draw(st.integers(0, 3)) == 3,
    )


@st.composite
def recurrent_setups(draw) -> Setup:
    """As ``setups``, of a model that keeps recurrent states on some grid of pages."""
    setup = draw(setups(cached=True))
    step = setup.page_size * draw(st.sampled_from([1, 2, 3]))
    return replace(setup, grid=SnapshotGrid(step, step * draw(st.sampled_from([1, 2])), step))


small = st.integers(0, 7)
asks = st.tuples(
    st.just("ask"),
    small,
    st.sampled_from([0, 3, 16, 20, 32, 33, 48, 64, 90]),
    st.sampled_from([0, 1, 2, 9, 16, 17, 30, 50]),
    st.integers(0, 2),
    st.sampled_from([1, 2, 12, 20, 35]),
)
steps = st.one_of(
    asks,
    asks,
    st.tuples(
        st.just("crowd"),
        st.integers(2, 6),
        st.sampled_from([0, 16, 32]),
        st.sampled_from([1, 2, 9]),
        st.sampled_from([15, 35]),
    ),
    st.tuples(st.just("prefill"), st.sampled_from([3, 8, 16, 23, 48, 64, 130])),
    st.tuples(st.just("prefill"), st.sampled_from([16, 48, 64, 130])),
    st.tuples(st.just("decode"), st.integers(4, 9)),
    st.tuples(st.just("decode"), st.integers(1, 4)),
    st.tuples(st.just("abort"), small, st.booleans()),
    st.tuples(st.just("evict nodes"), st.integers(1, 12)),
    st.tuples(st.just("evict windows"), st.integers(1, 12)),
)
programs = st.lists(steps, min_size=8, max_size=20)
endings = st.sampled_from([0, 0, 0, 9, 9, None])


def do(engine: Engine, name: str, *args: int) -> None:
    """One step of a program, then all checks."""
    if name == "decode":
        for _ in range(args[0]):
            engine.step(64)
    elif name == "evict nodes":
        engine.tree.evict(SimpleNamespace(num_tokens=args[0] * engine.size))
    elif name == "evict windows":
        engine.ledger.evict(args[0])
    else:
        getattr(engine, name)(*args)
    engine.check()


def run(setup: Setup, program: list[tuple], batches: int | None) -> Counter[str]:
    """Run a program to its end; returns how often each thing happened."""
    engine = Engine(setup)
    engine.ask(0, 40, 2, 1, 9)
    for step in program:
        do(engine, *step)
    engine.finish(batches)
    return engine.events


def run_programs(some_setups, start: int) -> Counter[str]:
    """Run random programs from a seed; returns how often each thing happened in all of them."""
    tally: Counter[str] = Counter()

    @seed(start)
    @settings(stable, max_examples=PROGRAMS)
    @given(some_setups, programs, endings)
    def every_check_passes(setup, program, batches):
        tally.update(run(setup, program, batches))
        tally["programs"] += 1

    every_check_passes()
    return tally


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)  # each half a minute
def test_programs_with_the_prefix_cache(start):
    tally = run_programs(setups(cached=True), start)
    assert tally["programs"] >= PROGRAMS
    for happened in ("hit", "branch", "dedup", "wait", "retract", "abort", "finish", "done"):
        assert tally[happened] >= 20, tally


def test_programs_without_the_prefix_cache():
    tally = run_programs(setups(cached=False), start=4)
    assert tally["programs"] >= PROGRAMS
    for happened in ("wait", "retract", "abort", "finish", "done"):
        assert tally[happened] >= 20, tally
    assert not tally["hit"]


def test_programs_of_models_with_recurrent_layers():
    """A hit ends where a state was kept and every window is live, and nothing else changes."""
    tally = run_programs(recurrent_setups(), start=5)
    assert tally["programs"] >= PROGRAMS
    for happened in ("hit", "branch", "dedup", "wait", "retract", "abort", "finish", "done"):
        assert tally[happened] >= 20, tally
    assert tally["state lost"] >= 5, tally


def run_alone(levels, size: int, prompt: int, answer: int, chunk: int) -> Engine:
    """One request without a prefix cache, in an arena that never fills."""
    engine = Engine(Setup(levels, size, capacity=600, logical=140, cache=False))
    engine.ask(0, cut=0, tail=prompt, letter=1, max_new=answer)
    while engine.prefill(chunk):
        engine.check()
    while engine.decode():
        engine.check()
    engine.ledger.lift_fence()
    return engine


@settings(stable, max_examples=200)
@given(
    policies(),
    st.sampled_from([4, 16]),
    st.integers(1, 120),
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_peak_of_one_request_is_the_formula(levels, size, prompt, answer, chunk):
    engine = run_alone(levels, size, prompt, answer, chunk)
    peak = peak_pages(levels, prompt, answer - 1, size, chunk=chunk)
    assert engine.ledger.peak_pinned == peak
    bound = peak_pages(levels, prompt, answer - 1, size)
    assert engine.ledger.peak_used <= bound
    assert (engine.ledger.pinned, engine.ledger.free) == (0, 600)


@settings(stable, max_examples=25)
@given(
    policies(windows=WINDOWS[:6]), st.sampled_from([4, 16]), st.integers(7, 60), st.integers(1, 9)
)
def test_windowed_memory_does_not_grow_with_the_context(levels, size, chunk, answer):
    most = sum(
        len(k.units) * (-(-k.window // size) + 2 + -(-k.sinks // size)) for k in levels
    )  # window, its slack page, the page it starts in, sinks
    for prompt in (130, 390):
        assert run_alone(levels, size, prompt, answer, chunk).ledger.peak_used <= most

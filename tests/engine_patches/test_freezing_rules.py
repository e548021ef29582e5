"""Single rules of a freeze on the host: what is let go in which order, reserved, trimmed, ended."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches import freezing
from engine_patches.budget import Budget
from engine_patches.freeze import Freeze
from engine_patches.prefix import longest_valid_hit
from kvpolicy.windows import FULL, Level
from tests.engine_patches.model import Adder, Engine
from tests.engine_patches.model_freezing import Gate, most_pages
from tests.engine_patches.model_memory import Request, Setup

ONE = (Level(0, FULL, 0, (0,)),)
MIXED = (Level(0, 9, 4, (1,)), Level(1, FULL, 0, (0, 2)))
SHARES = [(), (0.31, 2.9), (3.7, 0.27, 0.9)]
OFF = {"kv_retention": "off"}
stable = settings(deadline=None, derandomize=True, database=None)


def engine_of(levels=ONE, capacity: int = 400, **changes) -> Engine:
    fields = {"page_size": 4, "logical": 400, "freezes": True, "observe": 5, "ahead": 1.0}
    return Engine(Setup(levels, capacity=capacity, **fields | changes))


def start(engine: Engine, prompt: int, answer: int, custom: dict, chunk: int = 999) -> Request:
    """Ask, and prefill ``chunk`` tokens; all prompts are the beginning of the same text."""
    engine.ask(0, 0, prompt, 1, answer, custom)
    req = engine.waiting[-1]
    assert engine.prefill(chunk) and req.raggedkv is not None
    engine.check()
    return req


def tokens(budget: int) -> dict:
    return {"kv_budget_tokens": budget}


# -- what is let go ----------------------------------------------------------------------------


def test_a_cached_prompt_is_evicted_from_its_end():
    engine = engine_of(MIXED)
    req = start(engine, 42, 9, tokens(8))
    path = [node.page for node in req.lock]
    assert len(path) == 10 and engine.ledger.evictable >= 20
    for left in range(9, -1, -1):
        engine.ledger.evict(2)
        assert engine.ledger.live[1, path].tolist() == [True] * left + [False] * (10 - left)
        engine.check()
    while engine.decode():
        engine.check()


def test_so_is_the_prompt_of_a_request_that_kept_everything():
    engine = engine_of()
    req = start(engine, 42, 9, OFF)
    path = [node.page for node in req.lock]
    engine.abort(0, checkpoint=True)
    engine.ledger.evict(4)
    assert engine.ledger.live[0, path].tolist() == [True] * 6 + [False] * 4


def test_a_shorter_hit_is_left_when_a_frozen_prompts_end_was_evicted():
    engine = engine_of()
    req = start(engine, 42, 9, tokens(8))
    engine.ledger.evict(3)
    assert longest_valid_hit(engine.ledger, [node.page for node in req.lock], 4) == 7
    again = start(engine, 42, 9, tokens(8))
    assert len(again.hit) == 7
    engine.finish(None)


@pytest.mark.parametrize("prompt", [40, 41, 43])
def test_the_page_that_the_next_token_goes_into_is_kept(prompt):
    engine = engine_of(cache=False)
    req = start(engine, prompt, 9, tokens(8))
    kept = -(-len(req.kept[0]) // 4)
    assert engine.ledger.pinned == engine.ledger.used == kept + (prompt % 4 > 0)
    assert engine.residents.held(req.raggedkv, 0) == ([10] if prompt % 4 else [])
    assert engine.ledger.evictable == 0


def test_with_a_cache_the_prompt_stays_for_others_to_hit():
    engine = engine_of()
    start(engine, 42, 9, tokens(8))
    other = start(engine, 42, 9, OFF)
    assert len(other.hit) == 10 and other.kept is None
    engine.check()


def test_observed_tokens_are_never_taken_from_the_cache():
    engine = engine_of(observe=5)
    start(engine, 42, 9, OFF)
    req = start(engine, 42, 9, tokens(8))  # the token before 37 predicts it: 36 is computed
    assert len(req.hit) == 9 and req.losses[0] == 36
    engine = engine_of(observe=6)
    start(engine, 42, 9, OFF)
    assert len(start(engine, 42, 9, tokens(8)).hit) == 8
    assert Freeze(42, 8, 42, True).hit_limit == Freeze(42, 8, 41, True).hit_limit == 0


def test_decoded_tokens_of_a_frozen_request_stay_out_of_the_tree():
    engine = engine_of()
    for custom, cached in ((tokens(8), 10), (OFF, 12)):
        req = start(engine, 42, 9, custom)
        while engine.step(999):
            engine.check()
        assert req.over
        assert sum(1 for _ in engine.tree.nodes()) == cached


# -- compact pages -----------------------------------------------------------------------------


def keep_nine(engine: Engine) -> None:
    engine.freezer._draw = lambda freeze, _: np.arange(freeze.prompt - 9, freeze.prompt)


def test_surplus_pages_go_once_the_device_has_told():
    engine = engine_of(cache=False, lag=50)
    keep_nine(engine)
    req = start(engine, 42, 60, tokens(32))
    freeze = req.raggedkv.freeze
    freeze._ready = Gate(2)
    for pages in (8, 8, 8, 3, 3):
        assert freezing.compact_held(freeze) == pages
        engine.decode()
        engine.check()
    assert freezing.trim(engine.residents, req.raggedkv) is None


@pytest.mark.parametrize("lag", [0, 2])
def test_what_was_kept_is_counted_once(lag):
    engine = engine_of(MIXED, lag=lag)
    keep_nine(engine)
    reqs = [start(engine, 42, 30, tokens(n)) for n in (12, 20)]
    engine.finish(None)
    counters = engine.allocator.counters
    assert all(req.over for req in reqs) and counters.freezes == 2
    assert (counters.freeze_prompt_tokens, counters.freeze_kept_tokens) == (84, 18)


def test_no_chunk_may_run_past_the_end_of_a_prompt_that_freezes():
    engine = engine_of(cache=False)
    residents = engine.residents
    resident = residents.admit([], freeze=Freeze(10, 4, 5, True))
    residents.prepare([(resident, 3, 11)])
    with pytest.raises(RuntimeError, match="past position 10"):
        residents.extend(resident, [1, 2, 3], 11)


# -- the end, in every phase -------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("phase", ["before", "between", "after", "told late", "resumed"])
def test_a_request_that_ends_in_any_phase_leaves_nothing(phase, cache):
    engine = engine_of(MIXED, cache=cache, lag=9 if phase == "told late" else 0)
    if phase == "between":
        engine.ask(0, 0, 42, 1, 9, tokens(8))
        engine.lose_forward(999)
        assert engine.events["lost"] == 1
    else:
        req = start(engine, 42, 9, tokens(8), chunk=20 if phase == "before" else 999)
        assert (req.kept is None) == (phase == "before")
        if phase == "resumed":
            engine.decode()
            engine.decode()
            engine.release(req, req.computed, checkpoint=False)
            engine.waiting.append(req)
            assert engine.prefill(999) and req.kept is not None and req.computed == 42
            engine.check()
            assert engine.prefill(999) and req.computed == 44 + 1
        engine.check()
        engine.abort(0, checkpoint=False)
    engine.check()
    assert engine.ledger.pinned == 0 and not engine.residents.running
    assert engine.ledger._private == set()
    engine.finish(0)


# -- what is reserved --------------------------------------------------------------------------


@settings(stable, max_examples=60)
@given(
    st.sampled_from([ONE, MIXED, (Level(0, 24, 0, (0, 2)), Level(1, FULL, 0, (1,)))]),
    st.sampled_from([4, 16]),
    st.integers(2, 90),
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(3, 60),
    st.sampled_from(SHARES),
)
def test_a_request_alone_comes_to_pin_what_was_reserved_and_never_more(
    levels, size, prompt, budget, answer, chunk, shares
):
    """At every moment what it pins and may still need lies between the truth and the start."""
    budget = Budget(tokens=budget)
    engine = engine_of(levels, page_size=size, cache=False, budget=budget, shares=shares)
    engine.ask(0, 0, prompt, 1, answer)
    req, residents, ledger = engine.waiting[0], engine.residents, engine.ledger
    length = prompt + answer
    reserved = residents.prefix_cost([], length, engine.allocator.freeze_of(req))
    assert reserved == most_pages(engine.setup, prompt, length, req.keep)
    seen = []
    while engine.step(chunk):
        if req.raggedkv is not None:
            seen.append((ledger.pinned, residents.future_pages(req.raggedkv, length)))
    assert req.over and ledger.peak_pinned <= reserved
    for i, (pinned, ahead) in enumerate(seen):
        assert max(p for p, _ in seen[i:]) <= pinned + ahead <= reserved
    if req.keep is not None and levels is ONE and answer < prompt // size * size:
        assert ledger.peak_pinned == reserved  # its prompt and its compact pages together


@pytest.mark.parametrize(
    ("levels", "kept", "pages"),
    [(ONE, None, [3]), (MIXED, None, [3, 3]), (ONE, [9], [3]), (MIXED, [16, 2], [4, 1])],
)
def test_compact_pages_are_reserved_until_they_are_taken(levels, kept, pages):
    """Also in the moment between the last chunk's allocation and its forward."""
    engine = engine_of(levels, cache=False)
    kept, compact = None if kept is None else np.array(kept), sum(pages)
    residents, freeze = engine.residents, Freeze(42, 9, 5, True, kept)
    cost = residents.prefix_cost([], 50, freeze)
    resident = residents.admit([], freeze=freeze)
    for length, ahead in ((20, compact), (42, 0)):
        new = list(range(len(resident.pages) + 1, -(-length // 4) + 1))
        assert freezing.compact_pages(residents, resident, length) == (length == 42) * compact
        residents.prepare([(resident, len(new), length)])
        residents.extend(resident, new, length)
        assert freezing.compact_ahead(residents, freeze) == ahead
        assert residents.ledger.pinned + residents.future_pages(resident, 50) == cost
    assert freeze.pages.counts.tolist() == pages
    assert freeze.kept_positions.shape == (len(pages), 4 * max(pages))
    freezing.settle(residents, resident)
    tail = residents.future_pages(resident, 50)
    assert freezing.compact_ahead(residents, freeze) == 0
    residents.release(resident)
    assert freezing.compact_ahead(residents, freeze) == 0 and 0 < tail < cost


def pins_after(first: dict, second: dict, answer: int) -> tuple[int, int]:
    """(promised, most pinned) for two requests with one prompt of which the second is admitted."""
    engine = engine_of(observe=1)
    one = start(engine, 40, answer, first)
    engine.ask(0, 0, 40, 1, answer, second)
    two, adder = engine.waiting[0], Adder(engine)
    limit = engine.allocator.hit_limit(two)
    pages = None if limit is None else limit // engine.size
    two.hit = [node.page for node in engine.tree.match(two.tokens)][:pages]
    assert len(two.hit) >= 9
    promised = adder.shortage(two) + engine.ledger.capacity
    two.hit = []
    engine.ledger.peak_pinned = 0
    while engine.step(999):
        engine.check()
    assert one.over and two.over
    return promised, engine.ledger.peak_pinned


@pytest.mark.parametrize("answer", [5, 40, 100])
@pytest.mark.parametrize("first", [OFF, tokens(4), tokens(39)])
@pytest.mark.parametrize("second", [OFF, tokens(4), tokens(39)])
def test_pages_shared_with_another_request_do_not_serve_the_answer(first, second, answer):
    """A frozen request lets go of a common prompt, but its tail takes pages of its own."""
    promised, pinned = pins_after(first, second, answer)
    assert pinned <= promised


@pytest.mark.parametrize("capacity", [56, 58, 60, 61])
def test_pages_of_a_prompt_that_is_about_to_freeze_are_not_counted_twice(capacity):
    """It counts on them for its answer, so whoever hits them meanwhile must pay for them."""
    engine = engine_of(capacity=capacity, observe=1)
    req = start(engine, 40, 100, tokens(4))
    for _ in range(98):
        engine.decode()
    engine.release(req, req.computed, checkpoint=False)  # a retraction
    engine.waiting.append(req)
    engine.tree.evict(SimpleNamespace(num_tokens=999))
    assert engine.prefill(20) and req.computed == 20
    engine.ask(0, 0, 140, 1, 2, OFF)
    while engine.step(999):
        engine.check()
    assert engine.events["done"] == 2 and not engine.events["retract"]


@pytest.mark.parametrize("capacity", [52, 56, 60, 61])
def test_an_admitted_request_never_runs_out_of_pages(capacity):
    """Also when it was retracted and its output comes back as prefill."""
    engine = engine_of(capacity=capacity, observe=1)
    start(engine, 40, 100, OFF)
    engine.ask(0, 0, 40, 1, 100, tokens(4))
    while engine.step(999):
        engine.check()
    assert engine.events["done"] == 2 and not engine.events["retract"]


@settings(stable, max_examples=80)
@given(
    st.sampled_from([ONE, MIXED, (Level(0, 150, 0, tuple(range(5))), Level(1, FULL, 0, (5,)))]),
    st.sampled_from([4, 16]),
    st.integers(2, 150),
    st.floats(0.1, 1.0),
    st.integers(1, 150),
    st.sampled_from(SHARES),
)
def test_a_request_that_is_let_in_fits_an_empty_arena(levels, size, prompt, share, answer, shares):
    """What bounds a new request and what admits it must agree, or it waits for ever."""
    engine = engine_of(levels, page_size=size, logical=4000, shares=shares)
    req = Request(0, [1] * prompt, prompt, 0, 1, custom={"kv_budget_ratio": share})
    freeze = engine.allocator.freeze_of(req)
    whole = engine.residents.prefix_cost([], prompt + answer, freeze)
    for capacity in range(max(1, whole - 20), whole + 1):
        engine.ledger.num_pages = capacity + 1
        with engine.allocator.considering(req):
            most = engine.allocator.max_new_tokens_for_memory(
                prompt, answer, token_capacity=10**6, sliding_window_size=None, chunk_size=None
            )
        if most is not None:
            assert engine.residents.prefix_cost([], prompt + most, freeze) <= capacity
    assert most == answer


def test_pages_of_a_frozen_request_count_as_what_its_end_would_free():
    engine = engine_of(cache=False)
    req = start(engine, 42, 9, tokens(8))
    assert engine.residents.exclusive_pages(req.raggedkv) == engine.ledger.pinned > 1
    assert engine.residents.available() == engine.ledger.capacity - engine.ledger.pinned


def test_a_policy_without_a_full_level_has_nothing_to_freeze():
    ledger = SimpleNamespace(levels=(Level(0, 9, 4, (0,)),))
    assert freezing.full_level(ledger) is None

"""The patches that know about frozen prompts, each between a fake SGLang and a fake server."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from engine_patches import loss, serving
from engine_patches.budget import Budget, BudgetError, Wish, wish_of
from engine_patches.counters import Counters
from engine_patches.freeze import Freeze, Freezer, FreezeReport
from engine_patches.host_pages import HostPages
from engine_patches.ledger import PageLedger
from engine_patches.patches import (
    forward_plan,
    observed_loss,
    prefix_insert,
    prefix_match,
    request_bound,
    request_budget,
    request_report,
)
from engine_patches.plan import DecodePlan, ExtendPlan
from kvpolicy.retention import RetentionRule
from kvpolicy.windows import FULL, Level


@pytest.fixture
def serve(monkeypatch):
    """``serve(**fields)``: this process serves a fake policy that can freeze prompts."""

    def set_up(**fields) -> SimpleNamespace:
        wish = partial(wish_of, default=Budget(tokens=100), retains=True)
        plain = {"wish": wish, "freezer": object(), "plan": None, "allocator": None}
        served = SimpleNamespace(**plain | fields)
        monkeypatch.setattr(serving, "_current", served)
        return served

    monkeypatch.setattr(serving, "_current", None)
    return set_up


# -- a request's budget ------------------------------------------------------------------------


def verify(custom) -> str:
    params = SamplingParams(custom_params=custom)
    return request_budget.verify("checked", params, 100)


@pytest.mark.parametrize("custom", [None, {"other": 1}, {"kv_budget_tokens": 7}])
def test_a_good_budget_passes(serve, custom):
    serve()
    assert verify(custom) == "checked"


def test_a_malformed_budget_is_a_value_error_only_while_a_policy_is_served(serve):
    assert verify({"kv_budget_tokens": 0}) == "checked"
    serve()
    with pytest.raises(ValueError, match="kv_budget_tokens must be"):
        verify({"kv_budget_tokens": 0})


class Considering:
    """An allocator that notes which request its bound is asked for."""

    def __init__(self) -> None:
        self.now = None

    def considering(self, req):
        self.now = req
        return nullcontext()


def test_the_bound_of_a_request_is_asked_for_that_request(serve):
    allocator = Considering()
    serve(allocator=allocator)
    ended = []
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params={"kv_budget_tokens": 7}),
        set_finish_with_abort=ended.append,
    )

    def original(scheduler, asked):
        assert (scheduler, asked, allocator.now) == ("scheduler", req, req)
        return "bound"

    assert request_bound.init_req_max_new_tokens(original, "scheduler", req) == "bound"
    assert ended == []
    req.sampling_params.custom_params = {"kv_budget_ratio": 7}
    request_bound.init_req_max_new_tokens(original, "scheduler", req)
    assert len(ended) == 1 and ended[0].startswith("kv_budget_ratio must be")


# -- the report --------------------------------------------------------------------------------


class Answers:
    """A tokenizer manager that accumulates ``customized_info`` as SGLang does, one list a key."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(lists={})

    def original(self, manager, meta_info, state, info, index, finish_reason) -> None:
        for key, values in info.items():
            state.lists.setdefault(key, []).extend(values[index])
            meta_info[key] = list(state.lists[key])

    def answer(self, info: dict, index: int = 0) -> dict:
        meta: dict = {}
        request_report.update_request_meta_info(
            self.original, "manager", meta, self.state, info, index, None
        )
        return meta


def test_the_report_is_repeated_in_every_answer_and_is_no_list(serve):
    serve()
    answers = Answers()
    report = {"frozen": True}
    first = {"raggedkv": [[{"frozen": False}], [report]], "other": [["x"], ["y"]]}
    assert answers.answer(first, index=1) == {"raggedkv": report, "other": ["y"]}
    for later in ({"raggedkv": [[None, None]], "other": [["z"]]}, {"other": [["z"]]}):
        assert answers.answer(later)["raggedkv"] == report
    assert "raggedkv" not in answers.state.lists
    assert answers.state.lists["other"] == ["y", "z", "z"]


def test_no_report_is_no_entry(serve):
    serve()
    assert Answers().answer({"other": [["x"]]}) == {"other": ["x"]}
    assert Answers().answer({"raggedkv": [[None]]}) == {}
    assert Answers().answer({"raggedkv": None}) == {}


def test_without_a_policy_the_key_is_anybodys(serve):
    assert Answers().answer({"raggedkv": [["mine"]]}) == {"raggedkv": ["mine"]}


def test_a_report_of_a_frozen_prompt_is_plain():
    report = FreezeReport(40, budget=8)
    report.counts, report.layers = torch.tensor([3, 5, 8]), np.array([0, 0, 2])
    assert report.copy() == {
        "prompt_tokens": 40,
        "budget": 8,
        "frozen": True,
        "kept_tokens_per_layer": {"min": 4.0, "mean": 6.0, "max": 8.0},
        "kept_tokens_per_head": {"min": 3.0, "mean": 16 / 3, "max": 8.0},
        "risk_bin": None,
    }
    report.bins = torch.tensor(2), torch.tensor(1)
    report.risks = torch.tensor(0.5), torch.tensor(3.0)
    report.positions = torch.tensor([[1, 4, -1], [0, 39, -1], [2, 3, 39]])
    plain = report.copy()
    assert (plain["risk_bin"], plain["entropy"], plain["perplexity"]) == ([2, 1], 0.5, 3.0)
    assert plain["positions"] == [[1, 4], [0, 39], [2, 3, 39]]


def test_a_report_of_a_prompt_left_alone_says_why():
    assert FreezeReport(40, reason="no budget").copy() == {
        "prompt_tokens": 40, "budget": None, "frozen": False, "reason": "no budget",
    }  # fmt: skip


# -- the plan and the loss ---------------------------------------------------------------------


@pytest.mark.parametrize("plan", [None, "a plan"])
@pytest.mark.parametrize("freezer", [None, "a freezer"])
def test_losses_are_observed_only_where_a_batch_may_freeze(serve, monkeypatch, freezer, plan):
    seen = []
    monkeypatch.setattr(loss, "observe_losses", lambda *args: seen.append(args))

    def original(*args, **kwargs):
        assert kwargs == {"aux_hidden_states": 5}
        return args

    call = partial(observed_loss.forward, original, "processor", "ids", "states", "head", "meta")
    assert call(aux_hidden_states=5) == ("processor", "ids", "states", "head", "meta")
    assert seen == []
    serve(freezer=freezer, plan=plan)
    assert call(aux_hidden_states=5) == ("processor", "ids", "states", "head", "meta")
    wanted = ("processor", "a plan", "states", "head", "meta")
    assert seen == ([wanted] if freezer and plan else [])


@pytest.mark.parametrize("kind", ["extend", "decode", "warm-up", "no freezer"])
def test_prompts_freeze_once_their_forward_was_launched(serve, kind):
    plan = ExtendPlan([0], [3], [[]], [], [None], reports=["report"])
    if kind == "decode":
        plan = DecodePlan(torch.zeros(1), [], [])
    launched, frozen = [], []
    allocator = SimpleNamespace(
        after_forward=lambda found: frozen.append((found, list(launched), served.plan))
    )
    freezer = None if kind == "no freezer" else object()
    served = serve(allocator=allocator, freezer=freezer)
    output = SimpleNamespace(customized_info=None)

    def original(runner, batch):
        launched.append(served.plan)
        return SimpleNamespace(logits_output=output)

    batch = SimpleNamespace(raggedkv_plan=None if kind == "warm-up" else plan)
    forward_plan.forward(original, "runner", batch)
    assert launched == [batch.raggedkv_plan] and served.plan is None
    if kind == "extend":
        assert frozen == [(plan, [plan], plan)]
        assert output.customized_info == {"raggedkv": ["report"]}
    else:
        assert frozen == [] and output.customized_info is None


# -- the prefix tree ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freeze", "up_to", "inserted"),
    [(None, 90, 90), (Freeze(40, 4, 5, True), 90, 40), (Freeze(40, 4, 5, True), 30, 30)],
)
def test_only_the_prompt_of_a_frozen_request_goes_into_the_tree(serve, freeze, up_to, inserted):
    calls, followed = [], []
    allocator = SimpleNamespace(
        residents=SimpleNamespace(drops_deferred=nullcontext),
        follow_tree=lambda req, row: followed.append(row.tolist()),
    )
    req = SimpleNamespace(
        raggedkv=SimpleNamespace(freeze=freeze),
        kv=SimpleNamespace(req_pool_idx=1, cache_protected_len=4),
        finished=lambda: False,
    )
    rows = torch.arange(200).view(2, 100)
    tree = SimpleNamespace(disable=False, req_to_token_pool=SimpleNamespace(req_to_token=rows))

    def original(self, asked, *, up_to, **kwargs):
        calls.append((asked, up_to, kwargs))

    serve(allocator=allocator)
    prefix_insert.checkpoint_into_tree(original, tree, req, up_to=up_to, chunked=True)
    assert calls == [(req, inserted, {"chunked": True})]
    assert followed == [[100, 101, 102, 103]]


@pytest.mark.parametrize(
    ("freeze", "tracked", "over", "left"),
    [
        (Freeze(150, 4, 5, True), 214, False, None),  # re-computed after a retraction: frozen
        (Freeze(150, 4, 5, True), 128, False, 128),
        (Freeze(150, 4, 5, True), 214, True, 214),  # SGLang looks for an earlier one itself
        (Freeze(150, 4, 5, True), None, False, None),
        (None, 214, False, 214),
    ],
)
def test_a_recurrent_state_of_later_tokens_is_not_filed_under_the_prompt(
    serve, freeze, tracked, over, left
):
    seen = []
    allocator = SimpleNamespace(
        residents=SimpleNamespace(drops_deferred=nullcontext), follow_tree=lambda req, row: None
    )
    kv = SimpleNamespace(req_pool_idx=0, cache_protected_len=0, mamba_last_track_seqlen=tracked)
    req = SimpleNamespace(raggedkv=SimpleNamespace(freeze=freeze), kv=kv, finished=lambda: over)
    rows = torch.zeros(1, 300)
    tree = SimpleNamespace(disable=False, req_to_token_pool=SimpleNamespace(req_to_token=rows))

    def original(self, asked, *, up_to, **kwargs):
        seen.append((up_to, asked.kv.mamba_last_track_seqlen))

    serve(allocator=allocator)
    prefix_insert.checkpoint_into_tree(original, tree, req, up_to=214)
    assert seen == [(150 if freeze else 214, left)]


class Key(list):
    """Tokens of a tree key, with the fields that a shortened one takes over."""

    extra_key, is_bigram, cache_salt = "extra", False, "salt"

    def __init__(self, token_ids, extra_key="extra", *, is_bigram=False, limit=None, cache_salt=""):
        super().__init__(token_ids[:limit])
        self.token_ids = token_ids


EVERY = (0, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("limit", "dead", "states", "hit", "counted"),
    [
        (None, [], EVERY, 6, (6, 6)),
        (9, [], EVERY, 6, (6, 6)),
        (4, [], EVERY, 4, (4, 4)),
        (4, [2], EVERY, 2, (4, 2)),
        (0, [], EVERY, 0, (0, 0)),
        (None, [], (0, 3, 5), 5, (5, 5)),
        (4, [], (0, 3, 5), 3, (3, 3)),
        (None, [4], (0, 3, 5), 3, (5, 3)),
        (None, [1], (0, 3, 5), 0, (5, 0)),  # valid up to a page that no state was kept for
    ],
)
def test_a_hit_leaves_the_observed_tokens_to_be_computed(serve, limit, dead, states, hit, counted):
    """``states``: pages after which the tree has a recurrent state, as SGLang's matches end there.

    Only the last match may hand a state to the request.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    size, path = 4, [5, 3, 8, 1, 2, 7]
    ledger = PageLedger([Level(0, FULL, 0, (0,))], 20, 20)
    ledger.bind(0, [page for i, page in enumerate(path) if i not in dead])
    host = HostPages(size, 20, False, Counters(), compare=True)
    notes, handed = [], []
    allocator = SimpleNamespace(
        ledger=ledger,
        page_size=size,
        tree_pages=lambda key, tokens, slots: host.pages((), array("q", tokens), slots),
        hit_limit=lambda req: None if limit is None else limit * size,
        note_hit=lambda req, found, valid: notes.append((found.device_prefix_len, valid)),
    )
    serve(allocator=allocator)
    slots = torch.tensor([page * size + i for page in path for i in range(size)])
    tree = SimpleNamespace(
        root_node_handle=lambda extra: "root",
        tree_core=SimpleNamespace(collect_full_device_indices=lambda node, root: slots),
    )

    def original(self, params):
        length = size * max(x for x in states if x * size <= len(params.key))
        if params.cow_mamba and length:
            handed.append(length)
        return Match(length, "node", 6 * size if length < 6 * size else None)

    params = MatchPrefixParams(key=Key(list(range(24))), cow_mamba=True, req="req")
    result = prefix_match.match_prefix(original, tree, params)
    assert result.device_prefix_len == hit * size
    assert notes == [(counted[0] * size, counted[1] * size)]
    assert handed == ([hit * size] if hit else [])


class Match(NamedTuple):
    device_prefix_len: int
    last_device_node: str
    mamba_branching_seqlen: int | None


# -- a freeze is planned -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "budget"),
    [
        (Wish(None), None),
        (Wish(Budget(tokens=39)), 39),
        (Wish(Budget(tokens=40)), None),
        (Wish(Budget(tokens=41)), None),
        (Wish(Budget(ratio=0.5)), 20),
        (Wish(Budget(ratio=1.0)), None),
        (Wish(Budget(tokens=3), positions=True), 3),
    ],
)
@pytest.mark.parametrize("gate", ["table", "off"])
@pytest.mark.parametrize("observe", [8, 64])
def test_only_a_prompt_beyond_its_budget_is_planned_to_freeze(wish, budget, gate, observe):
    freezer = Freezer.__new__(Freezer)
    freezer.rule = RetentionRule("rule", observe=observe, gate=gate)
    freeze = freezer.plan(40, wish)
    if budget is None:
        assert freeze is None
        return
    assert (freeze.prompt, freeze.budget, freeze.window) == (40, budget, min(observe, 40))
    assert freeze.measures_loss == (gate == "table")
    assert freeze.unit_budgets is None and freeze.focused == 0
    assert freeze.report.lists_positions == wish.positions
    assert freeze.report.budget == budget and not freeze.done


def test_a_freeze_without_all_its_observations_fails_loudly():
    freezer = Freezer.__new__(Freezer)
    freeze = Freeze(40, 4, 8, True)
    with pytest.raises(RuntimeError, match="0 of 8 observed tokens"):
        freezer.run(SimpleNamespace(freeze=freeze))
    freeze.begin(2, torch.device("cpu"))
    freeze.add_loss(torch.zeros(7))
    with pytest.raises(RuntimeError, match="7 of 8 observed tokens"):
        freezer.run(SimpleNamespace(freeze=freeze))


def test_budget_errors_are_value_errors():
    assert issubclass(BudgetError, ValueError)

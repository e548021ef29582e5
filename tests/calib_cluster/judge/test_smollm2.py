"""The judge on real weights: what it asks can be answered, and only from what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from calib_cluster.judge import (
    PEERS,
    JudgedModel,
    PeerArm,
    load_texts,
    make_items,
    measure,
    recency,
)
from calib_cluster.judge.peers import load_kvpress
from kvpolicy.geometry import read_geometry
from tests.calib_cluster.judge.hooked import kvpress_positions

LENGTH = 512
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(smollm2) -> JudgedModel:
    return JudgedModel(smollm2, read_geometry(smollm2))


@pytest.fixture(scope="module")
def plain(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def items(smol, texts):
    return make_items(
        load_texts([str(texts)]), smol, tasks=["needle", "longanswer"], length=LENGTH, per_task=3,
        seed=0,
    )  # fmt: skip


def test_the_full_cache_answers_and_one_token_is_chance(model, items):
    """Digits have a chance of one in ten; words of a passage are guessed from those before."""
    last = {"last": lambda judged, _: torch.full((len(model.units), 1), judged.length - 1)}
    found = {(task, arm): [] for task in ("needle", "longanswer") for arm in ("full", "last")}
    for item in items:
        for protocol in ("aware", "agnostic"):
            for score in measure(model, model.judge_case(item.case(protocol)), last, [1]):
                found[item.task, score.arm].append(score.accuracy)
    means = {key: np.mean(values) for key, values in found.items()}
    assert means["needle", "full"] > 0.95 and means["needle", "last"] < 0.25
    assert means["longanswer", "full"] > 0.9 and means["longanswer", "last"] < 0.5


def test_exact_is_what_transformers_generates(model, plain, items):
    for item in items[:4]:
        case = item.case("aware")
        ids = torch.tensor([case.prompt])
        made = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(item.answer),
            do_sample=False, pad_token_id=0,
        )[0, LENGTH:].tolist()  # fmt: skip
        score = measure(model, model.judge_case(case), {"recency": recency}, [])[0]
        assert score.exact == (made == list(item.answer))


@pytest.mark.parametrize("name", ["snapkv", "adakv", "tova", "expected_attention", "adakv_ea"])
def test_kept_positions_are_those_of_kvpress_itself(model, plain, items, name):
    """But for ties within rounding: our prefill holds the answer too."""
    case, budget = items[0].case("aware"), 100
    found = PeerArm(name, model)(model.judge_case(case), budget)
    sets = [{p for p in row if p >= 0} for row in found.tolist()]
    press = PEERS[name].make(load_kvpress())
    press.compression_ratio = 1 - (budget + 0.5) / LENGTH
    expected = kvpress_positions(plain, case, press)
    same = sum(len(ours & theirs) for ours, theirs in zip(sets, expected, strict=True))
    assert same >= 0.999 * sum(map(len, sets))

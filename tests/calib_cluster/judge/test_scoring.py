"""Scores against dense masks, generation, brute force and a model whose answers are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from calib_cluster.errors import CalibrationError
from calib_cluster.judge import Case, PolicyArm, View, find_policy, measure, recency
from calib_cluster.judge.arms import FULL
from kvpolicy.errors import PolicyError
from kvpolicy.retention import SOURCES
from kvpolicy.retention.mix import forward_pooled
from tests.calib_cluster.judge.conftest import BACK
from tests.calib_cluster.known_model import known_prompt
from tests.calib_cluster.rewards.frozen import Pair, padded, random_sets, text
from tests.harness.frozen_reference import FrozenRule

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "phi3")
LENGTH = 90


def a_case(rng: np.random.Generator, start: int = 0) -> Case:
    prompt, continuation = text(rng, LENGTH, 14)
    return Case(tuple(prompt), tuple(continuation), start)


def masked_logprobs(pair: Pair, case: Case, kept) -> torch.Tensor:
    """float32 [C, vocab] of transformers with a dense mask per kv head; ``kept`` None for none."""
    reference = pair.reference
    plain = reference._rules
    heads = reference.model.config.get_text_config().num_key_value_heads
    seen = torch.ones(len(reference._layers), heads, len(case.prompt), dtype=torch.bool)
    for layer, head, positions in zip(
        pair.model.units.layers, pair.model.units.heads, kept or (), strict=kept is not None
    ):
        seen[layer, head] = False
        seen[layer, head, list(positions)] = True
    reference._rules = [FrozenRule(None, rows) for rows in seen]
    try:
        return reference.logprobs([*case.prompt, *case.continuation])[len(case.prompt) - 1 :]
    finally:
        reference._rules = plain


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_a_dense_mask_per_head(both, family, start, rng):
    """Accuracy, NLL, KL, agreement and exactness, each by its definition from distributions."""
    pair = both(family)
    case = a_case(rng, start)
    sets = {f"arm{i}": random_sets(rng, len(pair.model.units), LENGTH) for i in range(3)}
    arms = {name: lambda _judged, _budget, s=s: padded([s])[0] for name, s in sets.items()}
    full, *found = measure(pair.model, pair.model.judge_case(case), arms, [10])
    dense = masked_logprobs(pair, case, None).double()
    scored = range(max(1, start), len(case.continuation))
    assert full.kl == 0 and full.agreement == 1 and full.kept == LENGTH
    for score in found:
        ours = masked_logprobs(pair, case, sets[score.arm]).double()
        best = ours.argmax(1)
        assert score.nll == pytest.approx(
            -np.mean([ours[i, case.continuation[i]] for i in scored]), abs=1e-4
        )
        kl = [float((dense[i].exp() * (dense[i] - ours[i])).sum()) for i in scored]
        assert score.kl == pytest.approx(np.mean(kl), abs=1e-4) and score.kl > 1e-3
        assert score.accuracy == np.mean([best[i] == case.continuation[i] for i in scored])
        assert score.agreement == np.mean([best[i] == dense[i].argmax() for i in scored])
        assert score.kept == pytest.approx(np.mean([len(kept) for kept in sets[score.arm]]))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_answer_is_exact_when_generation_gives_it(both, tiny, family, rng):
    """Greedy decoding of transformers, with its own cache, gives the answer or it is not exact."""
    pair = both(family)
    plain = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    for _ in range(3):
        prompt = a_case(rng).prompt
        ids = torch.tensor([prompt])
        made = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
            pad_token_id=0,
        )[0, LENGTH:].tolist()  # fmt: skip
        assert answer_is_exact(pair.model, prompt, made, 0)
        for wrong in (0, 3, 7):
            other = [*made[:wrong], (made[wrong] + 1) % 200, *made[wrong + 1 :]]
            assert not answer_is_exact(pair.model, prompt, other, 0)
        # after a given question of two tokens the rest is the answer
        longer = tuple(prompt[:-2]), [*prompt[-2:], *made]
        assert answer_is_exact(pair.model, *longer, 2)


def answer_is_exact(model, prompt, continuation, start: int) -> bool:
    judged = model.judge_case(Case(tuple(prompt), tuple(continuation), start))
    return measure(model, judged, {}, [])[0].exact


def test_a_budget_of_the_prompt_or_more_is_the_full_cache(both, rng):
    model = both("llama").model
    judged = model.judge_case(a_case(rng))
    arms = {
        "recency": recency,
        "head": PolicyArm(find_policy("head", model.geometry).tables, model.units),
    }
    full, *found = measure(model, judged, arms, [LENGTH, 5000])
    for score in found:
        assert (score.kept, score.nll, score.kl, score.agreement) == (LENGTH, full.nll, 0, 1)


def test_an_arm_that_keeps_everything_loses_nothing(both, rng):
    """Through the path of a compressed cache, at a budget below the prompt."""
    model = both("llama").model
    judged = model.judge_case(a_case(rng))
    everything = torch.arange(LENGTH).expand(len(model.units), LENGTH)
    full, found = measure(model, judged, {"all": lambda _j, _b: everything}, [LENGTH - 1])
    assert found.nll == pytest.approx(full.nll, abs=1e-5)
    assert abs(found.kl) < 1e-6 and found.agreement == 1 and found.accuracy == full.accuracy


def test_answers_that_stand_in_the_prompt_need_their_tokens(copier):
    """A model that copies what stood BACK tokens before: it answers while that is kept."""
    prompt, answer = known_prompt(3), 40
    first = len(prompt) - BACK - 1
    case = Case(tuple(prompt), tuple(prompt[first : first + answer]), 0)
    needed = torch.arange(first, first + answer)[None]
    arms = {
        "recency": recency,
        "needed": lambda _judged, _budget: needed,
        "last": lambda _judged, _budget: torch.tensor([[len(prompt) - 1]]),
    }
    full, *found = measure(copier, copier.judge_case(case), arms, [20, BACK + 1])
    scores = {(s.arm, s.budget): s.accuracy for s in found}
    assert full.accuracy == 1 and full.exact
    assert scores["needed", 20] == 1 and scores["recency", BACK + 1] == 1
    assert scores["last", 20] <= 0.05 and scores["recency", 20] <= 0.05  # chance is 1 in 700


def test_the_order_of_arms_and_positions_does_not_matter(both, rng):
    model = both("llama").model
    judged = model.judge_case(a_case(rng))
    sets = {f"arm{i}": padded([random_sets(rng, len(model.units), LENGTH)])[0] for i in range(9)}
    arms = {name: lambda _j, _b, s=s: s for name, s in sets.items()}
    shuffled = {name: lambda _j, _b, s=s: s.flip(1) for name, s in reversed(sets.items())}
    found = {s.arm: s for s in measure(model, judged, arms, [10])}
    for score in measure(model, judged, shuffled, [10]):
        assert score.nll == pytest.approx(found[score.arm].nll, abs=1e-5)
        assert score.arm == FULL or score.kept == found[score.arm].kept


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), "not positions of 8 units"),
        (torch.zeros(8, 4), "not positions of 8 units"),
        (torch.tensor([[3, 3]] * 8), "are no set"),
        (torch.tensor([[3, LENGTH]] * 8), r"are no set within 0\.\.89"),
        (torch.tensor([[3, -2]] * 8), "are no set"),
        (torch.tensor([[3, 5]] * 7 + [[-1, -1]]), "keeps nothing in some unit"),
    ],
)
def test_arms_that_keep_no_sound_set_are_refused(both, rng, positions, told):
    model = both("llama").model
    with pytest.raises(CalibrationError, match=f"arm odd at budget 7 .*{told}"):
        measure(model, model.judge_case(a_case(rng)), {"odd": lambda _j, _b: positions}, [7])


def test_a_policy_keeps_what_the_engines_function_keeps(both, rng):
    """The reference's literal transcription of the paper, on dense attention of its own."""
    pair = both("llama")
    case = a_case(rng)
    arm = PolicyArm(find_policy("paper", pair.model.geometry).tables, pair.model.units)
    found = arm(pair.model.judge_case(case), 20)
    expected = pair.reference.kept(case.prompt, 20)
    assert [[p for p in row if p >= 0] for row in found.tolist()] == expected.kept


def test_policies_that_cannot_be_judged_are_refused(both, rng):
    model = both("llama").model
    with pytest.raises(
        CalibrationError, match=r"no policy 'nothing'.* or a rule: paper, head, mix"
    ):
        find_policy("nothing", model.geometry)
    with pytest.raises(CalibrationError, match="full has no retention tables"):
        find_policy("full", model.geometry)
    arm = PolicyArm(find_policy("head", model.geometry).tables, model.units)
    told = r"rule head needs .*View\(observe=64, focus=0\), it was through View\(observe=32"
    with pytest.raises(CalibrationError, match=told):
        arm(model.judge_case(a_case(rng), view=View(observe=32)), 20)
    with pytest.raises(PolicyError, match="at least 1"):
        arm(model.judge_case(a_case(rng)), 0)
    with pytest.raises(CalibrationError, match=r"rule mix needs .*focus=8\), it was .*focus=0\)"):
        PolicyArm(find_policy("mix", model.geometry).tables, model.units)(
            model.judge_case(a_case(rng)), 40
        )


def test_a_mix_weighs_each_query_head_by_its_own_weight(both, rng):
    """Its retrieval order, alone, is that of the one query head that has any weight."""
    model = both("llama").model
    uniform = find_policy("mix", model.geometry).tables
    weights = np.zeros_like(uniform.mix.query_weights)
    weights[2, 1] = 1.0  # layer 2, the second query head of kv head 0
    quotas = np.zeros_like(uniform.mix.quotas)
    quotas[..., SOURCES.index("retrieval")] = 1
    mix = dataclasses.replace(uniform.mix, query_weights=weights, quotas=quotas)
    arm = PolicyArm(dataclasses.replace(uniform, mix=mix), model.units)
    judged = model.judge_case(a_case(rng), view=View(focus=8))
    kept = arm(judged, 40)
    assert (kept >= 0).sum() == 40 * len(model.units)
    layer = judged.layers[2]
    q, k = layer.queries[0, 1], layer.keys[0, 0]
    logits = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~torch.ones(90, 90).tril().bool(), -1e9)
    seen = forward_pooled((logits.softmax(-1)[-8:] ** 2).sum(0).sqrt())
    always = {*range(4), *range(LENGTH - 16, LENGTH)}
    best = [t for t in seen.argsort(descending=True).tolist() if t not in always]
    for row in kept.tolist():
        assert set(row) - {-1} == always | set(best[: 40 - len(always)])

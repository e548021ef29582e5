"""The harness judges itself on real weights: what is whole loses nothing, what is wrong is seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loadtest.__main__ import main
from loadtest.quality_suite.judging import built_in_items, corpora_of
from loadtest.quality_suite.results import SuiteResult, read_result
from loadtest.quality_suite.suites import CI, chosen

LENGTH, BUDGETS = "512", "128,5000"
pytestmark = pytest.mark.slow


def run(model: Path, texts: Path, out: Path, *flags: str) -> tuple[int, SuiteResult]:
    """Status and result of a small suite."""
    words = ["--model", str(model), "--texts", str(texts), "--out", str(out), "--length", LENGTH]
    status = main(["quality", *words, *flags])
    return status, read_result(out / "suite.json")


@pytest.fixture(scope="module")
def smol(smollm2, tokenizer):
    """SmolLM2's tokenizer."""
    return tokenizer(smollm2)


@pytest.fixture(scope="module")
def judged(smollm2, texts, tmp_path_factory) -> tuple[int, SuiteResult]:
    """The compiled policy, the same with its shares dealt to other heads, and recency."""
    return run(
        smollm2, texts, tmp_path_factory.mktemp("judged"), "--policies", "compiled,compiled~order",
        "--peers", "recency", "--budget-tokens", BUDGETS, "--tasks", "needle,recall,labels",
        "--items", "4", "--fail-under",
    )  # fmt: skip


def mean(result: SuiteResult, task: str, arm: str, budget: int | None = None) -> float:
    """Accuracy under the aware protocol."""
    (cell,) = [
        c
        for c in result.cells
        if (c.protocol, c.task, c.arm, c.budget) == ("aware", task, arm, budget)
    ]
    return cell.accuracy


def test_a_budget_of_the_prompt_or_more_loses_nothing_at_all(judged):
    """Exactly: the same numbers as the full cache's, case by case, for every arm."""
    for case in judged[1].cases:
        full, *others = case.scores
        whole = [score for score in others if score.budget == 5000]
        assert {score.arm for score in whole} == {
            "compiled", "compiled~order", "recency", "nothing"
        }  # fmt: skip
        for score in whole:
            assert (score.nll, score.accuracy, score.exact) == (
                full.nll, full.accuracy, full.exact
            )  # fmt: skip
            assert score.kl == 0 and score.kept == case.tokens


def test_a_policy_that_drops_everything_scores_at_chance(judged):
    """A digit has a chance of one in ten; a label one in four, of which four items say little."""
    result = judged[1]
    for task in ("needle", "recall"):
        assert mean(result, task, "full") > 0.6 and mean(result, task, "nothing", 128) < 0.3
    assert mean(result, "labels", "nothing", 128) <= 0.75


def test_a_seeded_wrong_policy_is_caught_and_the_right_one_is_not(judged):
    """The same shares, dealt to other heads, fall below the needle's floor; so does recency."""
    status, result = judged
    below = {(v.arm, v.budget) for v in result.verdicts if v.below and v.task == "needle"}
    assert ("compiled~order", 128) in below and ("recency", 128) in below
    assert not any(budget == 5000 for _, budget in below)
    verdict = next(
        v
        for v in result.verdicts
        if (v.arm, v.budget, v.task, v.protocol) == ("compiled", 128, "needle", "aware")
    )
    assert verdict.signal and not verdict.below and status == 1


def test_labels_are_told_above_chance(smollm2, smol, texts):
    """By the full cache, of 12 items: as many as seven right are chance once in 70 runs."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    suite = chosen(CI, ["labels"], None, 512)
    items = [item for item, _ in built_in_items(suite, corpora_of([str(texts)]), smol, 0, 0)]
    right = []
    for item in items:
        with torch.inference_mode():
            ids = torch.tensor([[*item.context, *item.question]])
            logits = model(ids, logits_to_keep=1).logits[0, -1]
        best = max(item.choices, key=lambda token: float(logits[token]))
        right.append(best == item.answer[0])
    assert len(items) == 12 and np.mean(right) > 0.5


def greedy(model, ids: Sequence[int], count: int) -> list[int]:
    """Transformers' own greedy continuation."""
    prompt = torch.tensor([ids])
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )[0, len(ids) :].tolist()  # fmt: skip


def test_served_in_full_answers_as_the_judge_and_transformers_say(smollm2, smol, texts, tmp_path):
    """A real server of the full policy: what is exact there is what the judge calls exact."""
    flags = "--policies", "full", "--peers", "recency", "--budget-tokens", "64", "--items", "3"
    _, result = run(smollm2, texts, tmp_path / "out", *flags, "--tasks", "needle,recall,labels")
    exact = {
        (c.task, c.index): c.scores[0].exact for c in result.cases if c.protocol == "aware"
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    suite = chosen(CI, ["needle", "recall", "labels"], 3, int(LENGTH))
    items = {
        item.digest: item
        for item, _ in built_in_items(suite, corpora_of([str(texts)]), smol, 0, 0)
    }  # fmt: skip
    assert len(result.served) == 9 and result.kept == {"full": 1}
    for case in result.served:
        item = items[case.item]
        count = len(item.answer) + 4
        made = smol.decode(greedy(model, [*item.context, *item.question], count))
        assert case.text == made.split("<|im_end|>")[0]
        if case.task != "labels":  # the judge chooses among four letters there
            assert case.exact == exact[case.task, case.index]

"""Labels: words of four kinds, letters drawn anew, one answer token read from what was kept."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from calib_cluster.errors import CalibrationError
from calib_cluster.judge import Case, load_texts, make_items, measure, tasks
from calib_cluster.judge.arms import NOTHING, OWN_ARMS
from calib_cluster.judge.labels import KINDS, LABELS, words
from tests.calib_cluster.rewards.frozen import text


@pytest.fixture(scope="module")
def items(texts, smol):
    return make(texts, smol, ["labels"], per_task=24)


def make(texts, tokenizer, names, length=512, per_task=3):
    corpora = load_texts([str(texts)])
    return make_items(
        corpora, tokenizer, tasks=names, length=length, per_task=per_task, seed=0
    )  # fmt: skip


def shown(item, tokenizer) -> list[tuple[str, str]]:
    """(word, letter) of the whole lines in a context."""
    lines = tokenizer.decode(item.context).split("\n")[1:-1]
    return [(line[:-4], line[-2]) for line in lines]


def kind_of(word: str) -> int:
    """The kind whose list has it."""
    (kind,) = [kind for kind, words in enumerate(KINDS) if word in words]
    return kind


def asked(item, tokenizer) -> str:
    return tokenizer.decode(item.question).removesuffix(" (")


def test_the_answer_is_the_letter_of_words_of_its_kind(items, smol):
    for item in items:
        letters: dict[int, set[str]] = {}
        for word, letter in shown(item, smol):
            letters.setdefault(kind_of(word), set()).add(letter)
        assert all(len(own) == 1 for own in letters.values()) and len(letters) == 4
        assert letters[kind_of(asked(item, smol))] == {smol.decode(item.answer)}


def test_the_word_asked_for_was_not_shown(items, smol):
    for item in items:
        words = [word for word, _ in shown(item, smol)]
        assert asked(item, smol) not in words and len(words) > 60


def test_letters_and_kinds_are_drawn_evenly(items, smol):
    letters = Counter(smol.decode(item.answer) for item in items)
    kinds = Counter(kind_of(asked(item, smol)) for item in items)
    assert set(letters) == set(LABELS) and max(letters.values()) < len(items) / 2
    assert len(kinds) == 4
    pairs = {(kind_of(asked(i, smol)), smol.decode(i.answer)) for i in items}
    assert len(pairs) > 8, "a kind must not always have the same letter"


def test_kinds_are_shown_alike_often_and_share_no_word():
    _, others = words(random.Random(1))
    assert Counter(word.kind for word in islice(others, 400)) == dict.fromkeys(range(4), 100)
    everything = [word for kind in KINDS for word in kind]
    assert len(set(everything)) == len(everything)


def test_one_token_is_scored_and_it_follows_the_compression(items):
    item = items[0]
    aware, agnostic = item.case("aware"), item.case("agnostic")
    assert len(aware.prompt) == 511 and aware.continuation == item.question[-1:] + item.answer
    assert aware.continuation[aware.scored] == agnostic.continuation[agnostic.scored] == item.answer
    assert len(item.choices) == 4 and item.answer[0] in item.choices
    other = make_items.__globals__["Item"](
        *(getattr(item, name) for name in item.__struct_fields__[:-1]), choices=()
    )
    assert other.digest != item.digest


def test_other_tasks_do_not_change_with_it(texts, smol):
    """The dealing of held-out text leaves it out: results of before can be made again."""
    both = make(texts, smol, ["labels", "needle", "text"])
    assert [i for i in both if i.task != "labels"] == make(texts, smol, ["needle", "text"])
    assert list(tasks.TASKS)[-1] == "text" and len(tasks.TASKS) == 7


def test_a_tokenizer_without_letters_is_one_line(texts, smollm2, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    monkeypatch.setattr(tasks.labels, "LABELS", ("Anaximander", "B", "C", "D"))
    with pytest.raises(CalibrationError, match="task labels: a letter is no token"):
        make(texts, tokenizer, ["labels"])


@pytest.mark.parametrize("start", [0, 3])
def test_a_choice_is_the_most_likely_of_its_tokens(both, start):
    """By its definition from the dense distribution; other positions are not restricted."""
    rng = np.random.default_rng(3)
    model = both("llama").model
    for _ in range(6):
        prompt, answer = text(rng, 60, 8)
        choices = tuple(dict.fromkeys([answer[-1], *rng.integers(0, 200, 5).tolist()]))
        case = Case(tuple(prompt), tuple(answer), start, choices)
        free = Case(tuple(prompt), tuple(answer), start)
        judged, plain = model.judge_case(case), model.judge_case(free)
        full = measure(model, judged, {}, [])[0]
        log_probs = model.log_probs(judged, judged.full[case.scored], case.scored)
        best = log_probs.argmax(-1).tolist()
        best[-1] = max(choices, key=lambda token: float(log_probs[-1, token]))
        right = [a == b for a, b in zip(best, answer[case.scored], strict=True)]
        assert full.accuracy == np.mean(right) and full.agreement == 1 and full.kl == 0
        assert full.nll == measure(model, plain, {}, [])[0].nll


def test_nothing_keeps_the_last_token_at_any_budget(both):
    model = both("llama").model
    prompt, answer = text(np.random.default_rng(1), 60, 6)
    judged = model.judge_case(Case(tuple(prompt), tuple(answer), 0))
    arm = OWN_ARMS[NOTHING].arm
    for budget in (1, 20, 59):
        assert torch.equal(arm(judged, budget), torch.full((len(model.units), 1), 59))

"""What is asked: exact lengths, answers that are told, and nothing that depends on the rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from calib_cluster.corpora import Size
from calib_cluster.corpora.generated import dialogues, key_values
from calib_cluster.errors import CalibrationError
from calib_cluster.judge import PROTOCOLS, TASKS, load_texts, make_items
from calib_cluster.judge.tasks import CONTINUATION, FACTS, PASSAGE

ANSWERED = [task for task in TASKS if task != "text"]


@pytest.fixture(scope="module")
def corpora(texts):
    return load_texts([str(texts)])


def make(corpora, tokenizer, tasks=tuple(TASKS), length=512, per_task=3, seed=0):
    return make_items(corpora, tokenizer, tasks=tasks, length=length, per_task=per_task, seed=seed)


def test_texts_are_grouped_by_the_corpus_that_their_rows_name(corpora):
    assert [(c.label, len(c.documents)) for c in corpora] == [("one", 20), ("two", 20)]


@pytest.mark.parametrize("length", [256, 257, 511, 1024])
def test_context_and_question_have_exactly_the_length(corpora, smol, length):
    for item in make(corpora, smol, length=length, per_task=2):
        assert len(item.context) + len(item.question) == item.length == length
        aware, *agnostic = (item.case(p) for p in item.protocols(PROTOCOLS))
        held = item.question[len(item.question) - item.held :]
        assert len(aware.prompt) == length - item.held == length - (item.task == "labels")
        assert aware.continuation == held + item.answer
        assert aware.scored == slice(1, len(aware.continuation))
        for case in agnostic:
            assert case.prompt == item.context
            assert case.prompt + case.continuation == aware.prompt + aware.continuation
            assert case.continuation[case.scored] == item.answer


def test_a_bos_comes_first_where_the_model_wants_it(corpora, smollm2):
    starting = AutoTokenizer.from_pretrained(smollm2)
    bos = starting.bos_token, starting.bos_token_id
    starting.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    for item in make(corpora, starting, per_task=1):
        ids = [*item.context, *item.question, *item.answer]
        assert ids[0] == bos[1] and ids.count(bos[1]) == 1
        assert len(item.context) + len(item.question) == 512


@pytest.mark.parametrize("task", ["needle", "multikey", "recall", "longanswer"])
def test_the_answer_is_told_once_and_about_at_its_depth(corpora, smol, task):
    depths = []
    for item in make(corpora, smol, [task], per_task=6, length=1024):
        context, answer = smol.decode(item.context), smol.decode(item.answer).strip()
        assert context.count(answer) == 1
        place = context.index(answer) / len(context)
        assert place == pytest.approx(item.depth, abs=0.05)
        depths.append(item.depth)
    assert min(depths) < 0.3 and max(depths) > 0.7


@pytest.mark.parametrize(("task", "count"), [("needle", 1), ("multikey", 8)])
def test_facts_are_as_many_as_the_task_says_and_the_question_names_one(corpora, smol, task, count):
    for item in make(corpora, smol, [task], length=1024, per_task=6):
        context, question = smol.decode(item.context), smol.decode(item.question)
        sentence, _ = next(f for f in FACTS if f[1].split("{who}")[1] in question)
        before = sentence.partition("{who}")[0]
        assert context.count(before) == count
        last = question.removeprefix("\n\n").partition("? ")[2]
        assert f"({last}{smol.decode(item.answer)}" in context  # told in the question's words
        assert last.startswith(before.removeprefix("("))


def test_a_chain_can_be_followed_from_the_crate_to_its_last_town(corpora, smol):
    for item in make(corpora, smol, ["vartrack"], length=1024, per_task=4):
        context, question = smol.decode(item.context), smol.decode(item.question)
        at = question.rpartition(". ")[2]
        route = []
        while True:
            found = context.partition(f"({at} ")[2].partition(".)")[0]
            if not found:
                break
            route.append(found)
            at = f"{found} sends it on to"
        assert len(route) == 4
        told = f" {route[0]}."
        for a, b in pairwise(route):
            told += f" {a} sends it on to {b}."
        assert smol.decode(item.answer) == told


def test_a_register_has_no_entry_twice_and_fills_the_prompt(corpora, smol):
    item = make(corpora, smol, ["recall"], length=1024, per_task=1)[0]
    lines = [line for line in smol.decode(item.context).split("\n") if " -> " in line]
    keys = [line.partition(" -> ")[0] for line in lines]
    assert len(set(keys)) == len(keys) > 60
    assert smol.decode(item.question).removesuffix(" ->").partition(": ")[2] in keys


def test_a_text_goes_on_where_its_excerpt_ends(corpora, smol):
    text = next(c for c in corpora if c.label == "one").documents
    for item in make(corpora, smol, ["text"], per_task=3):
        assert item.question == () and len(item.answer) == CONTINUATION
        assert item.protocols(PROTOCOLS) == ("plain",)
        if item.corpus == "one":
            whole = smol.decode([*item.context, *item.answer])
            assert any(whole in document.text for document in text)


def test_a_long_answer_is_a_passage_of_a_named_letter(corpora, smol):
    for item in make(corpora, smol, ["longanswer"], per_task=3):
        assert len(item.answer) == PASSAGE >= 64
        heading = smol.decode(item.question).split("\n\n")[-1].strip()
        context = smol.decode(item.context)
        assert context.count(heading) == 1
        assert context.partition(heading)[2].strip().startswith(smol.decode(item.answer).strip())


def test_items_follow_from_their_own_number_alone(corpora, smol):
    everything = {(i.task, i.index): i for i in make(corpora, smol, per_task=4)}
    for item in make(corpora, smol, ["recall", "needle"], per_task=2):
        assert item == everything[item.task, item.index]
    again = make(corpora, smol, per_task=4)
    assert [i.digest for i in again] == [i.digest for i in everything.values()]
    assert len({i.digest for i in again}) == len(again)
    assert {i.digest for i in make(corpora, smol, seed=1)}.isdisjoint(i.digest for i in again)


def test_no_excerpt_serves_two_items(corpora, smol):
    starts = {item.context[:40] for item in make(corpora, smol, tasks=["needle", "text"])}
    assert len(starts) == 6


def test_wordings_are_not_those_that_policies_are_calibrated_on(corpora, smol):
    size = Size(documents=8, tokens=2000)
    items = make(corpora, smol, ANSWERED, length=1024, per_task=6)
    calibration = "\n".join(d.text for d in (*key_values(size), *dialogues(size)))
    for phrase in ("The parcel for", "The ticket that", "That winter", "Register of", "Crate ",
                   "sends it on to", "== Letter from"):  # fmt: skip
        assert phrase not in calibration
        assert any(phrase in smol.decode(item.context) for item in items)


def test_bad_requests_are_one_line(corpora, smol):
    with pytest.raises(CalibrationError, match="no task 'riddle'; there are needle"):
        make(corpora, smol, ["riddle"])
    with pytest.raises(CalibrationError, match="length 255 is not accepted: give at least 256"):
        make(corpora, smol, length=255)
    with pytest.raises(CalibrationError, match="fewer than the"):
        make(corpora, smol, length=2000, per_task=40)


@pytest.mark.parametrize(
    ("row", "told"),
    [('{"corpus": "x"}', "line 1 has none of the accepted fields"), ("{", "line 1 is not JSON")],
)
def test_bad_rows_are_named(tmp_path, row, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(CalibrationError, match=told):
        load_texts([str(path)])

"""Generated texts: every question has one right answer, given earlier, at many distances."""

from __future__ import annotations

import random
import re

import pytest

from calib_cluster.corpora.generated import (
    ASKED,
    STYLES,
    Fact,
    Size,
    dialogues,
    key_values,
    recalled,
)

SIZE = Size(documents=16, tokens=1024, seed=3)


@pytest.mark.parametrize("make", [dialogues, key_values])
def test_same_seed_same_text_other_seed_other_text(make) -> None:
    again, other = make(SIZE), make(Size(SIZE.documents, SIZE.tokens, seed=4))
    assert make(SIZE) == again
    assert not {d.text for d in again} & {d.text for d in other}
    assert len({d.text for d in again}) == SIZE.documents
    assert all(d.from_start for d in again)


@pytest.mark.parametrize("make", [dialogues, key_values])
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_documents_are_long_enough(make, model: str, tokenizer, request) -> None:
    encode = tokenizer(request.getfixturevalue(model))
    for document in make(SIZE):
        assert len(encode(document.text)["input_ids"]) >= SIZE.tokens


def test_stores_answer_with_the_value_that_was_stored() -> None:
    """Read every line of a style back with a pattern made from it, and look the answers up."""
    checked = 0
    for document in key_values(Size(documents=40, tokens=1024, seed=1)):
        style = next(
            (s for s in STYLES if _pattern(s[0]).fullmatch(first_line(document.text))), None
        )
        if style is None:
            continue  # a haystack or variables
        given, asked, answer = map(_pattern, style)
        stored: dict[str, str] = {}
        lines = iter(document.text.splitlines())
        for line in lines:
            if question := asked.fullmatch(line):
                reply = answer.fullmatch(next(lines))
                assert reply["value"] == stored[question["key"]]
                checked += 1
            elif fact := given.fullmatch(line):
                assert fact["key"] not in stored
                stored[fact["key"]] = fact["value"]
    assert checked > 500


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def _pattern(style: str) -> re.Pattern[str]:
    escaped = re.escape(style).replace("KEY", "(?P<key>[a-z0-9-]+)", 1)
    return re.compile(escaped.replace("VALUE", "(?P<value>[A-Za-z0-9-]+)", 1))


def test_variables_print_what_running_them_would() -> None:
    programs = [d.text for d in key_values(SIZE) if d.text.split(" ")[1] == "="
                and "_0 = " in first_line(d.text)]  # fmt: skip
    assert programs
    for program in programs:
        values: dict[str, str] = {}
        lines = iter(program.splitlines())
        for line in lines:
            if line.startswith(">>> "):
                assert next(lines) == values[line[4:]]
            elif line:
                name, _, value = line.partition(" = ")
                values[name] = values.get(value, value)


def test_dialogues_recall_facts_told_before() -> None:
    prefixes = [a.split("{key}")[0] for a in ASKED]
    questions = 0
    for document in dialogues(SIZE):
        told = ""
        turns = document.messages
        assert [m.role for m in turns] == ["user", "assistant"] * (len(turns) // 2)
        for user, model in zip(turns[::2], turns[1::2], strict=True):
            if any(user.content.startswith(p) for p in prefixes):
                value = re.sub(
                    r"^(You told me: |That is |It was |As you said, )", "", model.content
                )
                assert value.rstrip(".") in told
                questions += 1
            told += user.content
    assert questions > 50


def test_recall_reaches_near_and_far() -> None:
    facts = [Fact(str(i), "v") for i in range(1000)]
    rng = random.Random(0)
    back = sorted(1000 - int(recalled(rng, facts)[0].key) for _ in range(2000))
    assert back[0] == 1 and back[-1] > 950
    assert back[600] < 150 and back[1400] > 250  # both ends are common
    assert sum(2 <= distance <= 30 for distance in back) > 300  # a uniform draw gives 58


def test_recalled_facts_of_one_block_differ() -> None:
    facts = [Fact(str(i), "v") for i in range(5)]
    assert {f.key for f in recalled(random.Random(0), facts, 9)} == set("01234")

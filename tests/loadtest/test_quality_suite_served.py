"""What a server is sent, and how its text is scored: by hand, with tokens that are bytes."""

from __future__ import annotations

import pytest

from loadtest.errors import UserError
from loadtest.quality_suite.judging import Item
from loadtest.quality_suite.openai_api import address
from loadtest.quality_suite.prompts import Asked
from loadtest.quality_suite.served import asked_of_servers, prompt_of, scored, url_arm
from tests.loadtest.quality_model import BOS, byte_tokenizer


def asked(answer: str, question: str = "Q?", protocol: str = "aware", **more) -> Asked:
    """A question about ``context``; every token is a byte."""
    wanted, all_of = more.pop("wanted", (answer.strip(),)), more.pop("all_of", False)
    context = (*more.pop("start", ()), *b"context ")
    item = Item(
        more.pop("task", "needle"), 0, 512, "one", 0.5, context, tuple(question.encode()),
        tuple(answer.encode()), **more,
    )  # fmt: skip
    return Asked(item, protocol, wanted, all_of)


def score(one: Asked, text: str):
    return scored("arm", one, text, byte_tokenizer(), 1.0)


def test_text_has_no_bos_where_the_servers_tokenizer_adds_one():
    one = asked(" 12", start=(BOS,))
    prompt = prompt_of(one, byte_tokenizer(bos=True))
    assert (prompt.ids[0], prompt.text) == (BOS, "context Q?")
    # a chat template may begin with a <bos> that the tokenizer does not add itself
    assert prompt_of(one, byte_tokenizer()).text == "<bos>context Q?"
    assert prompt_of(asked(" 12"), byte_tokenizer(bos=True)).text == "context Q?"
    assert prompt.max_tokens == 3 + 4


@pytest.mark.parametrize(
    ("text", "accuracy", "exact", "found"),
    [
        (" 123 and more", 1, True, 1), ("123", 1, True, 1), (" 923", 2 / 3, False, 0),
        (" 12", 2 / 3, False, 0), ("", 0, False, 0), (" is 123", 0, False, 1),
    ],
)  # fmt: skip
def test_tokens_are_compared_place_by_place(text, accuracy, exact, found):
    """Without the answer's first, which the judge leaves to the prefill; a server may strip it."""
    got = score(asked(" 123"), text)
    assert (got.accuracy, got.exact, got.found) == (pytest.approx(accuracy), exact, found)
    assert got.tokens == 10 and got.text.endswith(text)


def test_a_held_question_has_its_first_token_scored():
    assert score(asked("AB", held=1), "AX").accuracy == 0.5
    assert score(asked("AB"), "AX").accuracy == 0
    assert score(asked("A", held=1), "B)").accuracy == 0 and score(asked("A", held=1), "A)").exact


def test_all_outputs_or_any_answer_count_as_found():
    every = asked(" 7, 9", wanted=("7", "9"), all_of=True)
    assert score(every, " 9 only").found == 0.5 and score(every, " 9 and 7").found == 1
    either = asked(" Ada", wanted=("Ada", "Lovelace"))
    assert score(either, " lovelace!").found == 1 and score(either, " Byron").found == 0


def test_servers_are_asked_what_has_its_question_in_the_prompt():
    ones = [asked("x"), asked("x", protocol="agnostic"), asked("x", protocol="plain", task="text")]
    assert asked_of_servers(ones) == ones[:1]


def test_addresses_with_and_without_a_name():
    assert address("http://host:80/v1/") == address("http://host:80") == "http://host:80"
    named, plain = url_arm("mine=https://host/v1"), url_arm("http://host/?a=b")
    assert (named.name, named.url) == ("mine", "https://host")
    assert plain.name == "served" and named.title == "https://host"


@pytest.mark.parametrize(
    "url", ["host", "ftp://host", "mine=", "=http://host", "http://", "mine=x"]
)
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(UserError, match="is not accepted: give"):
        url_arm(url)

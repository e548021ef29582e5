"""Prompts are what their callers rely on: exact lengths, <bos>, exact sharing, repeatable."""

from __future__ import annotations

import pytest

from tests.harness import corpora


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tok(request, tokenizer):
    return tokenizer(request.getfixturevalue(request.param))


def test_prompts_have_their_lengths_and_bos_and_repeat(tok):
    lengths = [1, 17, 900, 2500]
    first = corpora.prompts(tok, lengths, seed=3)
    assert [len(ids) for ids in first] == lengths
    assert first == corpora.prompts(tok, lengths, seed=3) != corpora.prompts(tok, lengths, seed=4)
    is_gemma = tok("")["input_ids"] == [tok.bos_token_id]
    assert all((ids[0] == tok.bos_token_id) == is_gemma for ids in first)
    assert len(set(first[2])) > 100
    assert first[2][1:200] != first[3][1:200]


def test_branches_share_exactly_the_system_prompt(tok):
    branches = corpora.branching(tok, 160, [5, 40, 40, 300])
    assert [len(ids) for ids in branches] == [165, 200, 200, 460]
    assert len({tuple(ids[:160]) for ids in branches}) == 1
    assert len({ids[160] for ids in branches}) == 4


def test_only_the_first_turn_starts_with_bos(tok):
    turns = corpora.turns(tok, [100, 30, 60])
    assert [len(ids) for ids in turns] == [100, 30, 60]
    assert turns[0][:1] == corpora.bos(tok) or not corpora.bos(tok)
    assert all(tok.bos_token_id not in ids for ids in turns[1:])


def test_questions_quote_code_and_differ():
    messages = corpora.questions(4, chars=300)
    assert len(set(messages)) == 4
    assert all(300 < len(message) < 400 for message in messages)

"""Texts and needles are what the comparison relies on: exact, disjoint, stratified, repeatable."""

from __future__ import annotations

import json
import re

import pytest

from loadtest.errors import UserError
from loadtest.quality_texts import Needle, build_prompts, load_texts
from tests.loadtest.quality_model import BOS, byte_tokenizer, prose

CONTEXT = 400
CORPORA = {"a": prose(3000), "b": prose(3000, start=10_000), "c": prose(3000, start=20_000)}
ASKED = re.compile(r"\n\nQuestion: What is .*\nAnswer: The secret code of the (\w+) is$")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def tokenizer(request):
    return byte_tokenizer(bos=request.param)


def text_of(ids: list[int]) -> str:
    return bytes(i for i in ids if i != BOS).decode()


def test_all_prompts_have_the_contexts_length_and_bos(tokenizer):
    prompts = build_prompts(CORPORA, tokenizer, CONTEXT, texts=7, needles=8, seed=1)
    every = [p.ids for p in (*prompts.texts, *prompts.needles)]
    assert len(every) == 15 and {len(ids) for ids in every} == {CONTEXT}
    wants = tokenizer("a")["input_ids"][0] == BOS
    assert all((ids[0] == BOS) == wants and ids.count(BOS) == wants for ids in every)


def test_no_text_is_used_twice(tokenizer):
    prompts = build_prompts(CORPORA, tokenizer, CONTEXT, texts=9, needles=9, seed=1)
    seen: set[str] = set()
    for prompt in (*prompts.texts, *prompts.needles):
        words = set(re.findall(r"\bw\d{3,5}(?= )", text_of(prompt.ids)[12:-12]))
        assert len(words) > 20 and not words & seen
        seen |= words


def test_texts_are_spread_over_the_corpora(tokenizer):
    prompts = build_prompts(CORPORA, tokenizer, CONTEXT, texts=8, needles=6, seed=1)
    assert [t.corpus for t in prompts.texts] == ["a", "b", "c", "a", "b", "c", "a", "b"]
    assert [n.corpus for n in prompts.needles] == ["a", "b", "c"] * 2
    starts = {"a": range(3000), "b": range(10_000, 13_000), "c": range(20_000, 23_000)}
    for prompt in (*prompts.texts, *prompts.needles):
        numbers = [int(n) for n in re.findall(r" w(\d+) ", text_of(prompt.ids))]
        assert all(n in starts[prompt.corpus] for n in numbers)


def test_prompts_follow_from_the_seed(tokenizer):
    first, again, other = (
        build_prompts(CORPORA, tokenizer, CONTEXT, 4, 4, seed) for seed in (3, 3, 4)
    )
    assert first == again and first.fingerprint == again.fingerprint
    assert other.fingerprint != first.fingerprint
    assert not {tuple(t.ids) for t in first.texts} & {tuple(t.ids) for t in other.texts}


def test_every_needle_is_told_once_at_its_depth_and_asked_for_at_the_end(tokenizer):
    needles = build_prompts(CORPORA, tokenizer, CONTEXT, 0, 12, seed=5).needles
    for needle in needles:
        text = text_of(needle.ids)
        place = ASKED.search(text)[1]
        told = f"\nRemember this: the secret code of the {place} is {needle.code}.\n"
        assert text.count(told) == 1 and text.count(needle.code) == 1
        hay = ASKED.sub("", text).replace(told, "")
        assert abs(text.index(told) / len(hay) - needle.depth) < 0.01
    assert len({needle.code for needle in needles}) == 12


def test_depths_fill_equal_strata_in_no_order(tokenizer):
    needles = build_prompts(CORPORA, tokenizer, CONTEXT, 0, 18, seed=5).needles
    depths = [needle.depth for needle in needles]
    for index, depth in enumerate(sorted(depths)):
        assert 0.05 + 0.9 * index / 18 <= depth <= 0.05 + 0.9 * (index + 1) / 18
    assert depths != sorted(depths)


@pytest.mark.parametrize(
    ("answer", "found"),
    [(" 12345.\n", True), ("12345", True), (" 123456", False), (" 612345", False), (" 1234", False),
     (" It is 12345, yes", True)],
)  # fmt: skip
def test_a_code_counts_only_as_a_number_of_its_own(answer, found):
    assert Needle("a", [], 0.5, "12345").found_in(answer) == found


def test_too_little_text_names_the_corpus_and_what_it_lacks():
    corpora = CORPORA | {"b": prose(200)}  # 989 bytes
    with pytest.raises(UserError, match=r"corpus 'b' holds 2 excerpts of 400 tokens, 4 are needed"):
        build_prompts(corpora, byte_tokenizer(), CONTEXT, texts=6, needles=6, seed=0)


def test_files_become_corpora_in_order(tmp_path):
    lines = [{"text": " one\u2028two ", "corpus": "x", "id": 7}, {"text": "three"}, {"text": " "}]
    (tmp_path / "m.jsonl").write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", "utf-8"
    )
    (tmp_path / "x.txt").write_text("four\nfive\n")
    found = load_texts([tmp_path / "m.jsonl", tmp_path / "x.txt"])
    assert found == {"x": "one\u2028two\n\nfour\nfive", "m": "three"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gone.txt", None, "No such file"),
        ("a.csv", b"text", r"give \.jsonl or \.txt files"),
        ("a.txt", b" \n", "no text in it"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"corpus": "b"}\n', "line 2: .*text"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: Expected `str`"),
        ("a.jsonl", b"not json\n", "line 1: JSON is malformed"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"--texts .*{re.escape(name)}.*{says}"):
        load_texts([tmp_path / name])

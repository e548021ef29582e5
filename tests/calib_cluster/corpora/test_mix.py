"""Mixing corpora into prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from calib_cluster.corpora import PromptSet, load_corpora, load_prompts
from calib_cluster.errors import CalibrationError

SPECS = ("stdlib", "dialogue", "key-value")


def load(specs, tokenizer, prompts: int = 9, length: int = 200, **options) -> PromptSet:
    options = {"min_length": 20, "seed": 0} | options
    return load_prompts(specs, tokenizer, prompts=prompts, length=length, **options)


def rows(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def sentences(count: int, mark: str) -> str:
    return " ".join(f"Sentence {mark} {i} says {i * i}." for i in range(count))


@pytest.fixture(scope="module")
def smol(smollm2, tokenizer):
    return tokenizer(smollm2)


@pytest.fixture(scope="module")
def gemma(gemma3, tokenizer):
    return tokenizer(gemma3)


def test_exact_length_balanced_and_repeatable(smol) -> None:
    found = load(SPECS, smol)
    assert [p.corpus for p in found.prompts] == list(SPECS) * 3  # so every prefix is balanced
    assert {len(p.ids) for p in found.prompts} == {200}
    assert found.tokens == 1800
    again = load(SPECS, smol)
    assert found == again and found.fingerprint == again.fingerprint
    assert set(found.corpora) == set(SPECS)
    assert found.sources["stdlib"].startswith("Python 3.")


def test_seed_changes_the_choice_not_the_texts(smol) -> None:
    first, second = (load(["stdlib"], smol, seed=seed) for seed in (0, 1))
    assert first.fingerprint != second.fingerprint
    assert first.corpora == second.corpora


def test_fingerprint_sees_ids_and_their_order(smol) -> None:
    found = load(SPECS, smol)
    turned = PromptSet(found.prompts[::-1], found.corpora)
    assert turned.fingerprint != found.fingerprint
    assert PromptSet(found.prompts, {}).fingerprint == found.fingerprint


def test_prompts_are_text_of_their_documents(smol) -> None:
    (corpus,) = load_corpora(["stdlib"])
    text = {d.id: d.text for d in corpus.documents}
    for prompt in load(["stdlib"], smol).prompts:
        assert smol.decode(prompt.ids) in text[prompt.source]


def test_bos_counts_in_the_length(gemma) -> None:
    for prompt in load(SPECS, gemma).prompts:
        assert prompt.ids[0] == gemma.bos_token_id and len(prompt.ids) == 200
        assert gemma.bos_token_id not in prompt.ids[1:]


def test_short_documents_are_whole_or_ignored(smol, tmp_path: Path) -> None:
    texts = ["too short", sentences(8, "b"), sentences(200, "c")]
    found = load([rows(tmp_path / "x.jsonl", texts)], smol, prompts=2)
    by_row = {p.source: p.ids for p in found.prompts}
    assert set(by_row) == {"x.jsonl:2", "x.jsonl:3"}
    assert smol.decode(by_row["x.jsonl:2"]) == texts[1]
    assert len(by_row["x.jsonl:3"]) == 200


def test_min_length_is_not_enough_itself(smol, tmp_path: Path) -> None:
    spec = rows(tmp_path / "x.jsonl", [sentences(8, "b")])
    tokens = len(smol(sentences(8, "b"))["input_ids"])
    assert load([spec], smol, prompts=1, min_length=tokens - 1).tokens == tokens
    with pytest.raises(CalibrationError, match=f"all 1 documents are shorter than {tokens + 1} "):
        load([spec], smol, prompts=1, min_length=tokens)


def test_others_make_up_for_a_small_corpus(smol, tmp_path: Path) -> None:
    small = rows(tmp_path / "small.jsonl", [sentences(9, "a"), sentences(9, "b")])
    found = load([small, "stdlib", "dialogue"], smol, prompts=12)
    counts = Counter(p.corpus for p in found.prompts)
    assert counts == {"small.jsonl": 2, "stdlib": 5, "dialogue": 5}
    assert {p.corpus for p in found.prompts[:3]} == set(counts)


def test_too_few_prompts_says_how_many(smol, tmp_path: Path) -> None:
    small = rows(tmp_path / "small.jsonl", [sentences(9, "a"), sentences(9, "b")])
    with pytest.raises(CalibrationError, match="give 2 different prompts, fewer than the 3 asked"):
        load([small], smol, prompts=3)


def test_duplicates_count_once(smol, tmp_path: Path) -> None:
    text = sentences(9, "a")
    one = rows(tmp_path / "one.jsonl", [text, text.upper(), f" {text}\n", sentences(9, "b")])
    assert {p.source for p in load([one], smol, prompts=2).prompts} == {
        "one.jsonl:1",
        "one.jsonl:4",
    }
    with pytest.raises(CalibrationError, match="give 2 different"):
        load([one], smol, prompts=3)
    copy = rows(tmp_path / "copy.jsonl", [text])
    with pytest.raises(CalibrationError, match=r"'copy.jsonl': other corpora contain all"):
        load([one, copy], smol, prompts=2)


def test_documents_that_begin_alike_give_one_prompt(smol, tmp_path: Path) -> None:
    """Different documents, the same first tokens: the ids are what must differ."""
    talk = [{"role": "user", "content": sentences(100, "a")}]
    path = tmp_path / "x.jsonl"
    path.write_text(
        "".join(
            json.dumps({"messages": [*talk, {"role": "assistant", "content": f"{i}"}]}) + "\n"
            for i in range(4)
        )
    )
    assert len(load([str(path)], smol, prompts=1).prompts) == 1
    with pytest.raises(CalibrationError, match="give 1 different"):
        load([str(path)], smol, prompts=2)


def test_long_documents_come_first(smol, tmp_path: Path) -> None:
    texts = [sentences(8, f"s{i}") for i in range(20)] + [
        sentences(200, "l1"),
        sentences(200, "l2"),
    ]
    found = load([rows(tmp_path / "x.jsonl", texts)], smol, prompts=2)
    assert [len(p.ids) for p in found.prompts] == [200, 200]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"specs": ()}, "no corpus given"),
        ({"prompts": 2}, "2 prompts are too few for 3 corpora"),
        ({"length": 68, "min_length": 68}, "68 tokens are too short"),
    ],
)
def test_impossible_requests(smol, options: dict, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        load(**({"specs": SPECS, "tokenizer": smol} | options))


def test_chat_template_equals_the_tokenizers_own(smol, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": sentences(20, "q")},
        {"role": "assistant", "content": "Yes"},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": talk[:1]}))
    found = load([str(path)], smol, prompts=2, length=900, chat_template=True)
    for row, turns in (("x.jsonl:1", talk), ("x.jsonl:2", talk[:1])):
        ids = smol.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=len(turns) == 1, return_dict=False
        )
        assert list(next(p.ids for p in found.prompts if p.source == row)) == list(ids)
    plain = load([str(path)], smol, prompts=2, length=900)
    assert plain.corpora != found.corpora


def test_own_text_becomes_a_user_message_of_the_whole_length(smol, tmp_path: Path) -> None:
    spec = rows(tmp_path / "x.jsonl", [sentences(400, "a"), sentences(9, "b")])
    found = load([spec], smol, prompts=2, length=300, chat_template=True)
    long, short = (smol.decode(p.ids) for p in sorted(found.prompts, key=lambda p: p.source))
    for text in (long, short):
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert sorted(len(p.ids) for p in found.prompts)[1] == 300
    wrapped = smol.apply_chat_template(
        [{"role": "user", "content": sentences(9, "b")}], tokenize=False, add_generation_prompt=True
    )
    assert short == wrapped


def test_recipes_stay_plain_under_a_chat_template_but_dialogues_do_not(smol) -> None:
    found = load(("stdlib", "dialogue"), smol, prompts=2, chat_template=True)
    code, talk = (smol.decode(p.ids) for p in found.prompts)
    assert "<|im_start|>" not in code
    assert talk.startswith("<|im_start|>system\n") and "<|im_start|>user\n" in talk


def test_a_model_without_chat_template(gemma) -> None:
    with pytest.raises(CalibrationError, match="has no chat template"):
        load(SPECS, gemma, chat_template=True)


def test_a_template_that_refuses_names_the_row(smol, tmp_path: Path) -> None:
    strict = type(smol).from_pretrained(smol.name_or_path)
    strict.chat_template = "{{ raise_exception('only users here') }}"
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "a"}]}))
    with pytest.raises(CalibrationError, match=r"x.jsonl:1: .*refuses it \(only users here\)"):
        load([str(path)], strict, prompts=1, chat_template=True)

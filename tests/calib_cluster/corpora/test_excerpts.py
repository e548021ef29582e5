"""Excerpts have the asked length, do not overlap and begin at borders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib_cluster.corpora.excerpts import border, bos, excerpts, head, plain_encoder

LINES = st.lists(st.text("abc. ", min_size=1, max_size=40), min_size=1, max_size=80)


def words(text: str) -> list[int]:
    """A toy tokenizer whose ids are the places of the numbered words in their text."""
    return [int(word) for word in text.split() if word.isdigit()]


def numbered(count: int, per_line: int) -> str:
    """Words 0, 1, 2, …, so that ids say exactly which part of the text an excerpt is."""
    rows = [range(i, min(i + per_line, count)) for i in range(0, count, per_line)]
    return "\n".join(" ".join(f"{n:06d}" for n in row) for row in rows) + "\n"


@given(
    st.integers(1, 3000), st.integers(1, 50), st.integers(1, 400), st.integers(0, 5)
)  # fmt: skip
@settings(deadline=None)
def test_excerpts_of_a_long_text(count: int, per_line: int, length: int, seed: int) -> None:
    found = list(excerpts(words, numbered(count, per_line), length, random.Random(seed)))
    if count < length:
        assert found == [list(range(count))]  # whole
        return
    assert found
    used: set[int] = set()
    for ids in found:
        assert ids == list(range(ids[0], ids[0] + length))  # exact, contiguous
        assert ids[0] % per_line == 0  # from a line's beginning
        assert not used.intersection(ids)
        used.update(ids)


def test_a_long_text_is_mostly_used() -> None:
    found = list(excerpts(words, numbered(20_000, 10), 500, random.Random(0)))
    assert len(found) >= 30  # of 40 that would fit back to back
    starts = [ids[0] for ids in found]
    assert starts != sorted(starts)


def test_uneven_density_never_overlaps_or_falls_short() -> None:
    sparse = "\n".join(f"{n:06d} {'x' * 300}" for n in range(300))
    dense = "\n".join(f"{n:06d}" for n in range(300, 3000))
    for text in (sparse + "\n" + dense, dense + "\n" + sparse):
        found = list(excerpts(words, text, 250, random.Random(1)))
        taken = [n for ids in found for n in ids]
        assert found and all(len(ids) == 250 for ids in found)
        assert len(taken) == len(set(taken))


def test_from_start_gives_the_beginning_only() -> None:
    found = list(excerpts(words, numbered(1000, 7), 100, random.Random(3), from_start=True))
    assert found == [list(range(100))]


@given(LINES, st.data())
def test_border_never_decreases(lines: list[str], data: st.DataObject) -> None:
    text = "\n".join(lines)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6)))
    borders = [border(text, at) for at in places]
    assert borders == sorted(borders)
    assert all(at <= found <= len(text) for at, found in zip(places, borders, strict=True))


def test_border_prefers_lines_to_sentences_to_words() -> None:
    assert border("ab cd. ef\n\n  gh", 1) == len("ab cd. ef\n\n")
    assert border("ab cd. ef gh", 1) == len("ab cd. ")
    assert border("ab cd", 1) == len("ab ")
    assert border("abcd", 2) == 2


@pytest.mark.parametrize("guess", [0.1, 3.0, 40.0])
def test_head_equals_a_whole_tokenization(smollm2, tokenizer, guess: float) -> None:
    encode = plain_encoder(tokenizer(smollm2))
    text = "".join(
        f"def f{i}(x):\n        return x ** {i * 7919}  # line {i}\n" for i in range(400)
    )
    assert head(encode, text, 777, guess)[0] == encode(text)[:777]


def test_only_a_slice_is_tokenized() -> None:
    read = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return words(text)

    next(excerpts(encode, numbered(1_000_000, 10), 100, random.Random(0)))
    assert sum(read) < 10_000


def test_bos_only_where_the_model_wants_it(smollm2, gemma3, tokenizer) -> None:
    assert bos(tokenizer(smollm2)) == []
    assert bos(tokenizer(gemma3)) == [tokenizer(gemma3).bos_token_id]

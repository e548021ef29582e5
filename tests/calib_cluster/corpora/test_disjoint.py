"""The disjointness check against brute force, and on a planted passage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib_cluster.corpora.disjoint import (
    RUN_WORDS,
    check_disjoint,
    find_overlap,
    normalised,
    run_hashes,
)
from calib_cluster.errors import CalibrationError
from tests.calib_cluster.corpora.test_documents import corpus

WORD_LISTS = st.lists(st.lists(st.sampled_from("abc"), max_size=14), min_size=1, max_size=4)
PASSAGE = "the quick brown fox jumps over the lazy dog and then it sleeps well"  # 14 words


def filler(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"w{seed}x{n}" for n in rng.integers(0, 10**6, words))


@given(WORD_LISTS, WORD_LISTS, st.integers(1, 5))
@settings(deadline=None)
def test_finds_exactly_what_brute_force_finds(first, second, run: int) -> None:
    def runs(texts):
        return {tuple(t[i : i + run]) for t in texts for i in range(len(t) - run + 1)}

    common = runs(first) & runs(second)
    a, b = (corpus(*(" ".join(t) for t in texts)) for texts in (first, second))
    found = find_overlap(a, b, run)
    assert (found is not None) == bool(common)
    if found:
        assert tuple(found.passage.split()[:run]) in common


def test_a_planted_passage_is_named() -> None:
    a = corpus(filler(1, 900), filler(2, 500), label="ours")
    planted = "The QUICK -- brown fox,\njumps over 7 the lazy dog; and then it sleeps well!"
    b = corpus(filler(3, 400), f"{filler(4, 300)}\n{planted} {filler(5, 300)}", label="theirs")
    check_disjoint([a], [b])
    a = corpus(filler(1, 900), f"{filler(2, 500)} {PASSAGE} {filler(6, 9)}", label="ours")
    with pytest.raises(CalibrationError) as caught:
        check_disjoint([corpus(filler(7, 50)), a], [corpus(filler(8, 50)), b])
    message = str(caught.value)
    assert "'ours' and 'theirs'" in message and "ours:1 and theirs:1" in message
    assert f'"{PASSAGE}"' in message and "\n" not in message


def test_a_passage_at_the_beginning_is_shown_from_its_first_word() -> None:
    found = find_overlap(corpus(f"{PASSAGE} {filler(1, 99)}"), corpus(f"{PASSAGE} {filler(2, 99)}"))
    assert found is not None and found.passage == PASSAGE


def test_twelve_words_are_no_overlap() -> None:
    words = PASSAGE.split()
    a = corpus(" ".join(words[: RUN_WORDS - 1]) + " here")
    b = corpus("there " + " ".join(words[: RUN_WORDS - 1]))
    check_disjoint([a], [b])


def test_runs_do_not_cross_documents() -> None:
    words = PASSAGE.split()
    check_disjoint([corpus(" ".join(words[:7]), " ".join(words[7:]))], [corpus(PASSAGE)])


def test_counting_is_no_passage() -> None:
    numbers = " ".join(map(str, range(100)))
    check_disjoint([corpus(numbers)], [corpus(numbers)])


def test_chinese_characters_are_words() -> None:
    assert normalised("在RAG模型里，是7个。") == ["在", "rag", "模", "型", "里", "是", "个"]
    text = "这个算法在每一层里选择最小的窗口并且保持误差"
    assert find_overlap(corpus(text), corpus("前言" + text)) is not None


def test_hash_depends_on_order() -> None:
    assert run_hashes(["a", "b"], 2)[0] != run_hashes(["b", "a"], 2)[0]

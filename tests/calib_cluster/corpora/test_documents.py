"""Documents, halves and hashes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib_cluster.corpora.documents import Corpus, Document, Message, content_key, joined
from calib_cluster.errors import CalibrationError

TEXTS = st.lists(st.text(min_size=1, max_size=60), min_size=2, max_size=20)


def corpus(*texts: str, label: str = "c") -> Corpus:
    documents = tuple(Document(f"{label}:{i}", text) for i, text in enumerate(texts))
    return Corpus(label, documents, "made in a test")


@given(TEXTS)
def test_halves_share_no_document_and_lose_none(texts: list[str]) -> None:
    whole = corpus(*texts)
    a, b = whole.half("a"), whole.half("b")
    ids = [d.id for d in a.documents + b.documents]
    assert sorted(ids) == sorted(d.id for d in whole.documents)
    assert (a.label, b.label) == ("c/a", "c/b")


@given(TEXTS)
def test_halves_differ_by_one_document_at_most(texts: list[str]) -> None:
    a, b = corpus(*texts).half("a"), corpus(*texts).half("b")
    assert abs(a.characters - b.characters) <= max(map(len, texts))


def test_a_single_text_is_cut_at_a_line() -> None:
    text = "one line\nanother line\nthe third line\nthe last\n"
    a, b = corpus(text).half("a"), corpus(text).half("b")
    assert a.documents[0].text + b.documents[0].text == text
    assert a.documents[0].text == "one line\nanother line\n"


def test_a_single_conversation_cannot_be_cut() -> None:
    talk = Document("x:1", "User: hi", (Message("user", "hi"),), from_start=True)
    with pytest.raises(CalibrationError, match="'x' is one conversation"):
        Corpus("x", (talk,), "").half("a")


def test_digest_sees_order_borders_and_the_chat_flag() -> None:
    base = corpus("ab", "c")
    others = [corpus("c", "ab"), corpus("a", "bc"), corpus("abc"), corpus("ab", "c", "")]
    digests = {base.digest(), base.digest(chat_template=True), *(o.digest() for o in others)}
    assert len(digests) == 6
    assert corpus("ab", "c", label="renamed").digest() == base.digest()


def test_content_key_ignores_case_and_space_only() -> None:
    assert content_key("Call  me\nIshmael.") == content_key("call me ishmael. ")
    assert content_key("Call me Ishmael.") != content_key("Call me Ishmael!")


@given(st.lists(st.text("ab \n", max_size=50), max_size=30), st.integers(1, 120))
def test_joining_keeps_every_page_and_reaches_the_size(pages: list[str], size: int) -> None:
    documents = joined("x", ((str(i), p) for i, p in enumerate(pages)), size)
    kept = "\n\n".join(d.text for d in documents)
    assert kept.split() == "\n\n".join(pages).split()
    sizes = [sum(len(p) for p in pages[int(d.id[2:]) :]) for d in documents]
    assert all(a - b >= size for a, b in pairwise(sizes))

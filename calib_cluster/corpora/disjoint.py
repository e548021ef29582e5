"""Proof that evaluation text was not calibrated on: no shared run of words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

import msgspec
import numpy as np

from calib_cluster.corpora.documents import Corpus
from calib_cluster.errors import CalibrationError

RUN_WORDS = 13  # the usual length in reports on contamination: no common phrase is that long
EXAMPLE_WORDS = 30
# Scripts without spaces between words count by the character. Bare numbers are no words: counting
# from 1 to 20 is no shared passage, and a quotation with verse or page numbers still is one.
WORD = re.compile("[぀-ヿ㐀-鿿]|[^\\W぀-ヿ㐀-鿿]+")


class Overlap(msgspec.Struct, frozen=True):
    """A passage that both corpora contain, as its normalised words."""

    first: str  # document id
    second: str
    passage: str


class _Place(msgspec.Struct, frozen=True):
    """Word ``at`` of a document's ``words``."""

    document: str
    words: list[str]
    at: int


class _Runs:
    """Hashes of every run of ``words`` words of a corpus, sorted, with where each begins."""

    def __init__(self, corpus: Corpus, words: int) -> None:
        self.corpus = corpus
        parts = [run_hashes(normalised(d.text), words) for d in corpus.documents]
        hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        self._starts = np.cumsum([0] + [len(part) for part in parts])
        self._order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self._order]

    def places(self, hashed: np.uint64) -> Iterator[_Place]:
        """Every run with that hash, in corpus order."""
        first = np.searchsorted(self.hashes, hashed, "left")
        last = np.searchsorted(self.hashes, hashed, "right")
        for place in self._order[first:last]:
            document = int(np.searchsorted(self._starts, place, "right")) - 1
            text = self.corpus.documents[document]
            yield _Place(text.id, normalised(text.text), int(place - self._starts[document]))


def normalised(text: str) -> list[str]:
    """Words in lower case, no punctuation, no bare numbers; a CJK character is a word."""
    return [word for word in WORD.findall(text.lower()) if not word.isdecimal()]


def run_hashes(words: Sequence[str], run: int) -> np.ndarray:
    """64-bit hashes, uint64 [max(0, len(words) - run + 1)], of each run of ``run`` words."""
    count = len(words) - run + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    known: dict[str, int] = {}
    ids = np.fromiter((known.setdefault(w, len(known)) for w in words), np.int64, len(words))
    word_hashes = np.fromiter((_word_hash(w) for w in known), np.uint64, len(known))[ids]
    total = np.zeros(count, np.uint64)
    for offset in range(run):  # a polynomial in an odd factor, modulo 2**64
        total = total * np.uint64(0x9E3779B97F4A7C15) + word_hashes[offset : offset + count]
    return total


def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def find_overlap(a: Corpus, b: Corpus, words: int = RUN_WORDS) -> Overlap | None:
    """The first passage of ``words`` words that both contain, or None."""
    return _overlap(_Runs(a, words), _Runs(b, words), words)


def _overlap(a: _Runs, b: _Runs, words: int) -> Overlap | None:
    for hashed in _shared(a.hashes, b.hashes):
        for first in a.places(hashed):
            for second in b.places(hashed):
                passage = _common(first, second)
                if len(passage) >= words:  # equal hashes alone prove nothing
                    shown = " ".join(passage[: max(words, EXAMPLE_WORDS)])
                    return Overlap(first.document, second.document, shown)
    return None


def _shared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Values that two sorted arrays share, sorted."""
    few, many = sorted((a, b), key=len)
    if len(few) == 0:
        return few
    places = np.searchsorted(many, few)
    return np.unique(few[many[np.minimum(places, len(many) - 1)] == few])


def _common(a: _Place, b: _Place) -> list[str]:
    """The longest passage that two documents share around these places."""
    i, j = a.at, b.at
    while i > 0 and j > 0 and a.words[i - 1] == b.words[j - 1]:
        i, j = i - 1, j - 1
    pairs = zip(islice(a.words, i, None), islice(b.words, j, None), strict=False)
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def check_disjoint(a: Sequence[Corpus], b: Sequence[Corpus], words: int = RUN_WORDS) -> None:
    """Raise CalibrationError if a corpus of ``a`` and one of ``b`` share ``words`` words in a row.

    Words are compared in lower case without punctuation, across line borders but not across
    documents; so texts shorter than ``words`` words never overlap. Time and memory grow with the
    texts: about a second and 100 MB for a million words.
    """
    others = [_Runs(corpus, words) for corpus in b]
    for corpus in a:
        mine = _Runs(corpus, words)
        for other in others:
            if found := _overlap(mine, other, words):
                raise CalibrationError(
                    f"corpora {corpus.label!r} and {other.corpus.label!r} share text: "
                    f'{found.first} and {found.second} both contain "{found.passage}"; '
                    "evaluate on texts that calibration has not seen"
                )

"""What the quality command sends: held-out excerpts to score, and needles to find in others.

Everything is token ids of exactly the context's length, <bos> included where the model wants it,
and follows from the texts, the tokenizer and the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.corpora import bos
from loadtest.errors import UserError

NEEDLE = "\nRemember this: the secret code of the {place} is {code}.\n"
QUESTION = (
    "\n\nQuestion: What is the secret code of the {place}?\n"
    "Answer: The secret code of the {place} is"
)
PLACES = ("lighthouse", "library", "harbour", "museum", "castle", "bakery", "garden", "station")
DEPTHS = (0.05, 0.95)
CODES = (10_000, 99_999)


class _Row(msgspec.Struct):
    """A line of a JSONL file; other fields are ignored."""

    text: str
    corpus: str | None = None


@dataclass(frozen=True)
class Excerpt:
    """``ids`` of one held-out text of ``corpus``."""

    corpus: str
    ids: list[int]


@dataclass(frozen=True)
class Needle:
    """A prompt whose answer is ``code``, told at ``depth`` (0 to 1) of its haystack."""

    corpus: str
    ids: list[int]
    depth: float
    code: str

    def found_in(self, answer: str) -> bool:
        """True if ``answer`` holds the code as a number of its own."""
        return re.search(rf"(?<!\d){self.code}(?!\d)", answer) is not None


@dataclass(frozen=True)
class Prompts:
    """One run's prompts, the same for every contender."""

    texts: list[Excerpt]
    needles: list[Needle]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of all token ids and codes, in order."""
        record = [t.ids for t in self.texts], [[n.ids, n.code] for n in self.needles]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def load_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Text of each corpus: its documents in the order of the files, a blank line between them.

    ``.jsonl`` files hold ``{"text": ..., "corpus": ...}`` a line, ``.txt`` files one document;
    a document that names no corpus belongs to one named after its file. Raises UserError.
    """
    documents: dict[str, list[str]] = {}
    for path in paths:
        for row in _rows(path):
            if row.text.strip():
                documents.setdefault(row.corpus or path.stem, []).append(row.text.strip())
    if not documents:
        raise UserError(f"--texts {' '.join(map(str, paths))}: no text in it")
    return {corpus: "\n\n".join(texts) for corpus, texts in documents.items()}


def _rows(path: Path) -> list[_Row]:
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(f"--texts {path}: give .jsonl or .txt files")
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"--texts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--texts {path}: not UTF-8 ({error})") from error
    if path.suffix == ".txt":
        return [_Row(text)]
    lines = enumerate(text.split("\n"), start=1)  # splitlines would cut at U+2028 as well
    return [_row(path, number, line) for number, line in lines if line.strip()]


def _row(path: Path, number: int, line: str) -> _Row:
    try:
        return msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise UserError(f"--texts {path}, line {number}: {error}") from error


class _Deck:
    """Excerpts of ``length`` ids, none overlapping another, dealt in turn from every corpus."""

    def __init__(self, corpora: dict[str, str], tokenizer, length: int, seed: int) -> None:
        self.length = length
        self._piles = {name: self._cut(tokenizer, text) for name, text in corpora.items()}
        for name, pile in self._piles.items():
            random.Random(f"excerpts {seed} {name}").shuffle(pile)

    def _cut(self, tokenizer, text: str) -> list[list[int]]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [ids[i : i + self.length] for i in range(0, len(ids), self.length)][
            : len(ids) // self.length
        ]

    def check(self, *counts: int) -> None:
        """Raise UserError unless ``deal`` can be called with these counts."""
        for index, (name, pile) in enumerate(self._piles.items()):
            need = sum(len(range(index, count, len(self._piles))) for count in counts)
            if len(pile) < need:
                raise UserError(
                    f"--texts: corpus {name!r} holds {len(pile)} excerpts of {self.length} tokens, "
                    f"{need} are needed; give more text, or lower --texts-per-run or --needles"
                )

    def deal(self, count: int) -> list[Excerpt]:
        """``count`` excerpts, item i from corpus i modulo the number of corpora."""
        names = list(self._piles)
        turns = [names[i % len(names)] for i in range(count)]
        return [Excerpt(name, self._piles[name].pop()) for name in turns]


def build_prompts(
    corpora: dict[str, str], tokenizer, context: int, texts: int, needles: int, seed: int
) -> Prompts:
    """``texts`` excerpts and ``needles`` needle prompts, each of exactly ``context`` ids.

    Needles lie at depths of 5 % to 95 %, one in each of ``needles`` equal strata, in a random
    order so that depth and corpus are independent. Raises UserError if the text does not suffice.
    """
    start = bos(tokenizer)
    deck = _Deck(corpora, tokenizer, context - len(start), seed)
    deck.check(texts, needles)
    scored = [Excerpt(e.corpus, start + e.ids) for e in deck.deal(texts)]
    rng = random.Random(f"needles {seed}")
    depths = _depths(needles, rng)
    haystacks = deck.deal(needles)
    hidden = [
        _needle(tokenizer, start, hay, depth, rng)
        for hay, depth in zip(haystacks, depths, strict=True)
    ]
    return Prompts(scored, hidden)


def _depths(count: int, rng: random.Random) -> list[float]:
    low, high = DEPTHS
    depths = [low + (high - low) * (i + rng.random()) / count for i in range(count)]
    rng.shuffle(depths)
    return depths


def _needle(tokenizer, start: list[int], hay: Excerpt, depth: float, rng: random.Random) -> Needle:
    place = rng.choice(PLACES)
    text = tokenizer.decode(hay.ids)
    while (code := str(rng.randint(*CODES))) in text:
        pass
    told = _ids(tokenizer, NEEDLE.format(place=place, code=code))
    asked = _ids(tokenizer, QUESTION.format(place=place))
    ids = hay.ids[: len(hay.ids) - len(told) - len(asked)]
    at = round(depth * len(ids))
    return Needle(hay.corpus, [*start, *ids[:at], *told, *ids[at:], *asked], depth, code)


def _ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]

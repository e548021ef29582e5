"""Prompts that end in a question, and the answer that follows: what a freeze must not lose.

Plain text seldom needs a particular token far back; these do. ``facts`` hides a few in prose,
``records`` are many in one notation, ``passages`` asks for a section word by word (a long answer).
With ``-later`` the prompt ends before the question, which then comes after the freeze. A task
follows from the tokenizer, its kind, length, seed and number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from calib_cluster.corpora.excerpts import bos, plain_encoder
from calib_cluster.corpora.generated import STYLES, Fact, new_fact, put
from calib_cluster.corpora.words import paragraph, pick
from calib_cluster.errors import CalibrationError

LATER = "-later"
LEAST_LENGTH = 128
TRIES = 50
ANSWER = 96  # at most so many tokens of an answer
Encode = Callable[[str], list[int]]


class AskedTask(msgspec.Struct, frozen=True):
    """``prompt`` of exactly the length asked for and its ``continuation``, whose first ``scored``
    tokens (a question that comes later) are given and not scored."""

    kind: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    scored: int = 0


class _Text(msgspec.Struct, frozen=True):
    """Pieces of a context, the numbers of those that must stay, question and answer."""

    pieces: list[str]
    needed: set[int]
    question: str
    answer: str


def _facts(rng: random.Random, characters: int) -> _Text:
    given, asked, answer = rng.choice(STYLES)
    pieces, size = [], 0
    while size < characters:
        pieces.append(paragraph(rng, rng.randint(2, 6)) + "\n\n")
        size += len(pieces[-1])
    known: dict[str, Fact] = {}
    facts = [new_fact(rng, known) for _ in range(rng.randint(1, 4))]
    places = rng.sample(range(len(pieces)), min(len(facts), len(pieces)))
    for fact, place in zip(facts, places, strict=False):
        pieces[place] = f"{pieces[place].rstrip()} {put(given, fact).lstrip('- ')}\n\n"
    return _asking(pieces, {places[0]}, asked, answer, facts[0])


def _records(rng: random.Random, characters: int) -> _Text:
    given, asked, answer = rng.choice(STYLES)
    known: dict[str, Fact] = {}
    pieces, size = [], 0
    while size < characters:
        pieces.append(put(given, new_fact(rng, known)) + "\n")
        size += len(pieces[-1])
    place = rng.randrange(len(pieces))
    return _asking(pieces, {place}, asked, answer, list(known.values())[place])


def _asking(pieces: list[str], needed: set[int], asked: str, answer: str, fact: Fact) -> _Text:
    before, value, after = put(answer, fact).partition(fact.value)
    question = f"\n{put(asked, fact)}\n{before}"
    kept = question.rstrip(" ")  # a space belongs to the first token of what follows
    return _Text(pieces, needed, kept, question[len(kept) :] + value + after + "\n")


def _passages(rng: random.Random, characters: int) -> _Text:
    sections: dict[str, str] = {}
    size = 0
    while size < characters:
        title = f"{pick(rng, 'adj').title()} {pick(rng, 'noun').title()}"
        if title not in sections:
            sections[title] = paragraph(rng, rng.randint(5, 9))
            size += len(sections[title])
    place = rng.randrange(len(sections))
    title, text = list(sections.items())[place]
    pieces = [f"Section {name}\n{body}\n\n" for name, body in sections.items()]
    return _Text(pieces, {place}, f"\nCopy of section {title}:\n", text + "\n")


_WRITERS = {"facts": _facts, "records": _records, "passages": _passages}
ASKED = tuple(name + later for later in ("", LATER) for name in _WRITERS)


def asked_tasks(tokenizer, kind: str, count: int, length: int, seed: int) -> tuple[AskedTask, ...]:
    """``count`` tasks of ``kind`` (one of ``ASKED``), their prompts of ``length`` tokens.

    Raises:
        CalibrationError: an unknown kind, or a length below 128 or too short for a question.
    """
    if kind not in ASKED:
        raise CalibrationError(f"no task {kind!r}; there are {', '.join(ASKED)}")
    if length < LEAST_LENGTH:
        raise CalibrationError(f"tasks need prompts of {LEAST_LENGTH} tokens, found {length}")
    encode, start = plain_encoder(tokenizer), bos(tokenizer)
    return tuple(_task(encode, start, kind, length, f"{seed} {i}") for i in range(count))


def _task(encode: Encode, start: list[int], kind: str, length: int, seed: str) -> AskedTask:
    name = kind.removesuffix(LATER)
    rng = random.Random(f"asked {kind} {seed}")
    for _ in range(TRIES):  # a text whose needed pieces do not fit is drawn again
        text = _WRITERS[name](rng, 4 * length)
        question, answer = _split(encode, text)
        later = kind.endswith(LATER)
        room = length - len(start) - (0 if later else len(question))
        context = _fitted(encode, text, room, rng)
        if context is not None and len(answer) >= 2:
            break
    else:
        raise CalibrationError(
            f"{kind}: what is asked for does not fit into {length} tokens of this tokenizer; give "
            "longer prompts"
        )
    prompt = start + context + ([] if later else question)
    continuation = (question if later else []) + answer[:ANSWER]
    return AskedTask(kind, tuple(prompt), tuple(continuation), len(question) if later else 0)


def _split(encode: Encode, text: _Text) -> tuple[list[int], list[int]]:
    """Ids of question and answer, cut where the tokens of both together part."""
    whole, question = encode(text.question + text.answer), encode(text.question)
    same = 0
    while same < len(question) and whole[same] == question[same]:
        same += 1
    return whole[:same], whole[same:]


def _fitted(encode: Encode, text: _Text, room: int, rng: random.Random) -> list[int] | None:
    """Ids of the pieces that fit, needed ones first, in order; filled up at the front."""
    ids = [encode(piece) for piece in text.pieces]
    order = rng.sample(range(len(ids)), len(ids))
    order.sort(key=lambda place: place not in text.needed)
    chosen, used = set(), 0
    for place in order:
        if used + len(ids[place]) <= room:
            chosen.add(place)
            used += len(ids[place])
    if not text.needed <= chosen:
        return None
    body = [token for place in sorted(chosen) for token in ids[place]]
    return _filler(encode, room - used, rng) + body


def _filler(encode: Encode, count: int, rng: random.Random) -> list[int]:
    ids: Sequence[int] = []
    sentences = 1 + count // 8
    while len(ids) < count:
        ids = encode(paragraph(rng, sentences) + "\n\n")
        sentences *= 2
    return list(ids[len(ids) - count :])

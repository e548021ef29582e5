"""Excerpts of exactly so many tokens, without tokenizing more text than they need."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

Encode = Callable[[str], list[int]]  # text -> token ids, no <bos>

SAMPLE_TOKENS = 512  # enough to tell how many characters a token of this text has
GUESSED_DENSITY = 5.0  # characters per token, before anything of a text was tokenized
CUT_TOKENS = 8  # at the end of a slice cut anywhere, these may differ from the whole text's
SLOT_SLACK = 1.25  # a slot is this much longer than an excerpt is expected to be
BORDER_CHARACTERS = 2000  # a border is looked for this far


def plain_encoder(tokenizer) -> Encode:
    """Token ids of a text without special tokens; no warning about long texts."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def bos(tokenizer) -> list[int]:
    """[<bos>] for a tokenizer that starts every text with it (Gemma), else []."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def head(encode: Encode, text: str, count: int, density: float) -> tuple[list[int], float]:
    """The first ``count`` token ids of ``text`` (fewer if it ends) and characters per token.

    ``density`` is the caller's guess of the latter; a bad one only costs time.
    """
    size = math.ceil(1.1 * density * count) + CUT_TOKENS
    while True:
        ids = encode(text[:size])
        found = min(size, len(text)) / max(1, len(ids))
        if size >= len(text) or len(ids) >= count + CUT_TOKENS:
            return ids[:count], found
        size *= 2


def excerpts(
    encode: Encode, text: str, length: int, rng: random.Random, from_start: bool = False
) -> Iterator[list[int]]:
    """Excerpts of ``length`` ids that do not overlap, in random order, each from a line border.

    A text of fewer tokens gives itself, whole. ``from_start`` gives the text's beginning only.
    """
    density = head(encode, text, min(length, SAMPLE_TOKENS), GUESSED_DENSITY)[1]
    width = math.ceil(density * length * SLOT_SLACK)
    found = False
    if not from_start and len(text) > width:
        for begin, end in _slots(text, width, rng):
            ids = _in_slot(encode, text[begin:end], length, density, rng)
            if ids is not None:
                found = True
                yield ids
    if not found:  # not long enough for a choice, or unevenly dense
        yield head(encode, text, length, density)[0]


def _slots(text: str, width: int, rng: random.Random) -> list[tuple[int, int]]:
    """``text`` cut at borders into slots of about ``width`` characters or more, shuffled."""
    count = max(1, len(text) // width)
    cuts = [border(text, i * len(text) // count) for i in range(count)] + [len(text)]
    slots = [(a, b) for a, b in pairwise(cuts) if a < b]
    rng.shuffle(slots)
    return slots


def _in_slot(
    encode: Encode, slot: str, length: int, density: float, rng: random.Random
) -> list[int] | None:
    """``length`` ids from a random border of the slot, else from its beginning, else None."""
    spare = len(slot) - math.ceil(density * length)
    for start in (border(slot, rng.randrange(max(1, spare))), 0):
        ids, _ = head(encode, slot[start:], length, density)
        if len(ids) == length:
            return ids
    return None


def border(text: str, at: int) -> int:
    """First beginning of a non-blank line at or after ``at``, else of a sentence, else of a word.

    Never decreases as ``at`` grows, so that slots between borders do not overlap.
    """
    if at <= 0:
        return 0
    window = text[at - 1 : at + BORDER_CHARACTERS]
    for mark in ("\n", ". ", " "):
        if (found := window.find(mark)) >= 0:
            start = at - 1 + found + len(mark)
            while text.startswith("\n", start):
                start += 1
            return start
    return at

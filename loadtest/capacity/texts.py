"""Prompts as text that is exactly so many tokens: SGLang's client sends text, not token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from loadtest.corpora import bos, prompts
from loadtest.errors import UserError

TRIES = 30
"""Corrections of one excerpt's length before another excerpt is taken."""


class Prompt(msgspec.Struct, frozen=True):
    """``text`` that the model's tokenizer turns into ``ids``, <bos> included where it adds one."""

    text: str
    ids: list[int]


def exact_prompts(tokenizer, count: int, tokens: int, seed: int) -> list[Prompt]:
    """``count`` excerpts of Python's standard library, each exactly ``tokens`` tokens.

    The first n are the same for every ``count``. Raises UserError if the tokenizer cannot make
    texts of that length.
    """
    found: list[Prompt] = []
    for ids in _excerpts(tokenizer, tokens, seed, attempts=20 * count):
        if (prompt := fitted(tokenizer, ids, tokens)) is not None:
            found.append(prompt)
        if len(found) == count:
            return found
    raise UserError(f"--context {tokens}: the model's tokenizer makes no texts of that length")


def _excerpts(tokenizer, tokens: int, seed: int, attempts: int) -> Iterator[list[int]]:
    """Token ids of excerpts, some more than needed: a text may tokenize into fewer than it had."""
    for number in range(attempts):
        (ids,) = prompts(tokenizer, [tokens + TRIES], seed=1000 * seed + number)
        yield ids


def fitted(tokenizer, ids: Sequence[int], tokens: int) -> Prompt | None:
    """The text of the first ids that is exactly ``tokens`` tokens again; None if there is none."""
    start = len(bos(tokenizer))
    length = tokens
    for _ in range(TRIES):
        text = tokenizer.decode(ids[start:length])
        again = tokenizer(text)["input_ids"]
        if len(again) == tokens:
            return Prompt(text, again)
        length = min(length + tokens - len(again), len(ids))
    return None

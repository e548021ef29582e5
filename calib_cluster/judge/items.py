"""What is asked: a context, a question about it, and the answer, as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

AWARE, AGNOSTIC, PLAIN = "aware", "agnostic", "plain"
PROTOCOLS = (AWARE, AGNOSTIC)
"""``aware``: the prompt is context and question, compressed together. ``agnostic``: the prompt is
the context alone, and the question comes after the compression. Items without a question are
judged once, as ``plain``."""

TEXT = "text"
"""The task without a question: what follows an excerpt."""


class Item(msgspec.Struct, frozen=True):
    """One thing to answer; ``context`` and ``question`` together have the length asked for.

    ``context`` begins with <bos> where the model wants it; ``depth``, 0 to 1, is where in it the
    answer is told (None where that is no single place); ``corpus`` is what its text is from. The
    last ``held`` tokens of the question follow the compression, so that the answer's first token
    too is predicted from what was kept. ``choices``: tokens that the answer's last one is among.
    """

    task: str
    index: int
    length: int
    corpus: str
    depth: float | None
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    held: int = 0
    choices: tuple[int, ...] = ()

    def protocols(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Those of ``asked`` that make sense for it."""
        return tuple(asked) if self.question else (PLAIN,)

    def case(self, protocol: str) -> Case:
        """The item under one of ``protocols``."""
        if protocol == AGNOSTIC:
            given = self.question
            return Case(self.context, given + self.answer, len(given), self.choices)
        cut = len(self.question) - self.held
        prompt, given = self.context + self.question[:cut], self.question[cut:]
        return Case(prompt, given + self.answer, len(given), self.choices)

    @property
    def digest(self) -> str:
        """16 hex digits of all that decides its scores."""
        parts = self.context, self.question, self.answer
        sha = hashlib.sha256(" ".join(str(len(part)) for part in parts).encode())
        for part in parts:
            sha.update(np.asarray(part, "<i8").tobytes())
        if self.held or self.choices:
            sha.update(msgspec.json.encode((self.held, self.choices)))
        return sha.hexdigest()[:16]


class Case(msgspec.Struct, frozen=True):
    """A ``prompt`` that is compressed when it ends, and the ``continuation`` that reads the rest.

    The continuation's tokens before ``start`` are given, those from there on are the answer.
    ``choices``: if any, the last token's prediction is the most likely one of them.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    start: int
    choices: tuple[int, ...] = ()

    @property
    def scored(self) -> slice:
        """Answer tokens whose prediction read a compressed cache.

        The first token after the prompt is predicted by the prefill itself, alike in every arm:
        it says nothing about what was kept.
        """
        return slice(max(1, self.start), len(self.continuation))

"""Words of four kinds, for telling a new one's kind from labelled ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from calib_cluster.judge.names import BIRDS, INSTRUMENTS, METALS, TREES

LABELS = ("A", "B", "C", "D")
KINDS: tuple[tuple[str, ...], ...] = (TREES, BIRDS, METALS, INSTRUMENTS)


@dataclass(frozen=True)
class Word:
    """A word and the number of its kind, 0 to 3."""

    text: str
    kind: int


def words(rng: random.Random) -> tuple[Word, Iterator[Word]]:
    """A word to ask for, and other words without end: four at a time, one of each kind."""
    kind = rng.randrange(len(KINDS))
    asked = Word(rng.choice(KINDS[kind]), kind)
    shown = [[word for word in words if word != asked.text] for words in KINDS]

    def others() -> Iterator[Word]:
        while True:
            for kind in rng.sample(range(len(KINDS)), len(KINDS)):
                yield Word(rng.choice(shown[kind]), kind)

    return asked, others()

"""What the small hybrid is trained on: looking up, finding and copying, at any length.

Every sample is exactly so many token ids. What is asked for is scored in full, the rest of the
text a little, so that it is modelled too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from loadtest.capacity.needles import ANSWER, CODES, NEEDLE, PLACES, QUESTION
from loadtest.corpora import library_texts

TASKS = ("needle", "recall", "copy")
SHARES = (0.4, 0.4, 0.2)
TEXT_WEIGHT = 0.1
MOST_TOLD = 0.67  # of a recall sample: the rest asks
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
PAIR = "\n{word} = {code}"
ASKED = "\n? {word} = {code}"


@dataclass
class Sample:
    """``ids`` [T] and the weight of each one's loss [T]; ``answers``: spans that were asked for."""

    task: str
    ids: list[int]
    weights: list[float]
    answers: list[tuple[int, int]]


class Tasks:
    """Draws samples; everything follows from the seed.

    Args:
        tokenizer: of the model.
        seed: anything that can be printed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: object) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(f"hybrid tasks {seed}")
        self.hay = [self._ids(text) for text in library_texts()]

    def sample(self, task: str, length: int) -> Sample:
        """One sample of ``task``, ``length`` tokens."""
        return getattr(self, f"_{task}")(length)

    def batch(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor, list[Sample]]:
        """ids int64 [count, length], weights f32 [count, length], and the samples they are of."""
        drawn = self.rng.choices(TASKS, SHARES, k=count)
        samples = [self.sample(task, length) for task in drawn]
        ids = torch.tensor([s.ids for s in samples])
        return ids, torch.tensor([s.weights for s in samples]), samples

    # -- the tasks -----------------------------------------------------------------------------

    def _needle(self, length: int) -> Sample:
        """Codes told within a text and asked for at its end: as ``loadtest max-context`` asks."""
        most = max(1, min(4, length // 120))
        places = self.rng.sample([*PLACES, *(self._word() for _ in range(24))], most)
        told = [(place, str(self.rng.randint(*CODES))) for place in places]
        build = _Builder()
        asked = [(QUESTION + "Answer: " + ANSWER, place, code) for place, code in told]
        self.rng.shuffle(asked)
        tail = _Builder()
        for text, place, code in asked:
            tail.add(self._ids(text.format(place=place)), TEXT_WEIGHT)
            tail.answer(self._ids(f" {code}.\n"))
        needles = [self._ids(NEEDLE.format(place=place, code=code)) for place, code in told]
        room = length - len(tail.ids) - sum(map(len, needles))
        cuts = sorted(self.rng.randint(0, max(0, room)) for _ in needles)
        hay, done = self._excerpt(max(0, room)), 0
        for cut, needle in zip(cuts, needles, strict=True):
            build.add(hay[done:cut], TEXT_WEIGHT)
            build.add(needle, TEXT_WEIGHT)
            done = cut
        build.add(hay[done:], TEXT_WEIGHT)
        build.extend(tail)
        return build.last("needle", length)

    def far_recall(self, length: int) -> Sample:
        """As ``recall``, as many pairs as it ever has, and asked for from the oldest on."""
        return self._recall(length, far=True)

    def _recall(self, length: int, far: bool = False) -> Sample:
        """Pairs of a made-up word and a number, then a part of them asked for."""
        pairs: dict[str, str] = {}
        told, asked = _Builder(), _Builder()
        room = length * (MOST_TOLD if far else self.rng.uniform(0.1, MOST_TOLD))
        while True:
            word, code = self._word(), str(self.rng.randint(100, 999))
            if word in pairs:
                continue
            piece = self._ids(PAIR.format(word=word, code=code))
            if pairs and len(told.ids) + len(piece) > room:
                break
            pairs[word] = code
            told.add(piece, 0.0)
        words = list(pairs)
        oldest = iter(words)
        while len(asked.ids) < length - len(told.ids):
            word = next(oldest) if far else self.rng.choice(words)
            whole = self._ids(ASKED.format(word=word, code=pairs[word]))
            digits = len(pairs[word]) + 1  # and the space before
            asked.add(whole[:-digits], 0.0)
            asked.answer(whole[-digits:])
        told.extend(asked)
        return told.first("recall", length)

    def _copy(self, length: int) -> Sample:
        """Tokens of a text in random order, then the same again: from a few to half of all."""
        period = round(math.exp(self.rng.uniform(math.log(4), math.log(length // 2))))
        ids = self._excerpt(period)
        self.rng.shuffle(ids)  # so that nothing but copying tells what follows
        build = _Builder()
        build.add(ids, 0.0)
        while len(build.ids) + period <= length:
            build.answer(ids)
        build.add(ids, 1.0)
        return build.first("copy", length)

    # -- pieces --------------------------------------------------------------------------------

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _word(self) -> str:
        syllables = (self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) for _ in range(3))
        return "".join(syllables)

    def _excerpt(self, length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            text = self.rng.choice(self.hay)
            start = self.rng.randrange(len(text))
            ids += text[start : start + length - len(ids)]
        return ids


class _Builder:
    """Token ids, their weights and the answers among them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.answers: list[tuple[int, int]] = []

    def add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def answer(self, ids: list[int]) -> None:
        self.answers.append((len(self.ids), len(self.ids) + len(ids)))
        self.add(ids, 1.0)

    def extend(self, other: _Builder) -> None:
        self.answers += [(len(self.ids) + a, len(self.ids) + b) for a, b in other.answers]
        self.ids += other.ids
        self.weights += other.weights

    def first(self, task: str, length: int) -> Sample:
        whole = [(a, b) for a, b in self.answers if b <= length]
        return Sample(task, self.ids[:length], self.weights[:length], whole)

    def last(self, task: str, length: int) -> Sample:
        shift = len(self.ids) - length
        whole = [(a - shift, b - shift) for a, b in self.answers if a >= shift]
        return Sample(task, self.ids[shift:], self.weights[shift:], whole)

"""Seeded generators of the judge's items, at any length and exactly that long.

An item follows from the texts, the tokenizer, seed, task, length and its number alone, whatever
other tasks and how many items there are. Wordings are this judge's own: nothing that is
calibrated on looks like them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from calib_cluster.corpora.documents import Corpus
from calib_cluster.corpora.excerpts import bos, plain_encoder
from calib_cluster.errors import CalibrationError
from calib_cluster.judge import labels, names
from calib_cluster.judge.haystack import SPARE, Hay, cut_hay
from calib_cluster.judge.items import TEXT, Item

MIN_LENGTH = 256
CONTINUATION = 128  # tokens of a text item's answer
PASSAGES, PASSAGE = 4, SPARE // 4  # of a long answer: how many to choose from, their tokens
DEPTHS = (0.04, 0.96)
GOLDEN = 0.6180339887498949  # multiples of it modulo 1 are evenly spread, however many
BORDER = 32  # tokens: how far a place in the text may move to the end of a sentence

# What is told once and asked for: (sentence, question, and its last words again).
FACTS = (
    ("(The parcel for {who} weighs {number} grams.)",
     "How heavy is the parcel for {who}? The parcel for {who} weighs"),
    ("(The ticket that {who} bought has the number {number}.)",
     "Which ticket did {who} buy? The ticket that {who} bought has the number"),
    ("(That winter {who} counted {number} stars.)",
     "How many stars did {who} count? That winter {who} counted"),
)  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """What one item is made with."""

    rng: random.Random
    hay: Hay
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    task: str
    index: int
    length: int
    depth: float

    def item(self, context: Sequence[int], question: str, answer: list[int], depth) -> Item:
        asked = self.encode(question)
        if len(context) + len(asked) != self.length:
            raise ValueError(f"{self.task}: {len(context)} + {len(asked)} != {self.length}")
        if len(answer) < 2:
            raise CalibrationError(
                f"task {self.task}: an answer is one token for this tokenizer, 2 are needed"
            )
        return Item(
            self.task, self.index, self.length, self.hay.corpus, depth, tuple(context),
            tuple(asked), tuple(answer),
        )  # fmt: skip

    def around(
        self, question: str, told: Sequence[tuple[float, list[int]]]
    ) -> tuple[list[int], float]:
        """The haystack with pieces ``told`` at depths, as long as ``question`` leaves room for.

        Depths are of the haystack; also returns where in the whole the first piece begins, 0 to 1.
        """
        room = self.length - len(self.encode(question)) - sum(len(ids) for _, ids in told)
        if room < self.length // 8:
            raise CalibrationError(
                f"task {self.task} does not fit in {self.length} tokens: give a larger --length"
            )
        context: list[int] = []
        done = first = 0
        for number, (depth, ids) in sorted(enumerate(told), key=lambda piece: piece[1][0]):
            at = max(done, self._border(round(depth * room), room))
            context += self.hay.ids[done:at]
            first = len(context) if number == 0 else first
            context += ids
            done = at
        context += self.hay.ids[done:room]
        return context, first / len(context)

    def _border(self, at: int, room: int) -> int:
        """The end of a sentence or line near ``at``, at least 1 (past <bos>)."""
        at = min(max(at, 1), room)
        for step in range(min(BORDER, room - at)):
            if self.decode(self.hay.ids[at + step - 1 : at + step]).endswith((".", "\n")):
                return at + step
        return at


def _needle(place: _Place) -> Item:
    """One fact in running text."""
    return _facts(place, 1)


def _multikey(place: _Place) -> Item:
    """Many facts that differ in who they are about; one is asked for."""
    return _facts(place, min(16, max(4, place.length // 128)))


def _facts(place: _Place, count: int) -> Item:
    rng = place.rng
    sentence, question = rng.choice(FACTS)
    whose, numbers = names.people(rng, count), names.numbers(rng, count)
    depths = [place.depth] + [rng.uniform(*DEPTHS) for _ in range(count - 1)]
    told = [
        (depth, place.encode("\n" + sentence.format(who=who, number=number) + "\n"))
        for depth, who, number in zip(depths, whose, numbers, strict=True)
    ]
    asked = "\n\n" + question.format(who=whose[0])
    answer = place.encode(f" {numbers[0]}")
    context, depth = place.around(asked, told)
    return place.item(context, asked, answer, depth)


def _recall(place: _Place) -> Item:
    """A register that fills the context; one entry is asked for."""
    rng = place.rng
    title = place.encode("\n\nRegister of the reserve\n")
    most = place.length // 6  # an entry is longer than that many tokens each
    keys, values = names.entries(rng, most), names.numbers(rng, most)
    lines, size = [], 0
    longest = max(len(place.encode(f"\n\nSeen in the register: {key} ->")) for key in keys)
    for key, value in zip(keys, values, strict=True):
        line = place.encode(f"{key} -> {value}\n")
        if len(title) + size + len(line) + longest + 1 > place.length:
            break
        lines.append(line)
        size += len(line)
    wanted = min(int(place.depth * len(lines)), len(lines) - 1)
    asked = f"\n\nSeen in the register: {keys[wanted]} ->"
    before = place.length - len(title) - size - len(place.encode(asked))
    start = place.hay.ids[:before] + title
    context = start + [token for line in lines for token in line]
    depth = (len(start) + sum(map(len, lines[:wanted]))) / len(context)
    return place.item(context, asked, place.encode(f" {values[wanted]}"), depth)


def _vartrack(place: _Place) -> Item:
    """Chains that hand a crate on from town to town; one chain is asked for, in order."""
    rng, chains, hops = place.rng, 3, 4
    towns = names.towns(rng, chains * hops)
    sent = [f"Crate {crate} is sent to" for crate in names.numbers(rng, chains, digits=5)]
    told, ways = [], []
    for chain, first in enumerate(sent):
        route = towns[chain * hops : (chain + 1) * hops]
        steps = [f"{first} {route[0]}", *(f"{a} sends it on to {b}" for a, b in pairwise(route))]
        depths = sorted(rng.uniform(*DEPTHS) for _ in steps)
        told += [
            (depth, place.encode(f"\n({step}.)\n"))
            for depth, step in zip(depths, steps, strict=True)
        ]
        ways.append(". ".join(steps) + ".")
    asked = f"\n\nThe whole way of one crate, town after town. {sent[0]}"
    answer = place.encode(ways[0].removeprefix(sent[0]))
    return place.item(place.around(asked, told)[0], asked, answer, None)


def _labels(place: _Place) -> Item:
    """Words of four kinds, each with its kind's letter; the letter of a new word is asked for.

    Which letter is which kind's is drawn anew for every item. The prompt begins within a line.
    """
    letters = [place.encode(letter) for letter in labels.LABELS]
    if any(len(ids) != 1 for ids in letters) or len(set(map(tuple, letters))) < len(letters):
        raise CalibrationError(f"task {place.task}: a letter is no token of this tokenizer")
    place.rng.shuffle(letters)
    wanted, others = labels.words(place.rng)
    asked, end = place.encode(f"{wanted.text} ("), place.encode(")\n")
    room = place.length - len(place.hay.ids) - len(asked)
    shown: list[int] = []
    while len(shown) < room:
        one = next(others)
        shown += [*place.encode(f"{one.text} ("), *letters[one.kind], *end]
    context = (*place.hay.ids, *shown[-room:])
    choices = tuple(token for ids in letters for token in ids)
    return Item(
        place.task, place.index, place.length, place.hay.corpus, None, context, tuple(asked),
        tuple(letters[wanted.kind]), held=1, choices=choices,
    )  # fmt: skip


def _text(place: _Place) -> Item:
    """What follows an excerpt."""
    return place.item(place.hay.ids, "", place.hay.spare[:CONTINUATION], None)


def _longanswer(place: _Place) -> Item:
    """A passage of another part of the text, to be copied; it is named by its heading."""
    count = PASSAGES if place.length >= 2 * MIN_LENGTH else 2
    towns = names.towns(place.rng, count)
    passages = [place.hay.spare[i : i + PASSAGE] for i in range(0, count * PASSAGE, PASSAGE)]
    depths = [place.depth] + [place.rng.uniform(*DEPTHS) for _ in range(count - 1)]
    told = [
        (depth, place.encode(f"\n\n== Letter from {town} ==\n") + passage + place.encode("\n\n"))
        for depth, town, passage in zip(depths, towns, passages, strict=True)
    ]
    asked = f"\n\nA copy of that letter, word for word:\n\n== Letter from {towns[0]} ==\n"
    context, depth = place.around(asked, told)
    return place.item(context, asked, passages[0], depth)


TASKS: dict[str, Callable[[_Place], Item]] = {
    "needle": _needle,
    "multikey": _multikey,
    "recall": _recall,
    "vartrack": _vartrack,
    "longanswer": _longanswer,
    "labels": _labels,
    TEXT: _text,
}
HAYLESS = ("labels",)
"""Tasks that need no held-out text: what the others get of it does not depend on them."""
GENERATED = "generated"


def make_items(
    corpora: Sequence[Corpus],
    tokenizer,
    *,
    tasks: Sequence[str],
    length: int,
    per_task: int,
    seed: int,
) -> list[Item]:
    """``per_task`` items of each of ``tasks``, item by item in the order of the tasks.

    Args:
        corpora: held-out texts (``load_texts``).
        tokenizer: of the model, from transformers.
        length: tokens of context and question together, at least ``MIN_LENGTH``.

    Raises:
        CalibrationError: unknown task, too short, or too little text.
    """
    if unknown := [task for task in tasks if task not in TASKS]:
        raise CalibrationError(f"no task {unknown[0]!r}; there are {', '.join(TASKS)}")
    if length < MIN_LENGTH:
        raise CalibrationError(f"length {length} is not accepted: give at least {MIN_LENGTH}")
    order = [task for task in TASKS if task not in HAYLESS]
    count = per_task * len(order) if set(tasks) - set(HAYLESS) else 0
    hay = cut_hay(corpora, tokenizer, length, count, seed) if count else []
    none = Hay(GENERATED, bos(tokenizer), [])
    encode = plain_encoder(tokenizer)
    items = []
    for index in range(per_task):
        for task in tasks:
            rng = random.Random(f"{task} {seed} {length} {index}")
            offset = random.Random(f"depth {task} {seed} {length}").random()
            low, high = DEPTHS
            depth = low + (high - low) * ((offset + index * GOLDEN) % 1)
            own = none if task in HAYLESS else hay[index * len(order) + order.index(task)]
            place = _Place(rng, own, encode, tokenizer.decode, task, index, length, depth)
            items.append(TASKS[task](place))
    return items

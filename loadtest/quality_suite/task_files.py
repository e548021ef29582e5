"""``--task-file FORMAT:PATH``: which rows of a file are asked, and their items at a length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest.errors import UserError
from loadtest.quality_suite.judging import Chat, Item
from loadtest.quality_suite.task_formats import FORMATS, FileTask

ANSWER_TOKENS = 64
"""A longer answer is scored by its beginning."""
CHARS_PER_TOKEN = 12  # no text has more, over a page of it


@dataclass(frozen=True)
class FileSpec:
    """A file of the user's and what it claims to be."""

    format: str
    path: Path

    @property
    def label(self) -> str:
        """What items of it name as their corpus."""
        return f"{self.format}:{self.path.name}"

    @classmethod
    def of(cls, text: str) -> FileSpec:
        """``FORMAT:PATH``. Raises UserError."""
        name, mark, path = text.partition(":")
        if not mark or name not in FORMATS:
            raise UserError(
                f"--task-file {text!r} is not accepted: give FORMAT:PATH, FORMAT one of "
                f"{', '.join(FORMATS)}"
            )
        if not Path(path).exists():
            raise UserError(f"--task-file {text}: no such file")
        return cls(name, Path(path))


@dataclass(frozen=True)
class Tokens:
    """How text becomes ids here: ``encode`` (no <bos>), ``decode``, the model's ``chat``, and the
    ``length`` of the longest prompt."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    chat: Chat
    length: int


@dataclass(frozen=True)
class Rows:
    """The tasks that are asked, and how many rows had no answer."""

    tasks: list[FileTask]
    skipped: int


def chosen_tasks(spec: FileSpec, most: int) -> Rows:
    """``most`` tasks of a file, evenly spread; every row is read. Raises UserError."""
    rows = list(FORMATS[spec.format].read(spec.path))
    tasks = [task for task in rows if task is not None]
    if not tasks:
        raise UserError(f"--task-file {spec.label}: no row has an answer")
    count = min(most, len(tasks))
    return Rows([tasks[i * len(tasks) // count] for i in range(count)], len(rows) - len(tasks))


def file_item(
    task: FileTask, tokens: Tokens, index: int, corpus: str, hay: str
) -> tuple[Item, bool] | None:
    """The item of a row, and whether its prompt was cut; None if the question alone is too long.

    A longer prompt loses its middle, as in LongBench: as many tokens of its beginning are kept as
    of its end. ``hay``: text to hide a needle in where the row brings none.
    """
    encode, chat = tokens.encode, tokens.chat
    question = (*encode(task.question), *chat.after, *encode(task.lead))
    if not chat.after and task.lead:
        question = tuple(encode(task.question + task.lead))
    length = min(tokens.length, task.tokens or tokens.length)
    room = length - len(chat.before) - len(question)
    if room < length // 2:
        return None
    if task.needle:
        context, depth = _hidden(task, tokens, room, task.context or hay)
        cut = False
    else:
        whole = encode(task.context)
        cut = len(whole) > room
        head = min(room, max(0, length // 2 - len(chat.before))) if cut else len(whole)
        context = [*whole[:head], *whole[len(whole) - (room - head) :]] if cut else whole
        depth = _depth(task, tokens, len(whole), head, len(context))
    return (
        Item(
            task.task, index, tokens.length, corpus, depth, (*chat.before, *context), question,
            _answer(task, tokens), held=1,
        ),
        cut,
    )  # fmt: skip


def _answer(task: FileTask, tokens: Tokens) -> tuple[int, ...]:
    text = ", ".join(task.answers) if task.all_of else task.answers[0]
    before = task.lead or (tokens.decode(tokens.chat.after) if tokens.chat.after else task.question)
    space = "" if before[-1:].isspace() else " "
    return tuple(tokens.encode(space + text)[:ANSWER_TOKENS])


def _depth(task: FileTask, tokens: Tokens, whole: int, head: int, kept: int) -> float | None:
    """Where in what is kept the answer is told, 0 to 1; None if nowhere or in no single place."""
    if task.place is None:
        return None
    at = len(tokens.encode(task.context[: task.place]))
    if at >= head:
        at -= whole - kept
        if at < head and whole > kept:
            return None
    return at / kept


def _hidden(task: FileTask, tokens: Tokens, room: int, text: str) -> tuple[list[int], float]:
    """``room`` tokens of ``text`` (over again if it is short) with the needle at its depth.

    It follows a sentence's end at or before that depth, as in the published test.
    """
    needle = tokens.encode(task.needle)
    wanted = room - len(needle)
    part = text[: CHARS_PER_TOKEN * wanted]
    ids = tokens.encode(part)
    ids = (ids * math.ceil(wanted / len(ids)))[:wanted]
    at = int(task.depth * wanted)
    if task.depth < 1:
        while at and not tokens.decode(ids[at - 1 : at]).rstrip().endswith("."):
            at -= 1
    return [*ids[:at], *needle, *ids[at:]], at / room

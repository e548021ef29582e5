"""What a suite asks: which tasks, how long, under which protocol, how often. And what is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.errors import UserError

AWARE, AGNOSTIC, PLAIN = "aware", "agnostic", "plain"
TEXT = "text"
NOTHING = "nothing"
"""The arm that drops every token of the prompt but the last: a task's floor."""


@dataclass(frozen=True)
class Part:
    """``items`` of a task at ``length`` prompt tokens under one protocol."""

    task: str
    protocol: str
    length: int
    items: int


@dataclass(frozen=True)
class Suite:
    """``parts``, and for files of the user's how many items and under which protocols."""

    name: str
    parts: tuple[Part, ...]
    file_items: int
    file_protocols: tuple[str, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of its tasks, each once, in order."""
        return tuple(dict.fromkeys(part.task for part in self.parts))

    @property
    def longest(self) -> int:
        """Tokens of its longest prompts."""
        return max(part.length for part in self.parts)


def _parts(protocol: str, length: int, **items: int) -> tuple[Part, ...]:
    return tuple(Part(task, protocol, length, count) for task, count in items.items())


CI = Suite(
    "ci",
    (
        *_parts(AWARE, 1024, needle=10, multikey=8, recall=8, vartrack=3, labels=12),
        *_parts(AGNOSTIC, 1024, needle=5, recall=3),
        *_parts(PLAIN, 1024, text=4),
    ),
    file_items=6,
    file_protocols=(AWARE,),
)
NIGHTLY = Suite(
    "nightly",
    (
        *_parts(AWARE, 512, needle=20),
        *_parts(
            AWARE, 1024,
            needle=40, multikey=40, recall=40, vartrack=24, longanswer=12, labels=60,
        ),
        *_parts(AWARE, 2048, needle=20, multikey=20, recall=20),
        *_parts(AGNOSTIC, 1024, needle=24, multikey=16, recall=16, vartrack=8, labels=24),
        *_parts(PLAIN, 1024, text=24),
        *_parts(PLAIN, 2048, text=8),
    ),
    file_items=40,
    file_protocols=(AWARE, AGNOSTIC),
)  # fmt: skip
SUITES = {suite.name: suite for suite in (CI, NIGHTLY)}

FLOORS = {TEXT: 0.8}
"""Share of the full cache's score that an arm should keep: these, and of other tasks ``FLOOR``."""
FLOOR = 0.9
CHANCES = {"labels": 0.25}
"""What a guess scores, where there are so few answers that it counts."""


def chosen(suite: Suite, tasks: Sequence[str], items: int | None, length: int | None) -> Suite:
    """``suite`` with only ``tasks``, at most ``items`` a part, every part at ``length``.

    Parts that become the same task, protocol and length are joined. Raises UserError for a task
    that it does not have.
    """
    for task in tasks:
        if task not in suite.tasks:
            raise UserError(
                f"--tasks: {task!r} is no task of suite {suite.name}: give "
                f"{', '.join(suite.tasks)}, or none"
            )
    counts: dict[tuple[str, str, int], int] = {}
    for part in suite.parts:
        if part.task in tasks:
            key = part.task, part.protocol, length or part.length
            count = part.items if items is None else min(items, part.items)
            counts[key] = max(counts.get(key, 0), count)
    parts = tuple(Part(*key, count) for key, count in counts.items())
    return replace(suite, parts=parts, file_items=items or suite.file_items)

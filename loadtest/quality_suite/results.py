"""``suite.json``: the judge's result, with what was served and the verdicts beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.errors import UserError
from loadtest.quality_suite.floors import Verdict
from loadtest.quality_suite.judging import Result, Settings
from loadtest.quality_suite.suites import Part
from loadtest.result_files import write_json

RESULT_FILE = "suite.json"
SERVED_FILE = "served.jsonl"


class SuiteSettings(Settings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What decides a run's scores: the judge's settings, and a suite's own.

    ``parts`` as they were asked; ``served``: arm -> what it is; ``task_files``: ``FORMAT:NAME`` ->
    sha256; ``cut``: prompts of them that were cut to the length; ``skipped``: rows of them without
    an answer.
    """

    suite: str
    parts: tuple[Part, ...]
    served: dict[str, str]
    task_files: dict[str, str]
    chat_template: bool
    cut: int
    skipped: int


class ServedCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One greedy answer of a server, ``seconds`` after the arm's first question.

    ``accuracy``: share of the answer's tokens that the completion has at the same place (without
    the first where the judge leaves it out); ``exact``: it begins with the whole answer; ``found``:
    share of the accepted answers that it contains (1 if any one suffices and is there).
    """

    arm: str
    task: str
    protocol: str
    length: int
    index: int
    corpus: str
    depth: float | None
    item: str
    tokens: int
    seconds: float
    text: str
    accuracy: float
    exact: bool
    found: float

    @property
    def key(self) -> tuple[str, int, str, str, int]:
        """What no other served case of a run shares."""
        return self.arm, self.length, self.protocol, self.task, self.index


class SuiteResult(Result, frozen=True, kw_only=True):
    """Contents of ``suite.json``.

    ``kept``: served arm -> share of the prompt's tokens kept in global layers at the longest
    prompt, where known.
    """

    settings: SuiteSettings
    served: list[ServedCase]
    kept: dict[str, float]
    floors: dict[str, float]
    verdicts: list[Verdict]


def write_result(result: SuiteResult, folder: Path) -> Path:
    """Write ``folder/suite.json`` by one rename. Raises UserError."""
    return write_json(folder / RESULT_FILE, result)


def read_result(path: Path) -> SuiteResult:
    """A ``suite.json``. Raises UserError if it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SuiteResult)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is no result of a suite: {error}") from error

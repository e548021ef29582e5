"""Quality measured elsewhere, for the report: ``quality.json``, ``suite.json``, ``judge.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from loadtest.errors import UserError


class QualityPoint(msgspec.Struct, frozen=True):
    """One contender: which ``share`` of the cache it keeps, and its ``score`` from 0 to 1.

    Contenders of one ``group`` belong to one curve; ``measure`` says what the score is.
    """

    group: str
    name: str
    share: float
    score: float
    measure: str


def read_quality(path: Path) -> list[QualityPoint]:
    """Points of a result of ``loadtest quality`` or ``calib_cluster judge``, told by its contents.

    Raises UserError if it is neither.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"--quality {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"--quality {path}: not JSON ({error})") from error
    try:
        points = _judge(content) if "cells" in content else _quality(content)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise UserError(
            f"--quality {path} is neither a quality.json or suite.json of `loadtest quality` nor a "
            f"judge.json of `calib_cluster judge`: {type(error).__name__} {error}"
        ) from error
    if not points:
        raise UserError(f"--quality {path} holds no scores to show")
    return points


def _quality(content: dict[str, Any]) -> list[QualityPoint]:
    points = []
    for row in content["rows"]:
        asked = row["needles"]
        if not asked:
            continue
        score = sum(bool(needle["found"]) for needle in asked) / len(asked)
        group = "policy" if row["kind"] in ("full", "point") else str(row["kind"])
        points.append(
            QualityPoint(group, str(row["name"]), float(row["residency"]), score, "needles found")
        )
    return points


def _judge(content: dict[str, Any]) -> list[QualityPoint]:
    """Accuracy over all tasks with an answer; the first length and protocol of the run."""
    cells = [cell for cell in content["cells"] if cell["task"] == "answers"]
    first = [cell for cell in cells if _where(cell) == _where(cells[0])]
    return [
        QualityPoint(
            str(cell["arm"]), _judged(cell), float(cell["kept"]) / float(cell["length"]),
            float(cell["accuracy"]), "answers' accuracy",
        )
        for cell in first
    ]  # fmt: skip


def _where(cell: dict[str, Any]) -> tuple[int, str]:
    return cell["length"], cell["protocol"]


def _judged(cell: dict[str, Any]) -> str:
    return str(cell["arm"]) if cell["budget"] is None else f"{cell['arm']} {cell['budget']}"

"""``python -m loadtest hybrid-recall``: what a policy leaves of the small hybrid's recall.

Held-out questions of its training tasks, asked of a real server with each policy, greedy, as token
ids; of pairs to look up the oldest, half a text away or more. The questions on one text are asked
one after another, so most are answered from a prefix hit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvpolicy.geometry import read_geometry
from loadtest.errors import UserError, naming_flag
from loadtest.freeze_results import command
from loadtest.quality_suite.served import ServedArm, policy_arm
from loadtest.result_files import output_folder, write_json
from loadtest.servers import Server, ServerError

ASKED = ("needle", "recall")
QUESTIONS = 4  # of each text, at most
ARENA = "32MB"


class Question(msgspec.Struct, frozen=True):
    """``ids`` after which the greedy answer must be ``answer``."""

    task: str
    ids: list[int]
    answer: list[int]


class Score(msgspec.Struct, frozen=True):
    """Answers of one task that are right in every token."""

    task: str
    asked: int
    right: int


class Arm(msgspec.Struct, frozen=True):
    """One server: its policy, the cache it keeps at ``length`` tokens, and what it answered."""

    policy: str
    residency: float
    scores: list[Score]
    cached_tokens: int


class Result(msgspec.Struct, frozen=True):
    """What ``hybrid-recall`` writes."""

    command: list[str]
    model: str
    length: int
    seed: int
    arms: list[Arm]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``hybrid-recall``."""
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--policies", nargs="+", required=True, metavar="P", help="names, folders, full; NAME:POINT"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text (default 2048)")
    parser.add_argument("--items", type=int, default=12, help="texts of each task (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Ask every policy, print a table, write ``recall.json``. Raises UserError."""
    geometry = naming_flag("--model", read_geometry, args.model)
    arms = [policy_arm(spec, geometry) for spec in args.policies]
    folder = output_folder(args.out)
    questions = draw(args.model, args.length, args.items, args.seed)
    result = Result(command(), args.model.name, args.length, args.seed, [])
    for arm in arms:
        print(f"{arm.name}: {len(questions)} questions", file=sys.stderr, flush=True)
        try:
            result.arms.append(_ask(args.model, arm, arm.kept(geometry, args.length), questions))
        except ServerError as error:
            raise UserError(f"{arm.name}: {error.summary}") from error
        write_json(folder / "recall.json", result)
    Console().print(table(result))
    return 0


def draw(model: Path, length: int, items: int, seed: int) -> list[Question]:
    """Held-out questions; everything follows from the arguments and the tokenizer."""
    from transformers import AutoTokenizer

    from loadtest.hybrid.tasks import Tasks

    tasks = Tasks(AutoTokenizer.from_pretrained(model), f"recall {seed}")
    questions = []
    for task in ASKED:
        for _ in range(items):
            far = task == "recall"
            sample = tasks.far_recall(length) if far else tasks.sample(task, length)
            for start, end in sample.answers[:QUESTIONS]:
                questions.append(Question(task, sample.ids[:start], sample.ids[start:end]))
    return questions


def _ask(model: Path, arm: ServedArm, kept: float, questions: Sequence[Question]) -> Arm:
    right = {task: [0, 0] for task in ASKED}
    cached = 0
    with Server(model, *arm.flags, "--kv-arena-bytes", ARENA) as server:
        for question in questions:
            answer = server.generate(question.ids, len(question.answer))
            cached += answer.cached_tokens
            right[question.task][0] += 1
            right[question.task][1] += answer.output_ids == question.answer
    scores = [Score(task, *counts) for task, counts in right.items()]
    return Arm(arm.name, kept, scores, cached)


def table(result: Result) -> Table:
    """A row for each policy."""
    shown = Table(title=f"{result.model}, texts of {result.length} tokens", title_justify="left")
    shown.add_column("policy")
    shown.add_column("kept", justify="right")
    for score in result.arms[0].scores:
        shown.add_column(f"{score.task} ({score.asked})", justify="right")
    for arm in result.arms:
        shares = [f"{score.right / score.asked:.2f}" for score in arm.scores]
        shown.add_row(arm.policy, f"{arm.residency:.1%}", *shares)
    return shown

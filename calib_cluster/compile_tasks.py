"""What a compile evaluates: excerpts of texts and their continuations, and questions with answers.

Texts are named as for every calibration; the kinds of ``corpora.asked`` stand beside them.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from calib_cluster.common import load_texts, tokenizer_of
from calib_cluster.corpora import PromptSet, Size, choose_prompts
from calib_cluster.corpora.asked import ASKED, asked_tasks
from calib_cluster.rewards.collect import Task

GENERATED = 256  # documents of a generated corpus: more prompts must not change the first ones


@dataclass(frozen=True)
class TaskSet:
    """Tasks, in turn from every corpus; ``corpora`` maps a label to the sha256 of its content."""

    tasks: tuple[Task, ...]
    corpora: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of every task's token ids and of what counts, in order."""
        digest = hashlib.sha256()
        for task in self.tasks:
            _add(digest, task)
        return digest.hexdigest()


def _add(digest, task: Task) -> None:
    digest.update(f"{len(task.prompt)} {len(task.continuation)} {task.scored} ".encode())
    digest.update(np.array([*task.prompt, *task.continuation], "<i8").tobytes())


def choose_tasks(args: argparse.Namespace, model: Path) -> TaskSet:
    """``args.prompts`` tasks of ``args.length`` tokens, shared out to ``args.corpus``.

    Raises:
        CalibrationError: an unknown corpus, or too little text.
    """
    tokenizer = tokenizer_of(model)
    share = {
        spec: len(range(i, args.prompts, len(args.corpus))) for i, spec in enumerate(args.corpus)
    }
    kinds = [spec for spec in share if spec in ASKED]
    parts: dict[str, list[Task]] = {}
    corpora: dict[str, str] = {}
    for kind in kinds:
        found = asked_tasks(tokenizer, kind, share[kind], args.length, args.seed)
        parts[kind] = [Task(t.prompt, t.continuation, kind, t.scored) for t in found]
        corpora[kind] = _recipe(kind, args)
    if specs := [spec for spec in share if spec not in ASKED]:
        texts = _texts(args, tokenizer, specs, sum(share[spec] for spec in specs))
        corpora |= texts.corpora
        for prompt in texts.prompts:
            cut = prompt.ids[: args.length], prompt.ids[args.length :]
            parts.setdefault(prompt.corpus, []).append(Task(*cut, prompt.corpus))
    in_turn = chain.from_iterable(zip_longest(*parts.values()))
    return TaskSet(tuple(task for task in in_turn if task), dict(sorted(corpora.items())))


def _recipe(kind: str, args: argparse.Namespace) -> str:
    """What ``kind`` is generated from: however many are taken, they are the first of the same."""
    text = f"generated {kind} {args.length} seed {args.seed}"
    return hashlib.sha256(text.encode()).hexdigest()


def _texts(args: argparse.Namespace, tokenizer, specs: list[str], count: int) -> PromptSet:
    """Prompts of exactly T + C tokens."""
    total = args.length + args.continuation
    return choose_prompts(
        load_texts(specs, Size(max(GENERATED, count), total, args.seed), args.field),
        tokenizer,
        prompts=count,
        length=total,
        min_length=total - 1,
        seed=args.seed,
        chat_template=args.chat_template,
        least="--length plus --continuation less one",
    )

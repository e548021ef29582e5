"""Everything a suite asks, as items: built-in tasks and rows of files, in the model's own form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from loadtest.errors import UserError
from loadtest.model_fetch import sha256_file
from loadtest.quality_suite.judging import Chat, Item, bos, built_in_items, corpora_of, encoder
from loadtest.quality_suite.suites import TEXT, Part, Suite
from loadtest.quality_suite.task_files import FileSpec, Rows, Tokens, chosen_tasks, file_item

_LEAD = re.compile(r".*[?.:]\s+", re.DOTALL)
"""A question up to where its last sentence begins, which the answer goes on with."""


@dataclass(frozen=True)
class Asked:
    """An item under one protocol, and the answers that a completion may contain (``all_of`` them
    or any)."""

    item: Item
    protocol: str
    wanted: tuple[str, ...]
    all_of: bool = False

    @property
    def key(self) -> tuple[int, str, str, int]:
        """As ``CaseResult.key``."""
        return self.item.length, self.protocol, self.item.task, self.item.index


@dataclass
class Questions:
    """All that is asked. ``parts`` as in a suite, files included; ``texts``: corpus -> sha256;
    ``files``: ``FORMAT:NAME`` -> sha256; ``cut`` prompts and ``skipped`` rows of them."""

    asked: list[Asked] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    skipped: int = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, in order."""
        return tuple(dict.fromkeys(one.item.task for one in self.asked))


def make_questions(
    suite: Suite,
    text_specs: Sequence[str],
    files: Sequence[FileSpec],
    length: int,
    tokenizer,
    chat: Chat,
    seed: int,
) -> Questions:
    """Built-in tasks of ``suite``, then rows of ``files`` cut to ``length`` tokens.

    Raises UserError: a length too short, too little text, or a file in another format.
    """
    found = Questions()
    corpora = corpora_of(text_specs)
    found.texts = {corpus.label: corpus.digest() for corpus in corpora}
    tokens = Tokens(encoder(tokenizer), tokenizer.decode, chat, length)
    if suite.parts:
        start = bos(tokenizer)
        spare = len(chat.before) - len(start) + len(chat.after)
        for item, protocol in built_in_items(suite, corpora, tokenizer, seed, spare):
            wrapped = item
            if item.task != TEXT and chat.after:
                wrapped = _in_chat(item, tokens, len(start), item.length + spare)
            answer = tokenizer.decode(item.answer).strip()
            found.asked.append(Asked(wrapped, protocol, (answer,)))
        found.parts += suite.parts
    if files:
        hay = "\n\n".join(document.text for document in corpora[0].documents)
        for spec in files:
            _add_file(found, spec, suite, tokens, hay)
    if not found.asked:
        raise UserError("--tasks none and no --task-file leave nothing to ask")
    return found


def _in_chat(item: Item, tokens: Tokens, start: int, length: int) -> Item:
    """``item`` within the model's chat template.

    The user's message is context and question; the question's last sentence, which the answer goes
    on with, begins the model's own turn.
    """
    chat, text = tokens.chat, tokens.decode(item.question)
    split = _LEAD.match(text)
    asked = split[0] if split else text
    lead = text.removeprefix(asked)
    question = (*tokens.encode(asked.rstrip()), *chat.after, *tokens.encode(lead))
    context = (*chat.before, *item.context[start:])
    return replace(item, length=length, context=context, question=question)


def _add_file(found: Questions, spec: FileSpec, suite: Suite, tokens: Tokens, hay: str) -> None:
    rows: Rows = chosen_tasks(spec, suite.file_items)
    found.files[f"{spec.format}:{spec.path.name}"] = _digest(spec.path)
    found.skipped += rows.skipped
    for task in rows.tasks:
        taken = {one.item.index for one in found.asked if one.item.task == task.task}
        made = file_item(task, tokens, len(taken), spec.label, hay)
        if made is None:
            found.skipped += 1
            continue
        item, was_cut = made
        found.cut += was_cut
        for protocol in suite.file_protocols:
            found.asked.append(Asked(item, protocol, task.answers, task.all_of))
    names = {task.task for task in rows.tasks}
    counts = {
        (one.item.task, one.protocol): one.item.index + 1
        for one in found.asked
        if one.item.task in names
    }
    found.parts = [part for part in found.parts if part.task not in names]
    found.parts += [Part(*key, tokens.length, count) for key, count in counts.items()]


def _digest(path: Path) -> str:
    if path.is_dir():
        return ",".join(sha256_file(file) for file in sorted(path.glob("*.txt")))
    return sha256_file(path)

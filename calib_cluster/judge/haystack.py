"""Held-out text for the judge's items: one excerpt an item, none used twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from calib_cluster.corpora.documents import Corpus, Document
from calib_cluster.corpora.mix import choose_prompts
from calib_cluster.corpora.specs import load_corpora

SPARE = 320
"""Tokens of an excerpt past the item's length: continuations and passages come from there."""


@dataclass(frozen=True)
class Hay:
    """An excerpt of ``corpus``: ``ids`` begin with <bos> where the model wants it; ``spare`` is
    the ``SPARE`` ids that follow them."""

    corpus: str
    ids: list[int]
    spare: list[int]


class _Label(msgspec.Struct):
    """What a row of a JSONL file says about where it is from; other fields are ignored."""

    corpus: str | None = None


def load_texts(specs: Sequence[str]) -> tuple[Corpus, ...]:
    """Corpora of recipe names, files and folders (``corpora.load_corpora``).

    Rows of a .jsonl file that name their ``corpus`` are grouped by it, so that each corpus gives
    as many items as any other. Raises CalibrationError.
    """
    found: list[Corpus] = []
    for spec, corpus in zip(specs, load_corpora(specs), strict=True):
        path = Path(spec)
        found += _grouped(path, corpus) if path.suffix == ".jsonl" and corpus.own else [corpus]
    return tuple(found)


def _grouped(path: Path, corpus: Corpus) -> list[Corpus]:
    rows = path.read_bytes().split(b"\n")  # read once already: every row is sound JSON
    groups: dict[str, list[Document]] = {}
    for document in corpus.documents:
        number = int(document.id.rpartition(":")[2])
        try:
            name = msgspec.json.decode(rows[number - 1], type=_Label).corpus
        except msgspec.ValidationError:
            name = None
        groups.setdefault(name or corpus.label, []).append(document)
    return [Corpus(n, tuple(documents), corpus.source, True) for n, documents in groups.items()]


def cut_hay(corpora: Sequence[Corpus], tokenizer, length: int, count: int, seed: int) -> list[Hay]:
    """``count`` excerpts of ``length`` ids and ``SPARE`` more, in turn from every corpus.

    The first k are the same for every ``count``. Raises CalibrationError if there is too little
    text.
    """
    whole = length + SPARE
    chosen = choose_prompts(
        corpora, tokenizer, prompts=max(count, len(corpora)), length=whole, min_length=whole - 1,
        seed=seed, least="what an item lacks something at",
    )  # fmt: skip
    return [
        Hay(prompt.corpus, list(prompt.ids[:length]), list(prompt.ids[length:]))
        for prompt in chosen.prompts[:count]
    ]

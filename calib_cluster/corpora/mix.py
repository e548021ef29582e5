"""Prompts from several corpora: stratified, without duplicates, the same for the same seed."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from calib_cluster.corpora.chat import ChatFormat
from calib_cluster.corpora.documents import Corpus, Document, content_key
from calib_cluster.corpora.excerpts import bos, excerpts, plain_encoder
from calib_cluster.corpora.generated import Size
from calib_cluster.corpora.specs import load_corpora
from calib_cluster.errors import CalibrationError

LEAST = "the smallest window plus sinks"
LIKELY_CHARACTERS = 4  # a token of ordinary text; only the order of documents depends on it


class Prompt(msgspec.Struct, frozen=True):
    """One prompt: token ids with <bos> where the model wants it; ``source`` is the document."""

    corpus: str
    ids: tuple[int, ...]
    source: str


class PromptSet(msgspec.Struct, frozen=True):
    """Prompts and what they were taken from.

    ``corpora``: label -> hex SHA-256 of all the corpus' texts and the chat-template flag.
    ``sources``: label -> where the texts came from, such as package and version.
    """

    prompts: tuple[Prompt, ...]
    corpora: dict[str, str]
    sources: dict[str, str] = {}

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of every prompt's token ids, in order."""
        sha = hashlib.sha256()
        for prompt in self.prompts:
            sha.update(len(prompt.ids).to_bytes(8, "little"))
            sha.update(np.asarray(prompt.ids, "<i8").tobytes())
        return sha.hexdigest()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.ids) for prompt in self.prompts)


def load_prompts(
    specs: Sequence[str], tokenizer, *, prompts: int, length: int, min_length: int, seed: int,
    chat_template: bool = False, field: str | None = None,
) -> PromptSet:  # fmt: skip
    """``prompts`` different prompts of ``length`` tokens, <bos> counted, in turn from each corpus.

    Args:
        specs: recipe names or the user's files and folders (see ``specs.load_corpora``).
        tokenizer: of the model, from transformers.
        min_length: a document shorter than ``length`` is used whole if it has more tokens than
            this, else not at all. Documents that are probably long enough come first.
        seed: chooses documents and excerpts; the result depends on nothing but the arguments
            and the texts.
        chat_template: conversations go through the model's chat template, and plain text of
            the user's files becomes a user message; the texts of recipes stay as they are.
        field: the field of the user's rows to read.

    A corpus that has too few prompts for its share gives all it has and the others make up for
    it. The first k prompts are balanced too. Raises CalibrationError if a corpus gives none, or
    all together too few. Side effects: recipes may fetch packages.
    """
    _check(len(specs), prompts, length, min_length)  # before anything is fetched
    corpora = load_corpora(specs, Size(documents=prompts, tokens=length, seed=seed), field)
    return choose_prompts(
        corpora, tokenizer, prompts=prompts, length=length, min_length=min_length, seed=seed,
        chat_template=chat_template,
    )  # fmt: skip


def choose_prompts(
    corpora: Sequence[Corpus], tokenizer, *, prompts: int, length: int, min_length: int,
    seed: int, chat_template: bool = False, least: str = LEAST,
) -> PromptSet:  # fmt: skip
    """``load_prompts`` of corpora that are loaded already; ``least`` says what ``min_length`` is,
    for the message about texts that are too short."""
    _check(len(corpora), prompts, length, min_length)
    maker = _Maker(tokenizer, length, min_length, seed, chat_template, least)
    chosen = _in_turn(_Unique(corpora).streams(maker), prompts)
    if len(chosen) < prompts:
        raise CalibrationError(
            f"the corpora give {len(chosen)} different prompts, fewer than the {prompts} asked "
            "for; give more text, ask for fewer prompts or shorter ones"
        )
    return PromptSet(
        tuple(chosen),
        {corpus.label: corpus.digest(chat_template) for corpus in corpora},
        {corpus.label: corpus.source for corpus in corpora},
    )


def _check(corpora: int, prompts: int, length: int, min_length: int) -> None:
    if not corpora:
        raise CalibrationError("no corpus given")
    if prompts < corpora:
        raise CalibrationError(
            f"{prompts} prompts are too few for {corpora} corpora: each gives at least one"
        )
    if length <= min_length:
        raise CalibrationError(
            f"prompts of {length} tokens are too short: they must be longer than {min_length}, "
            f"{LEAST}"
        )


class _Maker:
    """Turns a document into its prompts."""

    def __init__(
        self, tokenizer, length: int, min_length: int, seed: int, chat_template: bool, least: str
    ) -> None:
        self.length, self.min_length, self.seed, self.least = length, min_length, seed, least
        self._encode = plain_encoder(tokenizer)
        self._bos = tuple(bos(tokenizer))
        self._chat = ChatFormat(tokenizer) if chat_template else None

    def prompts(self, corpus: Corpus, document: Document) -> Iterator[Prompt]:
        """Every prompt that the document gives, shorter than wanted ones included."""
        text, before, after, from_start = document.text, self._bos, (), document.from_start
        if self._chat and document.messages:
            text, before, from_start = self._chat.render(document.messages, document.id), (), True
        elif self._chat and corpus.own:
            before, after = (tuple(self._encode(t)) for t in self._chat.around(document.id))
        room = self.length - len(before) - len(after)
        if room <= 0:
            raise CalibrationError(
                f"prompts of {self.length} tokens are filled by the model's chat template alone"
            )
        rng = random.Random(f"{self.seed} {document.id}")
        for ids in excerpts(self._encode, text, room, rng, from_start):
            yield Prompt(corpus.label, before + tuple(ids) + after, document.id)


class _Unique:
    """Each document and each prompt once, whatever corpus it is in."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        owner: dict[bytes, str] = {}  # content -> the first corpus that has it
        self._documents: list[tuple[Corpus, list[Document]]] = []
        for corpus in corpora:
            kept = []
            for document in corpus.documents:
                key = content_key(document.text)
                if key not in owner:
                    owner[key] = corpus.label
                    kept.append(document)
            if corpus.documents and not kept:
                raise CalibrationError(
                    f"corpus {corpus.label!r}: other corpora contain all its documents already"
                )
            self._documents.append((corpus, kept))
        self._seen: set[tuple[int, ...]] = set()

    def streams(self, maker: _Maker) -> list[Iterator[Prompt]]:
        """A lazy stream of all the prompts of each corpus."""
        return [self._stream(maker, corpus, kept) for corpus, kept in self._documents]

    def _stream(
        self, maker: _Maker, corpus: Corpus, documents: Sequence[Document]
    ) -> Iterator[Prompt]:
        """One prompt of each document, then another of each: documents are equally frequent."""
        order = _ordered(corpus.label, documents, maker)
        waiting = deque(maker.prompts(corpus, document) for document in order)
        given = 0
        while waiting:
            source = waiting.popleft()
            prompt = next(source, None)
            if prompt is None:
                continue
            waiting.append(source)
            if len(prompt.ids) > maker.min_length and prompt.ids not in self._seen:
                self._seen.add(prompt.ids)
                given += 1
                yield prompt
        if not given:
            raise CalibrationError(
                f"corpus {corpus.label!r}: all {len(documents)} documents are shorter than "
                f"{maker.min_length + 1} tokens, one more than {maker.least}; "
                "give longer texts"
            )


def _ordered(label: str, documents: Sequence[Document], maker: _Maker) -> list[Document]:
    """Shuffled; those that probably fill a prompt first, because long windows need them."""
    shuffled = list(documents)
    random.Random(f"{maker.seed} {label}").shuffle(shuffled)
    return sorted(shuffled, key=lambda d: len(d.text) < LIKELY_CHARACTERS * maker.length)


def _in_turn(streams: Sequence[Iterator[Prompt]], count: int) -> list[Prompt]:
    """Up to ``count`` prompts, one from each stream in turn until it ends."""
    chosen: list[Prompt] = []
    active = deque(streams)
    while active and len(chosen) < count:
        stream = active.popleft()
        prompt = next(stream, None)
        if prompt is not None:
            chosen.append(prompt)
            active.append(stream)
    return chosen

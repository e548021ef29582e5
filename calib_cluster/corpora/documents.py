"""Documents and corpora: the texts that calibration and evaluation read, and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from calib_cluster.errors import CalibrationError

HALVES = ("a", "b")


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Document(msgspec.Struct, frozen=True):
    """One text. ``messages`` is empty unless the text is a conversation.

    ``from_start``: only a prompt that begins where the document begins makes sense, so the
    document gives at most one (a conversation, a generated list of facts to recall).
    """

    id: str
    text: str
    messages: tuple[Message, ...] = ()
    from_start: bool = False


class Corpus(msgspec.Struct, frozen=True):
    """Named documents in a fixed order.

    ``source`` says where they came from (package and version, or file); the content hash, not
    the source, identifies them. ``own``: the user's own file, which a chat template may wrap.
    """

    label: str
    documents: tuple[Document, ...]
    source: str
    own: bool = False

    def digest(self, chat_template: bool = False) -> str:
        """Hex SHA-256 of every document's text, in order, and of the chat-template flag."""
        sha = hashlib.sha256(b"chat" if chat_template else b"plain")
        for document in self.documents:
            data = document.text.encode()
            sha.update(len(data).to_bytes(8, "little"))  # so that borders count too
            sha.update(data)
        return sha.hexdigest()

    @property
    def characters(self) -> int:
        return sum(len(document.text) for document in self.documents)

    def half(self, name: str) -> Corpus:
        """Half ``a`` or ``b``: disjoint documents, about the same number of characters in each.

        A corpus of one document is cut in two at the line border nearest to its middle.
        """
        if len(self.documents) == 1:
            document = self.documents[0]
            if document.messages:
                raise CalibrationError(
                    f"corpus {self.label!r} is one conversation and cannot be halved"
                )
            kept: tuple[Document, ...] = (_half_text(document, name),)
        else:
            kept = _half_documents(self.documents, name)
        return msgspec.structs.replace(self, label=f"{self.label}/{name}", documents=kept)


def _half_documents(documents: Sequence[Document], name: str) -> tuple[Document, ...]:
    """Each document in turn goes to the half that has fewer characters so far."""
    kept: dict[str, list[Document]] = {half: [] for half in HALVES}
    sizes = dict.fromkeys(HALVES, 0)
    for document in documents:
        lighter = min(HALVES, key=sizes.__getitem__)
        kept[lighter].append(document)
        sizes[lighter] += len(document.text)
    return tuple(kept[name])


def _half_text(document: Document, name: str) -> Document:
    middle = len(document.text) // 2
    border = document.text.rfind("\n", 0, middle) + 1 or middle
    part = document.text[:border] if name == HALVES[0] else document.text[border:]
    return Document(id=f"{document.id}/{name}", text=part, from_start=document.from_start)


def conversation_text(messages: Iterable[Message]) -> str:
    """A conversation as plain text, for models without a chat template."""
    return "\n\n".join(f"{m.role.capitalize()}: {m.content}" for m in messages)


def joined(label: str, pages: Iterable[tuple[str, str]], characters: int) -> tuple[Document, ...]:
    """Consecutive short (id, text) pages as documents of at least ``characters`` each.

    Only the last one may be shorter. A document's id is that of its first page.
    """
    documents: list[Document] = []
    start, parts, size = "", [], 0
    for page, text in pages:
        start = start or page
        parts.append(text.strip())
        size += len(text)
        if size >= characters:
            documents.append(Document(f"{label}:{start}", "\n\n".join(parts)))
            start, parts, size = "", [], 0
    if parts:
        documents.append(Document(f"{label}:{start}", "\n\n".join(parts)))
    return tuple(documents)


def content_key(text: str) -> bytes:
    """Hash of a text in which case and white space do not count: equal for copies."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).digest()

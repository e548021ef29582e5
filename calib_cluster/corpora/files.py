"""The user's own texts: JSON lines, Parquet, text, Markdown and code files, or folders of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from calib_cluster.corpora.documents import Corpus, Document, Message, conversation_text
from calib_cluster.errors import CalibrationError

FIELDS = ("messages", "text", "prompt")
CODE_SUFFIXES = (
    ".bash .c .cc .cfg .cpp .cs .css .cu .cuh .el .go .h .hpp .html .ini .java .jl .js .kt .lua "
    ".m .mjs .php .pl .proto .py .pyi .r .rb .rs .scala .sh .sql .swift .tex .toml .ts .tsx .xml "
    ".yaml .yml .zig"
)
TEXT_SUFFIXES = frozenset(CODE_SUFFIXES.split()) | {".md", ".rst", ".txt"}
ROWS_ACCEPTED = (
    "a row is an object with 'messages' (a list of {role, content}), 'text' or 'prompt'; "
    "--field names another"
)
ACCEPTED = ".jsonl, .parquet, .txt, .md and code files, and folders of these"


def read_path(path: Path, label: str, field: str | None = None) -> Corpus:
    """The corpus in a file or folder, read whole into memory.

    A text file is one document, a row of .jsonl or .parquet is one; folders are read in the
    order of their files' names, hidden files left out. Raises CalibrationError with the file
    and line of the first thing wrong; an empty corpus is an error too.
    """
    files = list(_files_in(path)) if path.is_dir() else [path]
    if not files:
        raise CalibrationError(f"corpus {label!r}: nothing to read in it; accepted are {ACCEPTED}")
    documents: list[Document] = []
    for file in files:
        name = file.relative_to(path.parent).as_posix()
        documents += (d for d in _read(file, name, field) if d.text.strip())
    if not documents:
        raise CalibrationError(f"corpus {label!r} is empty: no document with any text in it")
    return Corpus(label, tuple(documents), source=label, own=True)


def _files_in(folder: Path) -> Iterator[Path]:
    """Readable kinds of files under ``folder``, sorted; links to folders are not followed."""
    for current, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and _reader(Path(name)):
                yield Path(current) / name


def _reader(file: Path) -> Callable[[Path, str, str | None], Iterator[Document]] | None:
    suffix = file.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return _read_text
    return {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(suffix)


def _read(file: Path, name: str, field: str | None) -> list[Document]:
    reader = _reader(file)
    if reader is None:
        raise CalibrationError(f"{name}: cannot read this kind of file; accepted are {ACCEPTED}")
    try:
        return list(reader(file, name, field))
    except OSError as error:
        raise CalibrationError(f"cannot read {name}: {error.strerror or error}") from error


def _read_text(file: Path, name: str, field: str | None) -> Iterator[Document]:
    yield Document(name, _utf8(file.read_bytes(), name))


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")  # some editors begin files with a mark
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{where} is not UTF-8 text (byte {error.start})") from error


def _read_jsonl(file: Path, name: str, field: str | None) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{name} line {number}"
            try:
                row = msgspec.json.decode(_utf8(line, where))
            except msgspec.DecodeError as error:
                raise CalibrationError(f"{where} is not JSON ({error}); {ROWS_ACCEPTED}") from error
            yield _document(row, f"{name}:{number}", where, field)


def _read_parquet(file: Path, name: str, field: str | None) -> Iterator[Document]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [c for c in table.schema_arrow.names if c in ((field,) if field else FIELDS)]
        if not columns:
            has = ", ".join(table.schema_arrow.names) or "none"
            wanted = repr(field) if field else "'messages', 'text' or 'prompt'"
            raise CalibrationError(f"{name} has no column {wanted} (its columns: {has})")
        number = 0
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _document(row, f"{name}:{number}", f"{name} row {number}", field)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise CalibrationError(f"{name} is not a readable Parquet file ({error})") from error


def _document(row: Any, ident: str, where: str, field: str | None) -> Document:
    """The document of one row: its first usable field. Raises CalibrationError naming the row."""
    if not isinstance(row, dict):
        raise CalibrationError(f"{where} is not an object; {ROWS_ACCEPTED}")
    names = (field,) if field else FIELDS
    present = [name for name in names if row.get(name) is not None]
    if not present:
        missing = f"no field {field!r}" if field else "none of the accepted fields"
        raise CalibrationError(f"{where} has {missing}; {ROWS_ACCEPTED}")
    value = row[present[0]]
    if isinstance(value, str):
        return Document(ident, value)
    messages = _messages(value, f"{where}: field {present[0]!r}")
    return Document(ident, conversation_text(messages), messages, from_start=True)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    try:
        messages = msgspec.convert(value, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise CalibrationError(
            f"{where} is neither text nor a list of {{role, content}} texts ({error})"
        ) from error
    if not messages:
        raise CalibrationError(f"{where} is a conversation without messages")
    return messages

"""``quality.json``: every raw result, so that anybody can compute the intervals again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np

from kvpolicy.bootstrap import Interval
from loadtest.errors import UserError
from loadtest.model_fetch import sha256_file
from loadtest.result_files import write_json

RESULT_FILE = "quality.json"
SCHEMA_VERSION = 1
LIBRARIES = ("raggedkv", "sglang", "torch", "transformers", "numpy")


class TextScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean negative log-likelihood of one excerpt's tokens, in nats.

    ``nll`` over all but the first token, ``late`` over those at positions from half the context on.
    """

    corpus: str
    nll: float
    late: float


class NeedleScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One greedy answer; ``found`` says whether ``code`` is in it."""

    corpus: str
    depth: float
    code: str
    answer: str
    output_ids: list[int]
    found: bool


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one contender was and did.

    ``fingerprint`` covers all that its scores depend on. ``windows`` and ``sinks`` are the served
    policy; ``residency`` is its exact share of the global units' tokens at the context,
    ``page_residency`` the same in whole pages held; ``peak_pages`` were pinned at most. Seconds
    are wall-clock. ``cached_tokens`` of all prompts came from the prefix cache.
    """

    name: str
    kind: str
    beside: str | None
    fingerprint: str
    residency: float
    page_residency: float
    sinks: int
    windows: list[list[int]]
    flags: list[str]
    start_seconds: float
    text_seconds: float
    needle_seconds: float
    peak_pages: int
    cached_tokens: int
    texts: list[TextScore]
    needles: list[NeedleScore]


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name`` minus ``beside`` in one ``measure`` (nll, late, retrieval), paired by prompt.

    ``corpus`` is ``all`` or one of the corpora.
    """

    name: str
    beside: str
    measure: str
    corpus: str
    interval: Interval


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``quality.json``. ``complete`` once every contender is in ``rows``."""

    schema_version: int
    command: list[str]
    versions: dict[str, str]
    model: str
    model_fingerprint: str
    policy_id: str
    context: int
    answer_tokens: int
    chunk: int
    seed: int
    bootstrap: int
    text_files: dict[str, str]
    prompts_fingerprint: str
    complete: bool
    rows: list[Row]
    comparisons: list[Comparison]

    def row(self, name: str) -> Row:
        """The row of contender ``name``. Raises KeyError."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)


def versions() -> dict[str, str]:
    """Versions of the libraries that the scores depend on."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "source checkout"
    return found


def model_fingerprint(folder: Path) -> str:
    """sha256 (hex) over a model folder's config, tokenizer and weights. Reads every byte."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".model"))
    digests = [[p.name, sha256_file(p)] for p in files if p.name != "SOURCE.json"]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def row_fingerprint(settings: Sequence[object], windows: np.ndarray, sinks: int) -> str:
    """sha256 (hex) of what a contender's scores depend on; ``settings`` are JSON values."""
    matrix = hashlib.sha256(np.ascontiguousarray(windows, dtype="<i4").tobytes()).hexdigest()
    record = [SCHEMA_VERSION, *settings, matrix, list(windows.shape), sinks]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def write_result(result: Result, folder: Path) -> Path:
    """Write ``folder/quality.json`` by one rename. Raises UserError if it cannot be written."""
    return write_json(folder / RESULT_FILE, result)


def read_rows(folder: Path) -> dict[str, Row]:
    """Rows of an earlier run by fingerprint; none if there was no run. Raises UserError."""
    path = folder / RESULT_FILE
    if not path.exists():
        return {}
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"--resume: {path} is not readable ({error}); move it away") from error
    return {row.fingerprint: row for row in result.rows}

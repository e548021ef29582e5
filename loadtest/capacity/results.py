"""What ``max-batch`` and ``max-context`` measure: contents of their JSON files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.errors import UserError
from loadtest.freeze_results import Machine
from loadtest.result_files import write_json

BATCH_FILE, CONTEXT_FILE, REPORT_FILE = "max-batch.json", "max-context.json", "report.html"
SCHEMA_VERSION = 1


class Server(msgspec.Struct, frozen=True):
    """What a side was. ``flags`` of ``sglang.launch_server``; ``start_seconds`` until it answered.

    ``url`` is None for a server that was started here.
    """

    role: str
    name: str
    what: str
    policy_id: str | None
    point: str | None
    budget_tokens: int | None
    flags: list[str]
    url: str | None
    start_seconds: float | None


class Needles(msgspec.Struct, frozen=True):
    """Needle questions at ``context`` tokens: ``found`` of ``asked``, each one's depth and answer.

    The same prompts for every side.
    """

    context: int
    asked: int
    found: int
    depths: list[float]
    answers: list[str]
    hits: list[bool]


class Probe(msgspec.Struct, frozen=True):
    """``sent`` requests at once: ``together`` of them decoded at the same time.

    ``withdrawn`` still waited once others decoded. ``retractions`` None: the server does not tell.
    """

    sent: int
    together: int
    withdrawn: int
    retractions: int | None
    seconds: float


class Timed(msgspec.Struct, frozen=True):
    """One run of SGLang's own client: ``batch`` cold prompts at once.

    Tokens per second and ``seconds`` over the whole run; ``ttft`` to the first token and ``tpot``
    between tokens are of single requests, in milliseconds. KV bytes are of K and V that running
    requests hold, at most; ``memory_bytes`` the servers' processes take (PSS), at most. None where
    a server that was not started here does not tell.
    """

    batch: int
    peak_running: int
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_median_ms: float
    ttft_p99_ms: float
    tpot_median_ms: float
    tpot_p99_ms: float
    cached_tokens: int
    retractions: int | None
    kv_bytes: int
    memory_bytes: int | None
    cpu_seconds: float | None
    cpu_ms_per_output_token: float | None
    load: float


class BatchSide(msgspec.Struct, frozen=True):
    """One server under load.

    ``predicted`` requests run together by ``kvpolicy``'s formulas; ``largest`` did, without a
    retraction. ``request_bytes`` is the most one of them holds while it decodes, ``predicted`` too.
    ``runs`` ascend by batch: one request, the equal batch, the side's largest.
    """

    server: Server
    predicted: int
    largest: int
    request_bytes: int
    probes: list[Probe]
    runs: list[Timed]
    kv_bytes: int
    needles: Needles | None

    def run(self, batch: int) -> Timed | None:
        """The timed run of that batch, if there was one."""
        return next((run for run in self.runs if run.batch == batch), None)

    @property
    def at_largest(self) -> Timed:
        """The timed run of the largest batch."""
        return self.runs[-1]


class BatchResult(msgspec.Struct, frozen=True):
    """Contents of ``max-batch.json``. ``equal`` requests are what the first side holds at once.

    ``finished`` is False while sides are missing: it was interrupted, or a server died.
    """

    schema: int
    command: list[str]
    finished: bool
    seed: int
    model: str
    kv_bytes: int
    context: int
    output: int
    equal: int
    sides: list[BatchSide]
    machine: Machine


class Attempt(msgspec.Struct, frozen=True):
    """One prompt of ``length`` tokens sent alone.

    ``outcome`` is ``answered`` (all output tokens came), ``short``, ``refused``, or ``waiting`` (it
    was never admitted); ``said`` what the server said. ``prefill_seconds`` to the first token.
    """

    length: int
    outcome: str
    said: str
    prefill_seconds: float | None
    kv_bytes: int | None
    memory_bytes: int | None
    found: bool | None


class Depths(msgspec.Struct, frozen=True):
    """Needles asked at one ``length``: whether each was found, in the order of the depths."""

    length: int
    hits: list[bool]

    @property
    def answered(self) -> bool:
        """True if more were found than not."""
        return 2 * sum(self.hits) > len(self.hits)


class Point(msgspec.Struct, frozen=True):
    """Predicted bytes of K and V of one request whose prompt has ``length`` tokens, at most."""

    length: int
    kv_bytes: int


class ContextSide(msgspec.Struct, frozen=True):
    """One server and single prompts.

    ``longest`` prompt that completed, ``predicted`` by ``kvpolicy``'s formulas; ``answered`` is the
    longest whose needles were found in the majority of the depths, 0 if none. ``kv_bytes``,
    ``memory_bytes`` and ``prefill_seconds`` are of the longest one.
    """

    server: Server
    predicted: int
    longest: int
    answered: int
    kv_bytes: int | None
    predicted_kv_bytes: int
    memory_bytes: int | None
    prefill_seconds: float | None
    curve: list[Point]
    attempts: list[Attempt]
    depths: list[Depths]
    needles: Needles | None


class ContextResult(msgspec.Struct, frozen=True):
    """Contents of ``max-context.json``. ``up_to`` and ``step`` bound and grade the search."""

    schema: int
    command: list[str]
    finished: bool
    seed: int
    model: str
    model_max_context: int
    kv_bytes: int
    context: int
    output: int
    up_to: int
    step: int
    depths: list[float]
    sides: list[ContextSide]
    machine: Machine


def save(result: BatchResult | ContextResult, folder: Path) -> Path:
    """Write the result's file by one rename. Raises UserError if it cannot be written."""
    name = BATCH_FILE if isinstance(result, BatchResult) else CONTEXT_FILE
    return write_json(folder / name, result)


def load_beside(folder: Path, kind: type) -> BatchResult | ContextResult | None:
    """The result of the other command in the same folder; None if there is none of this schema."""
    path = folder / (BATCH_FILE if kind is BatchResult else CONTEXT_FILE)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"--out: {path} is not readable ({error}); move it away") from error

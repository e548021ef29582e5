"""A set of reward records on disk: a Parquet shard for each prompt and part of its draws.

The folder is a run's (``run_state``): beside the shards lie the run's fingerprint and, once every
record is there, ``records.json``, which says all that a fit needs to know. So the same records can
be fitted again, and grow by further prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from calib_cluster.compile import CompileSettings
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import Fingerprint, RecordFingerprint
from calib_cluster.rewards.bandit import drawn
from calib_cluster.rewards.collect import Task
from calib_cluster.rewards.records import (
    COLUMNS,
    RecordHeader,
    RewardRecords,
    read_shard,
    write_shard,
)
from calib_cluster.rewards.risk import RiskGrid
from calib_cluster.run_state import RESULT_FILE, RunFolder, RunResult
from kvpolicy.geometry import ModelGeometry

INDEX_FILE = "records.json"
WEIGHTS_FILE = "query-weights.json"
SUFFIX = ".parquet"


class CompileFingerprint(Fingerprint, frozen=True, forbid_unknown_fields=True):
    """Identity of a compile: its records, and how they are fitted."""

    records: RecordFingerprint
    fit: CompileSettings


class CompileResult(RunResult, frozen=True, forbid_unknown_fields=True):
    """A finished compile; ``code_version`` is that of the fit."""

    code_version: str


class RecordIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``records.json``: the model's folder name and geometry, what the records are, the shards in
    use, and the sha256 of all their values."""

    model: str
    geometry: ModelGeometry
    fingerprint: RecordFingerprint
    shards: tuple[str, ...]
    sha256: str


class QueryWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``query-weights.json``: [U][G], exact in float32."""

    weights: tuple[tuple[float, ...], ...]


class Draw(msgspec.Struct, frozen=True, order=True):
    """A part of a prompt's draws; ``prompt`` is a ``Task.name``."""

    prompt: str
    part: int

    @property
    def file(self) -> str:
        """Name of its shard."""
        return f"{self.prompt}-{self.part}{SUFFIX}"


class Shard(msgspec.Struct, frozen=True):
    """What the driver remembers of a shard: ``evaluations``, ``distinct`` kept sets among them,
    bandit ``records``, the prompt's risks, and the sha256 of its values."""

    evaluations: int
    distinct: int
    records: int
    entropy: float
    perplexity: float
    sha256: str

    @classmethod
    def of(cls, records: RewardRecords) -> Shard:
        """Summary of one shard's records."""
        budgets = np.unique(records["budget"])
        sets = [np.unique(records["kept_set"][records["budget"] == b]) for b in budgets]
        return cls(
            evaluations=len(records),
            distinct=sum(map(len, sets)),
            records=int(drawn(records).sum()),
            entropy=float(records["entropy"][0]),
            perplexity=float(records["perplexity"][0]),
            sha256=_digest(records),
        )


class RecordState(RunFolder):
    """A compile's folder: the shards of its records beside what every run has."""

    fingerprint_type = CompileFingerprint
    result_type = CompileResult

    def grow(self, fingerprint: CompileFingerprint) -> None:
        """Go on as another run with the shards that are there: an interruption loses none."""
        with self._writing():
            for name in (RESULT_FILE, INDEX_FILE):
                (self.folder / name).unlink(missing_ok=True)
        self.restate(fingerprint)

    def query_weights(self) -> tuple[tuple[float, ...], ...]:
        """Measured query weights of a rule that mixes; empty if they are not there."""
        found = self._read(WEIGHTS_FILE, QueryWeights)
        return found.weights if found else ()

    def save_query_weights(self, weights: tuple[tuple[float, ...], ...]) -> None:
        """Make measured query weights durable."""
        self._write(WEIGHTS_FILE, QueryWeights(weights))

    def save(self, draw: Draw, records: RewardRecords) -> None:
        """Make one part of a prompt's draws durable."""
        write_shard(self.folder / draw.file, records)

    def load(self, draw: Draw) -> RewardRecords | None:
        """Records of a shard, verified; None if it is not there. Raises CalibrationError."""
        path = self.folder / draw.file
        if not path.exists():
            return None
        return _one_prompt(path, draw.prompt)

    def save_index(self, index: RecordIndex) -> None:
        """Say that the records are complete."""
        self._write(INDEX_FILE, index)

    def index(self) -> RecordIndex:
        """What the records are. Raises CalibrationError if they are not complete."""
        index = self._read(INDEX_FILE, RecordIndex)
        if index is None:
            what = "its compile has not evaluated every prompt: --resume it"
            if self.fingerprint() is None:
                what = "give the folder that compile keeps under OUT/.calibration"
            raise CalibrationError(f"{self.folder}: no complete reward records ({what})")
        return index

    def parts(self, index: RecordIndex) -> list[RewardRecords]:
        """All records of a complete set, shard by shard, verified. Raises CalibrationError."""
        parts = [self._listed(name) for name in index.shards]
        if digest_of(Shard.of(part).sha256 for part in parts) != index.sha256:
            raise CalibrationError(
                f"{self.folder}: the shards are not those that {INDEX_FILE} was written for; "
                "--resume the compile"
            )
        return parts

    def _listed(self, name: str) -> RewardRecords:
        path = self.folder / name
        if Path(name).name != name or not path.exists():
            raise CalibrationError(f"{path} is not there; --resume computes it again")
        return _one_prompt(path, name.partition("-")[0])


def _one_prompt(path: Path, prompt: str) -> RewardRecords:
    again = "delete it, and --resume computes it again"
    try:
        records = read_shard(path)
    except CalibrationError as error:
        raise CalibrationError(f"{error}; {again}") from error
    if not len(records) or set(records["prompt"]) != {prompt}:
        raise CalibrationError(f"{path} holds other prompts than {prompt}; {again}")
    return records


def _digest(records: RewardRecords) -> str:
    """sha256 over header and values, whatever the file format makes of them."""
    digest = hashlib.sha256(msgspec.json.encode(records.header, order="sorted"))
    for name in COLUMNS:
        values = records[name]
        text = values.dtype == object
        digest.update("\n".join(values).encode() if text else values.tobytes())
    return digest.hexdigest()


def digest_of(shards: Iterable[str]) -> str:
    """sha256 of a set of shards by theirs, in any order."""
    return hashlib.sha256("".join(sorted(shards)).encode()).hexdigest()


class Collection:
    """Which records a compile wants, which of them are there, and which are missing.

    First every prompt gets part 0 of its draws. With ``draws_per_cell``, prompts of risk cells with
    fewer evaluations a budget than that then get further parts; which ones follows from the risks
    alone, so the records do not depend on who computed what when.

    Args:
        state: where the shards are.
        tasks: the prompts.
        draws: evaluations a prompt, budget and part.
        draws_per_cell: wanted in every cell that has a prompt; 0: as they come.
        bins: entropy and perplexity bins of the cells.
    """

    def __init__(
        self,
        state: RecordState,
        tasks: Sequence[Task],
        draws: int,
        draws_per_cell: int,
        bins: tuple[int, int],
    ) -> None:
        self._state, self._draws, self._per_cell, self._bins = state, draws, draws_per_cell, bins
        self.tasks = {task.name: task for task in tasks}
        self._shards: dict[Draw, Shard] = {}

    def find(self, check: Callable[[RewardRecords], None]) -> int:
        """Take over the shards that are there; returns how many.

        Raises:
            CalibrationError: one is damaged, or ``check`` refuses it; the message names it.
        """
        while sum([self._take(draw, check) for draw in self.missing()]):
            pass  # more may be wanted now that more is known
        return len(self._shards)

    def _take(self, draw: Draw, check: Callable[[RewardRecords], None]) -> bool:
        records = self._state.load(draw)
        if records is None:
            return False
        try:
            check(records)
        except CalibrationError as error:
            raise CalibrationError(f"{self._state.folder / draw.file}: {error}") from error
        self._shards[draw] = Shard.of(records)
        return True

    def missing(self) -> list[Draw]:
        """What is to be evaluated next; empty once everything is there."""
        first = [Draw(name, 0) for name in self.tasks]
        if lacking := [draw for draw in first if draw not in self._shards]:
            return lacking
        return [draw for draw in self._more() if draw not in self._shards]

    def add(self, draw: Draw, records: RewardRecords) -> Shard:
        """Save what was evaluated."""
        # a default that came from another process is equal but not the same object, and msgspec
        # leaves out only the same: the header must not be written in two ways
        header = msgspec.json.decode(msgspec.json.encode(records.header), type=RecordHeader)
        records = RewardRecords(header, records.columns)
        self._state.save(draw, records)
        self._shards[draw] = shard = Shard.of(records)
        return shard

    def _more(self) -> list[Draw]:
        """Further parts, in the order of the prompts."""
        if not self._per_cell:
            return []
        cells, counts = self.cells()
        parts = -(-self._per_cell // (counts[cells] * self._draws))
        names = zip(self.tasks, parts.tolist(), strict=True)
        return [Draw(name, part) for name, count in names for part in range(1, count)]

    def cells(self) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """(entropy and perplexity bin of every prompt, prompts of every cell int64 [E, P])."""
        shards = [self._shards[Draw(name, 0)] for name in self.tasks]
        entropies = np.array([shard.entropy for shard in shards], np.float32)
        perplexities = np.array([shard.perplexity for shard in shards], np.float32)
        grid = RiskGrid.quantiles(entropies, perplexities, self._bins)
        bins = grid.bins(entropies, perplexities)
        counts = np.zeros(grid.shape, np.int64)
        np.add.at(counts, bins, 1)
        return bins, counts

    @property
    def used(self) -> dict[Draw, Shard]:
        """The shards that make up the complete set, by prompt and part."""
        wanted = [*(Draw(name, 0) for name in self.tasks), *self._more()]
        return {draw: self._shards[draw] for draw in sorted(wanted)}

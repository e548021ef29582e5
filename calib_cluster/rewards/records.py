"""Reward records: one row an evaluation, with every action it took; Parquet shards of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ALL, ActionGrid
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.errors import KvPolicyError
from kvpolicy.retention import RetentionRule

FORMAT = 2
HEADER = b"raggedkv.rewards"


class RecordHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every row of a record set has in common; stored as JSON in each shard.

    Fields: ``model_config`` (sha256 of the configuration); ``rule`` and ``grid``; ``behaviour``;
    ``layers``, ``heads`` of the U units (rows of the tables) in the order of the columns; the
    edges behind the stored bins; ``query_weights`` of a rule that mixes, [U, G]; ``format`` of
    this module.
    """

    model_config: str
    rule: RetentionRule
    grid: ActionGrid
    behaviour: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    entropy_edges: tuple[float, ...] = ()
    perplexity_edges: tuple[float, ...] = ()
    query_weights: tuple[tuple[float, ...], ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise CalibrationError(f"reward records of format {self.format}, accepted is {FORMAT}")
        if not self.layers or len(self.layers) != len(self.heads):
            raise CalibrationError("reward records need a layer and a head for every unit")
        if len(self.query_weights) != (len(self.layers) if self.rule.mixes else 0):
            raise CalibrationError("reward records of a mix need every unit's query weights")

    @property
    def units(self) -> int:
        """U, units that freeze."""
        return len(self.layers)

    @property
    def freezing_layers(self) -> int:
        """L, layers that freeze."""
        return len(set(self.layers))

    @property
    def risk(self) -> RiskGrid:
        """The risk cells of the stored bins."""
        return RiskGrid(self.entropy_edges, self.perplexity_edges)


class Column(NamedTuple):
    """Type of a column, and how many values a row has: ``units``, ``layers`` or one (None)."""

    kind: pa.DataType
    per: str | None = None


COLUMNS = {
    "prompt": Column(pa.string()),
    "corpus": Column(pa.string()),
    "context": Column(pa.int32()),
    "continuation": Column(pa.int32()),
    "scored": Column(pa.int32()),
    "budget": Column(pa.int32()),
    "varied": Column(pa.int32()),
    "weights": Column(pa.uint8(), "units"),
    "thresholds": Column(pa.uint8(), "layers"),
    "shares": Column(pa.uint8(), "units"),
    "mixtures": Column(pa.uint8(), "units"),
    "kept": Column(pa.int32(), "units"),
    "psi": Column(pa.float64(), "layers"),
    "kept_set": Column(pa.int32()),
    "nll_full": Column(pa.float64()),
    "nll_compressed": Column(pa.float64()),
    "divergence": Column(pa.float64()),
    "entropy": Column(pa.float32()),
    "perplexity": Column(pa.float32()),
    "entropy_bin": Column(pa.int16()),
    "perplexity_bin": Column(pa.int16()),
}


@dataclass(frozen=True, eq=False)
class RewardRecords:
    """n evaluations of one model, rule and action grid. ``columns`` maps each name to [n, ...].

    ``prompt`` (``behaviour.prompt_id``) and ``corpus`` str; ``context`` T, ``continuation`` C and
    ``budget`` B in tokens, ``scored`` the first continuation token that counts; ``varied``,
    ``weights``, ``shares``, ``mixtures`` [n, U] and ``thresholds`` [n, L] as in ``actions.Draws``;
    ``kept`` [n, U] tokens; ``psi`` [n, L] tokens over budget; ``kept_set`` equal for draws of the
    same prompt and budget that kept the same; ``nll_full``, ``nll_compressed`` mean nats a scored
    token, ``divergence`` KL(full || compressed) of them; ``entropy``, ``perplexity`` of the prompt
    and their bins.

    Raises:
        CalibrationError: a column is missing, of another length or type, or holds a value out of
            range; the message names it.
    """

    header: RecordHeader
    columns: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        if set(self.columns) != set(COLUMNS):
            odd = sorted(set(self.columns) ^ set(COLUMNS))
            raise CalibrationError(f"reward records lack or do not know columns {', '.join(odd)}")
        count = len(self.columns["prompt"])
        for name, column in COLUMNS.items():
            shape = (count, *self._width(column))
            found = self.columns[name]
            if found.shape != shape or found.dtype != numpy_type(column.kind):
                raise CalibrationError(
                    f"reward records: {name} must be {numpy_type(column.kind)} {list(shape)}, "
                    f"found {found.dtype} {list(found.shape)}"
                )
        self._check_values()

    def _width(self, column: Column) -> tuple[int, ...]:
        widths = {"units": self.header.units, "layers": self.header.freezing_layers}
        return (widths[column.per],) if column.per else ()

    def _check_values(self) -> None:
        header, states = self.header, self.header.units + self.header.freezing_layers
        ranges = {
            "weights": (0, len(header.grid.weights) - 1),
            "thresholds": (0, len(header.grid.thresholds) - 1),
            "shares": (0, len(header.grid.shares) - 1),
            "mixtures": (0, len(header.grid.quotas) - 1),
            "scored": (0, np.inf),
            "varied": (ALL, states - 1),
            "budget": (1, np.inf),
            "kept": (1, np.inf),
            "psi": (0, np.inf),
            "entropy_bin": (0, header.risk.shape[0] - 1),
            "perplexity_bin": (0, header.risk.shape[1] - 1),
        }
        floats = (name for name, column in COLUMNS.items() if pa.types.is_floating(column.kind))
        for name in floats:
            if not np.isfinite(self.columns[name]).all():
                raise CalibrationError(f"reward records: {name} holds a value that is not finite")
        for name, (low, high) in ranges.items():
            values = self.columns[name]
            if values.size and not low <= values.min() <= values.max() <= high:
                raise CalibrationError(
                    f"reward records: {name} holds {values.min()}..{values.max()}, accepted are "
                    f"{low}..{high}"
                )

    def __len__(self) -> int:
        return len(self.columns["prompt"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def where(self, rows: np.ndarray) -> RewardRecords:
        """The rows of a mask or of indices."""
        return RewardRecords(self.header, {name: x[rows] for name, x in self.columns.items()})

    def rebinned(self, risk: RiskGrid) -> RewardRecords:
        """The same records with the bins of other edges."""
        entropy, perplexity = risk.bins(self["entropy"], self["perplexity"])
        header = msgspec.structs.replace(
            self.header, entropy_edges=risk.entropy_edges, perplexity_edges=risk.perplexity_edges
        )
        bins = {"entropy_bin": entropy, "perplexity_bin": perplexity}
        return RewardRecords(header, self.columns | bins)


def concatenate(parts: Sequence[RewardRecords]) -> RewardRecords:
    """All records of several sets, in order. Raises CalibrationError unless headers are equal."""
    if not parts:
        raise CalibrationError("there are no reward records")
    for part in parts[1:]:
        for name in RecordHeader.__struct_fields__:
            ours, theirs = getattr(parts[0].header, name), getattr(part.header, name)
            if ours != theirs:
                raise CalibrationError(f"reward records differ in {name}: {ours} and {theirs}")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    return RewardRecords(parts[0].header, columns)


def write_shard(path: Path, records: RewardRecords) -> None:
    """Write ``records`` as Parquet, whole or not at all; the same records give the same bytes.

    Raises:
        CalibrationError: it cannot be written.
    """
    schema = _schema(records.header)
    arrays = [_to_arrow(records[field.name], field.type) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise CalibrationError(f"cannot write {path}: {error.strerror or error}") from error


def read_shard(path: Path) -> RewardRecords:
    """Records of a shard, verified: header, schema, page checksums, values.

    Raises:
        CalibrationError: anything is not as ``write_shard`` left it; the message names the file.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        raw = (table.schema.metadata or {}).get(HEADER)
        if raw is None:
            raise CalibrationError("not a shard of reward records")
        header = msgspec.json.decode(raw, type=RecordHeader)
        if not table.schema.equals(_schema(header), check_metadata=True):
            raise CalibrationError("its columns are not those of its header")
        columns = {name: _to_numpy(table[name], name, column) for name, column in COLUMNS.items()}
        return RewardRecords(header, columns)
    except FileNotFoundError:
        raise CalibrationError(f"{path} is not there") from None
    except (OSError, pa.ArrowException, msgspec.DecodeError, KvPolicyError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CalibrationError(f"{path} is damaged or of another version: {reason}") from error


def _schema(header: RecordHeader) -> pa.Schema:
    widths = {"units": header.units, "layers": header.freezing_layers}
    fields = []
    for name, column in COLUMNS.items():
        kind = column.kind
        if column.per:  # "element": the name that Parquet gives back
            kind = pa.list_(pa.field("element", kind, nullable=False), widths[column.per])
        fields.append(pa.field(name, kind, nullable=False))
    return pa.schema(fields, metadata={HEADER: msgspec.json.encode(header)})


def _to_arrow(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, type=kind)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type=kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _to_numpy(values: pa.ChunkedArray, name: str, column: Column) -> np.ndarray:
    whole = values.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # a table without rows has no chunk
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    if whole.null_count:
        raise CalibrationError(f"{name} holds a null")
    if not column.per:
        return whole.to_numpy(zero_copy_only=False).astype(numpy_type(column.kind))
    flat = whole.flatten()
    if flat.null_count:
        raise CalibrationError(f"{name} holds a null")
    return flat.to_numpy(zero_copy_only=False).reshape(len(whole), whole.type.list_size)


def numpy_type(kind: pa.DataType) -> np.dtype:
    """numpy type of a column of ``kind``; strings are objects."""
    return np.dtype(object) if pa.types.is_string(kind) else np.dtype(kind.to_pandas_dtype())

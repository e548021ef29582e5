"""What supports compiled retention tables, kept beside them.

An optional file of an artifact, listed in its manifest like any other. Serving does not read it;
people, reports and comparisons do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from kvpolicy.artifact import Artifact
from kvpolicy.errors import PolicyError
from kvpolicy.evidence import listed_content
from kvpolicy.retention.tables import RetentionTables

RETENTION_EVIDENCE_FILE = "retention_evidence.safetensors"
EVIDENCE = ("records", "support", "confidence", "empty")
"""Fields of ``CellEvidence``, in order."""
WORTH = "head_worth"
"""Optional tensor: artifacts made before there was such a thing load as ever."""
_DTYPES = {
    "records": np.dtype(np.int64), "support": np.dtype(np.int64),
    "confidence": np.dtype(np.float64), "empty": np.dtype(bool),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class CellEvidence:
    """What supports the choice in every cell of one table; all arrays in the table's shape.

    ``records`` int64, evaluations that say something of the cell; ``support`` int64, those among
    them that took the chosen action; ``confidence`` float64 in [0, 1], how surely that action beats
    the best other; ``empty`` bool, no record at all: the cell holds what keeps most. Cells that no
    freeze reads are empty.

    Raises:
        PolicyError: a dtype or value that the above rules out.
    """

    records: np.ndarray
    support: np.ndarray
    confidence: np.ndarray
    empty: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != self.records.shape:
                raise PolicyError(
                    f"{name} must be {dtype} {list(self.records.shape)}, found {array.dtype} "
                    f"{list(array.shape)}"
                )
        if (self.support < 0).any() or (self.support > self.records).any():
            raise PolicyError("support must lie between 0 and the cell's records")
        if not ((self.confidence >= 0) & (self.confidence <= 1)).all():  # nor NaN
            raise PolicyError("confidence must lie within 0..1")
        if (self.empty != (self.records == 0)).any():
            raise PolicyError("empty must mark exactly the cells without records")


@dataclass(frozen=True, eq=False)
class RetentionEvidence:
    """Evidence of an artifact's retention tables.

    ``heads`` in the shape of ``head_weights``, ``gate`` in that of ``gate``; ``cell_prompts`` int64
    [entropy bins, perplexity bins], calibration prompts in each risk cell. The latter two are None
    where the rule has no gate. Of a mix ``heads`` supports the best share of each head taken alone;
    ``worth`` float32, in the shape of ``head_weights``, is what doubling a head's share adds to the
    standardised reward (0 where no head freezes), or None if that is not known.
    """

    heads: CellEvidence
    gate: CellEvidence | None = None
    cell_prompts: np.ndarray | None = None
    worth: np.ndarray | None = None

    def check_fits(self, tables: RetentionTables) -> None:
        """Raise PolicyError unless it has a cell for each of the tables'."""
        _check_shape("head", self.heads.records, tables.head_weights)
        if self.worth is not None:
            self._check_worth(tables)
        if (self.gate is None) != (tables.rule.gate == "off"):
            raise PolicyError(f"evidence of a gate does not go with gate={tables.rule.gate}")
        if self.gate is None:
            return
        _check_shape("gate", self.gate.records, tables.gate)
        prompts = self.cell_prompts
        if prompts is None or prompts.dtype != np.int64 or prompts.shape != tables.gate.shape[2:]:
            raise PolicyError(f"cell_prompts must be int64 {list(tables.gate.shape[2:])}")
        if (prompts < 0).any() or not prompts.any():
            raise PolicyError("cell_prompts must count at least one prompt and none below 0")

    def _check_worth(self, tables: RetentionTables) -> None:
        if not tables.rule.mixes:
            raise PolicyError(f"{WORTH} belongs to a rule with mix=table")
        wanted, found = list(tables.head_weights.shape), self.worth
        if found.dtype != np.float32 or list(found.shape) != wanted:
            raise PolicyError(
                f"{WORTH} must be float32 {wanted}, found {found.dtype} {list(found.shape)}"
            )
        if not np.isfinite(found).all():
            raise PolicyError(f"{WORTH} holds a value that is not finite")


def _check_shape(name: str, found: np.ndarray, table: np.ndarray) -> None:
    if found.shape != table.shape:
        raise PolicyError(
            f"{name} evidence covers {list(found.shape)} cells, the table has {list(table.shape)}"
        )


def to_tensors(evidence: RetentionEvidence) -> dict[str, np.ndarray]:
    """``{head,gate}_{records,support,confidence,empty}``, ``cell_prompts`` and ``head_worth``, as
    far as there are such."""
    tensors = _named("head", evidence.heads)
    if evidence.gate is not None:
        tensors |= _named("gate", evidence.gate)
        tensors["cell_prompts"] = np.ascontiguousarray(evidence.cell_prompts)
    if evidence.worth is not None:
        tensors[WORTH] = np.ascontiguousarray(evidence.worth)
    return tensors


def to_file(evidence: RetentionEvidence) -> dict[str, bytes]:
    """File name -> content, for ``write_artifact(extra_files=...)``; same input, same bytes."""
    return {RETENTION_EVIDENCE_FILE: save_tensors(to_tensors(evidence))}


def _named(table: str, cells: CellEvidence) -> dict[str, np.ndarray]:
    return {f"{table}_{name}": np.ascontiguousarray(getattr(cells, name)) for name in _DTYPES}


def read_retention_evidence(artifact: Artifact) -> RetentionEvidence | None:
    """What supports the tables of ``artifact``, or None if its manifest lists no such file.

    Raises:
        PolicyError: altered, malformed, or of other tables than the artifact's.
    """
    data = listed_content(artifact.path, artifact.manifest, RETENTION_EVIDENCE_FILE)
    if data is None:
        return None
    path = artifact.path / RETENTION_EVIDENCE_FILE
    if artifact.retention is None:
        raise PolicyError(f"{path} is evidence of retention tables, which the policy does not have")
    if artifact.manifest.retention.transferred is not None:
        raise PolicyError(f"{path} is of another model: the tables were transferred")
    try:
        evidence = _parse(load_tensors(data), artifact.retention.rule.gate == "table")
        evidence.check_fits(artifact.retention)
    except (PolicyError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{path} is malformed: {error}") from None
    return evidence


def _parse(tensors: dict[str, np.ndarray], gate: bool) -> RetentionEvidence:
    tables = ("head", "gate") if gate else ("head",)
    wanted = {f"{table}_{name}" for table in tables for name in _DTYPES}
    wanted |= {"cell_prompts"} if gate else set()
    if set(tensors) - {WORTH} != wanted:
        raise PolicyError(f"it must hold exactly {sorted(wanted)}, found {sorted(tensors)}")
    cells = {
        table: CellEvidence(**{name: tensors[f"{table}_{name}"] for name in _DTYPES})
        for table in tables
    }
    prompts, worth = tensors.get("cell_prompts"), tensors.get(WORTH)
    return RetentionEvidence(cells["head"], cells.get("gate"), prompts, worth)


@dataclass(frozen=True)
class Support:
    """Support of the cells of a table that some freeze can read: how many there are, how many are
    ``empty``, and the medians over the others of records, records of the choice, and confidence
    (0 if all are empty)."""

    cells: int
    empty: int
    records: float
    chosen: float
    confidence: float


def support(cells: CellEvidence, read: np.ndarray) -> Support:
    """Of the cells where ``read`` (bool, the cells' shape) is True."""
    known = read & ~cells.empty
    count = int(known.sum())
    medians = (
        float(np.median(array[known])) if count else 0.0
        for array in (cells.records, cells.support, cells.confidence)
    )
    return Support(int(read.sum()), int(read.sum()) - count, *medians)

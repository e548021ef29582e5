"""From a complete set of reward records to a policy artifact: no model is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calib_cluster.compile import Compiled, CompileSettings, compile_tables
from calib_cluster.compile_mix import CompiledMix
from calib_cluster.compile_records import RecordIndex, Shard, digest_of
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import code_version
from calib_cluster.publish import machine_record
from calib_cluster.report.retention import RetentionReportInput, render_retention_report
from calib_cluster.rewards.records import RewardRecords, concatenate
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.errors import KvPolicyError
from kvpolicy.evidence import REPORT_FILE
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.retention_evidence import (
    EVIDENCE,
    CellEvidence,
    RetentionEvidence,
    to_file,
)
from kvpolicy.windows import WindowPolicy

METHOD = "cql"
POINT = "default"


class Counts(msgspec.Struct, frozen=True):
    """How much a fit is based on: ``records`` are (state, action, reward), of which a factorial
    evaluation gives one for every unit and layer; ``distinct_sets`` were scored."""

    prompts: int
    tokens: int
    evaluations: int
    distinct_sets: int
    records: int


@dataclass(frozen=True, eq=False)
class Fitted:
    """Tables and what they are fitted to: ``corpora`` of the records (label to sha256),
    ``records_sha256`` over their values, ``grid`` of actions by name."""

    index: RecordIndex
    settings: CompileSettings
    compiled: Compiled | CompiledMix
    evidence: RetentionEvidence
    counts: Counts
    budgets: tuple[int, ...]
    corpora: dict[str, str]
    grid: dict[str, list[float]]
    records_sha256: str


def choose(
    parts: Sequence[RewardRecords], budgets: Sequence[int], corpora: Sequence[str]
) -> list[RewardRecords]:
    """Records of some budgets and some corpora (empty: all), shard by shard.

    Raises:
        CalibrationError: there are none of a budget or a corpus; the message lists what there is.
    """
    chosen = list(parts)
    for flag, column, asked in (
        ("--budgets", "budget", budgets), ("--only-corpus", "corpus", corpora),
    ):  # fmt: skip
        there = sorted({value for part in chosen for value in part[column].tolist()})
        if missing := [value for value in asked if value not in there]:
            known = ", ".join(map(str, there))
            raise CalibrationError(f"{flag} {missing[0]}: no reward records; there are: {known}")
        if asked:
            chosen = [part.where(np.isin(part[column], asked)) for part in chosen]
    return [part for part in chosen if len(part)]


def fit(index: RecordIndex, parts: Sequence[RewardRecords], settings: CompileSettings) -> Fitted:
    """Tables for every budget of the records, which come shard by shard.

    Raises:
        CalibrationError: as ``compile_tables``.
    """
    records, shards = concatenate(parts), [Shard.of(part) for part in parts]
    budgets = tuple(np.unique(records["budget"]).tolist())
    compiled = compile_tables(records, index.geometry, budgets, settings)
    labels = set(records["corpus"])
    return Fitted(
        index=index,
        settings=settings,
        compiled=compiled,
        evidence=_evidence(compiled, records),
        counts=_counts(records, shards),
        budgets=budgets,
        corpora={k: v for k, v in sorted(index.fingerprint.corpora.items()) if k in labels},
        grid=records.header.grid.used(records.header.rule),
        records_sha256=digest_of(shard.sha256 for shard in shards),
    )


def _counts(records: RewardRecords, shards: Sequence[Shard]) -> Counts:
    first = _first_rows(records)
    return Counts(
        prompts=len(first),
        tokens=int((records["context"] + records["continuation"])[first].sum()),
        evaluations=sum(shard.evaluations for shard in shards),
        distinct_sets=sum(shard.distinct for shard in shards),
        records=sum(shard.records for shard in shards),
    )


def _first_rows(records: RewardRecords) -> np.ndarray:
    """int64 [prompts]: a row of every prompt."""
    return np.unique(records["prompt"].astype(str), return_index=True)[1]


def _evidence(compiled: Compiled | CompiledMix, records: RewardRecords) -> RetentionEvidence:
    found = compiled.evidence(records)
    cells = {
        table: CellEvidence(*(found[f"{table}_{name}"] for name in EVIDENCE))
        for table in ("head", "gate")
        if f"{table}_records" in found
    }
    prompts = _cell_prompts(compiled, records) if "gate" in cells else None
    return RetentionEvidence(cells["head"], cells.get("gate"), prompts, _worth(compiled, records))


def _worth(compiled: Compiled | CompiledMix, records: RewardRecords) -> np.ndarray | None:
    """float32 [L, H] of a mix: what a doubled share of each head is worth, 0 where none freezes."""
    if not isinstance(compiled, CompiledMix):
        return None
    worth = np.zeros(compiled.tables.head_weights.shape, np.float32)
    worth[np.array(records.header.layers), np.array(records.header.heads)] = compiled.worth
    return worth


def _cell_prompts(compiled: Compiled, records: RewardRecords) -> np.ndarray:
    """int64 [E, P]: prompts in each risk cell of the compiled gate."""
    edges = compiled.tables.entropy_edges, compiled.tables.perplexity_edges
    grid, first = RiskGrid(*(tuple(e.tolist()) for e in edges)), _first_rows(records)
    counts = np.zeros(grid.shape, np.int64)
    np.add.at(counts, grid.bins(records["entropy"][first], records["perplexity"][first]), 1)
    return counts


def publish_tables(out: Path, name: str, fitted: Fitted) -> Path:
    """Write the artifact: native windows, tables, their record, evidence and report; its folder.

    The same records, settings and code give the same version. Raises CalibrationError if it cannot
    be written.
    """
    index, record = fitted.index, calibration_record(fitted)
    files = {**to_file(fitted.evidence), REPORT_FILE: _report(name, fitted, record)}
    try:
        return write_artifact(
            out,
            model_name=index.model,
            name=name,
            points=[PointSpec(POINT, WindowPolicy.native(index.geometry))],
            weight_hashes=index.fingerprint.model_weights,
            extra_files=files,
            retention=fitted.compiled.tables,
            retention_calibration=record,
        )
    except KvPolicyError as error:
        raise CalibrationError(str(error)) from error


def _report(name: str, fitted: Fitted, record: CalibrationRecord) -> bytes:
    costs = {key.replace("_", " "): n for key, n in msgspec.to_builtins(fitted.counts).items()}
    return render_retention_report(
        RetentionReportInput(
            model_name=fitted.index.model,
            name=name,
            geometry=fitted.index.geometry,
            tables=fitted.compiled.tables,
            evidence=fitted.evidence,
            record=record,
            costs=costs,
        )
    )


def calibration_record(fitted: Fitted) -> CalibrationRecord:
    """Where the tables come from: every parameter of the records and of the fit."""
    source, counts = fitted.index.fingerprint, fitted.counts
    return CalibrationRecord(
        method=METHOD,
        corpora=fitted.corpora,
        prompts=counts.prompts,
        tokens=counts.tokens,
        seed=source.seed,
        code_version=code_version(),
        hyperparameters={
            "length": source.length,
            "continuation": source.continuation,
            "chat_template": source.chat_template,
            "budgets": list(fitted.budgets),
            "behaviour": source.behaviour,
            "draws": source.draws,
            "draws_per_cell": source.draws_per_cell,
            **{f"actions_{name}": values for name, values in fitted.grid.items()},
            **_settings_record(fitted.settings),
            "rounds": fitted.compiled.rounds,
            "settled": fitted.compiled.settled,
            "residual": fitted.compiled.residual,
            "evaluations": counts.evaluations,
            "distinct_sets": counts.distinct_sets,
            "records": counts.records,
            "records_sha256": fitted.records_sha256,
            "records_code_version": source.code_version,
            "prompts_sha256": source.prompts,
            **machine_record(source),
        },
    )


def _settings_record(settings: CompileSettings) -> dict[str, Any]:
    """Settings of the fit; AdamW's only where it was used by the recipe."""
    plain = msgspec.to_builtins(settings)
    recipe = plain.pop("recipe")
    if settings.method == "paper":
        plain |= {f"recipe_{name}": value for name, value in recipe.items()}
    return plain

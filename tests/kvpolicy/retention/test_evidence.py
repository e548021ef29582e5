"""Evidence of retention tables: kept whole, and refused if it is not the tables'."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from kvpolicy.artifact import Artifact, PointSpec, load_artifact, write_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import RULES, RetentionTables
from kvpolicy.retention_evidence import (
    RETENTION_EVIDENCE_FILE,
    CellEvidence,
    RetentionEvidence,
    read_retention_evidence,
    support,
    to_file,
    to_tensors,
)
from kvpolicy.windows import WindowPolicy


@pytest.fixture
def smollm2_geometry(geometry) -> ModelGeometry:
    """30 global layers of 3 kv heads."""
    return geometry("smollm2")


def cells(shape: tuple[int, ...], seed: int = 0) -> CellEvidence:
    """Random cells, some of them empty."""
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 4, shape)
    confidence = np.where(records > 0, rng.random(shape), 0.0)
    return CellEvidence(records, records // 2, confidence, records == 0)


def evidence(tables: RetentionTables) -> RetentionEvidence:
    """Random evidence of ``tables``."""
    if tables.rule.gate == "off":
        return RetentionEvidence(cells(tables.head_weights.shape))
    prompts = np.ones(tables.gate.shape[2:], np.int64)
    return RetentionEvidence(cells(tables.head_weights.shape), cells(tables.gate.shape), prompts)


def written(
    root: Path, geometry: ModelGeometry, tables: RetentionTables, files: dict[str, bytes]
) -> Artifact:
    points = [PointSpec("default", WindowPolicy.native(geometry))]
    folder = write_artifact(
        root, model_name="m", name="p", points=points, retention=tables, extra_files=files
    )
    return load_artifact(folder)


@pytest.mark.parametrize("rule", ["paper", "head"])
def test_round_trip(tmp_path: Path, smollm2_geometry: ModelGeometry, rule: str) -> None:
    tables = RetentionTables.uniform(smollm2_geometry, RULES[rule])
    made = evidence(tables)
    artifact = written(tmp_path, smollm2_geometry, tables, to_file(made))
    found = to_tensors(read_retention_evidence(artifact))
    assert found.keys() == to_tensors(made).keys()
    assert len(found) == (4 if rule == "head" else 9)
    for name, tensor in to_tensors(made).items():
        np.testing.assert_array_equal(found[name], tensor)


def mix_evidence(tables: RetentionTables) -> RetentionEvidence:
    """Of a mix, with what a doubling is worth."""
    worth = np.random.default_rng(1).normal(size=tables.head_weights.shape).astype(np.float32)
    return dataclasses.replace(evidence(tables), worth=worth)


def test_worth_of_a_mix_round_trips(tmp_path: Path, smollm2_geometry: ModelGeometry) -> None:
    tables = RetentionTables.uniform(smollm2_geometry, RULES["mix"])
    made = mix_evidence(tables)
    artifact = written(tmp_path, smollm2_geometry, tables, to_file(made))
    found = read_retention_evidence(artifact)
    assert found.worth.dtype == np.float32 and (found.worth == made.worth).all()
    assert set(to_tensors(found)) == {*to_tensors(evidence(tables)), "head_worth"}


def test_a_mix_without_worth_loads(tmp_path: Path, smollm2_geometry: ModelGeometry) -> None:
    """As the first artifacts of a mix are."""
    tables = RetentionTables.uniform(smollm2_geometry, RULES["mix"])
    artifact = written(tmp_path, smollm2_geometry, tables, to_file(evidence(tables)))
    assert read_retention_evidence(artifact).worth is None


@pytest.mark.parametrize(
    ("rule", "worth", "said"),
    [
        ("mix", np.zeros((30, 3)), "head_worth must be float32 [30, 3], found float64"),
        ("mix", np.zeros((30, 2), np.float32), "found float32 [30, 2]"),
        ("mix", np.full((30, 3), np.inf, np.float32), "head_worth holds a value"),
        ("head", np.zeros((30, 3), np.float32), "head_worth belongs to a rule with mix=table"),
        ("paper", np.zeros((30, 3), np.float32), "head_worth belongs to a rule with mix=table"),
    ],
)
def test_malformed_worth(
    tmp_path: Path, smollm2_geometry: ModelGeometry, rule: str, worth: np.ndarray, said: str
) -> None:
    tables = RetentionTables.uniform(smollm2_geometry, RULES[rule])
    tensors = to_tensors(evidence(tables)) | {"head_worth": worth}
    artifact = written(tmp_path, smollm2_geometry, tables, {RETENTION_EVIDENCE_FILE: save(tensors)})
    with pytest.raises(PolicyError, match=RETENTION_EVIDENCE_FILE) as error:
        read_retention_evidence(artifact)
    assert said in str(error.value)


def test_tables_without_evidence(tmp_path: Path, smollm2_geometry: ModelGeometry) -> None:
    tables = RetentionTables.uniform(smollm2_geometry, RULES["paper"])
    assert read_retention_evidence(written(tmp_path, smollm2_geometry, tables, {})) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_records": None}, "must hold exactly"),
        ({"more": np.zeros(1)}, "must hold exactly"),
        ({"head_confidence": np.full((30, 3), np.nan)}, "confidence must lie within 0..1"),
        ({"head_support": np.full((30, 3), 9)}, "support must lie between 0"),
        ({"head_empty": np.ones((30, 3), bool)}, "empty must mark exactly"),
        ({"head_support": np.zeros((30, 3), np.int32)}, "support must be int64"),
        ({"cell_prompts": np.zeros((1, 1), np.int64)}, "at least one prompt"),
        ({"cell_prompts": np.ones((2, 1), np.int64)}, "cell_prompts must be int64 [1, 1]"),
    ],
)
def test_malformed(
    tmp_path: Path, smollm2_geometry: ModelGeometry, change: dict, said: str
) -> None:
    tables = RetentionTables.uniform(smollm2_geometry, RULES["paper"])
    tensors = {k: v for k, v in (to_tensors(evidence(tables)) | change).items() if v is not None}
    artifact = written(tmp_path, smollm2_geometry, tables, {RETENTION_EVIDENCE_FILE: save(tensors)})
    with pytest.raises(PolicyError, match=RETENTION_EVIDENCE_FILE) as error:
        read_retention_evidence(artifact)
    assert said in str(error.value)


def test_evidence_of_other_tables(tmp_path: Path, smollm2_geometry: ModelGeometry) -> None:
    with_gate = RetentionTables.uniform(smollm2_geometry, RULES["paper"])
    without = RetentionTables.uniform(smollm2_geometry, RULES["head"])
    artifact = written(tmp_path, smollm2_geometry, without, to_file(evidence(with_gate)))
    with pytest.raises(PolicyError, match="must hold exactly"):
        read_retention_evidence(artifact)
    artifact = written(tmp_path / "2", smollm2_geometry, with_gate, to_file(evidence(without)))
    with pytest.raises(PolicyError, match="must hold exactly"):
        read_retention_evidence(artifact)


def test_altered_after_loading(tmp_path: Path, smollm2_geometry: ModelGeometry) -> None:
    tables = RetentionTables.uniform(smollm2_geometry, RULES["paper"])
    artifact = written(tmp_path, smollm2_geometry, tables, to_file(evidence(tables)))
    (artifact.path / RETENTION_EVIDENCE_FILE).write_bytes(b"other")
    with pytest.raises(PolicyError, match="does not match its sha256"):
        read_retention_evidence(artifact)


def test_support_counts_cells_that_are_read() -> None:
    made = CellEvidence(
        np.array([4, 0, 6, 9]), np.array([1, 0, 3, 9]), np.array([0.5, 0, 0.7, 1]),
        np.array([False, True, False, False]),
    )  # fmt: skip
    found = support(made, np.array([True, True, True, False]))
    assert dataclasses.astuple(found) == (3, 1, 5.0, 2.0, 0.6)

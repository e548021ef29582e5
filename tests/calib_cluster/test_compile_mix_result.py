"""What a finished compile of a mix leaves: its artifact, and what it says on the terminal."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from calib_cluster.compile_fit import Fitted, fit, publish_tables
from calib_cluster.compile_learn import CompileSettings
from calib_cluster.compile_records import RecordIndex
from calib_cluster.compile_summary import cost, mix_line, print_compile_summary
from calib_cluster.fingerprint import RecordFingerprint
from calib_cluster.rewards.records import RewardRecords
from kvpolicy.__main__ import main as kvpolicy_main
from kvpolicy.artifact import load_artifact
from kvpolicy.geometry import read_geometry
from kvpolicy.retention_evidence import read_retention_evidence
from tests.calib_cluster.test_compile_mix import planted
from tests.calib_cluster.tiny_models import save_tiny


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Fitted to made-up records of a model with two global layers of two kv heads."""
    geometry = read_geometry(save_tiny("gemma2", tmp_path_factory.mktemp("gemma2")))
    records = planted(geometry, [0.4, 0.0, 0.1, 0.0], best_mixture=2, count=2000)
    index = RecordIndex("tiny", geometry, fingerprint(records), ("one",), "ab" * 32)
    return fit(index, [records], CompileSettings(alpha=0.0))


def fingerprint(records: RewardRecords) -> RecordFingerprint:
    """Of the records above; what it says of texts and machine is made up."""
    return RecordFingerprint(
        model_config=records.header.model_config,
        model_weights={"model.safetensors": "3" * 64},
        corpora={"a": "1" * 64, "b": "2" * 64},
        prompts="4" * 64,
        prompt_count=40,
        length=64,
        continuation=8,
        seed=0,
        chat_template=False,
        rule=records.header.rule,
        behaviour=records.header.behaviour,
        budgets=(16, 32),
        draws=50,
        draws_per_cell=0,
        bins=(0, 0),
        batch=8,
        device="cpu",
        threads=1,
        code_version="made up",
        libraries={"torch": "0"},
    )


def test_it_is_published_with_worth_and_report(fitted, tmp_path, capsys):
    folder = publish_tables(tmp_path, "mix", fitted)
    artifact = load_artifact(folder)
    evidence = read_retention_evidence(artifact)
    where = [1, 1, 3, 3], [0, 1, 0, 1]  # global layers
    np.testing.assert_allclose(evidence.worth[where], fitted.compiled.worth, rtol=1e-6)
    assert not evidence.worth[[0, 2]].any()
    assert evidence.worth[1, 0] == evidence.worth.max() > 0.05
    assert "What a doubled share is worth" in (folder / "report.html").read_text()
    assert kvpolicy_main(["verify", str(folder)]) == 0
    assert kvpolicy_main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    most = f"1/0 {artifact.retention.mix.shares[0, 1, 0]:.3g}"
    assert f"heads that keep most (layer/head share): {most}" in shown
    assert "4 heads: focus 100%" in shown and "8 of 8 query heads weigh" in shown


def test_the_terminal_shows_shares_and_mixtures(fitted, capsys):
    console = Console(width=200)
    print_compile_summary(fitted, cost(fitted, 1, 1.0, 1.0), console)
    said = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
            for line in said.splitlines() if line.startswith("│")}  # fmt: skip
    shares = fitted.compiled.tables.mix.shares[0][[1, 1, 3, 3], [0, 1, 0, 1]]
    row = rows["shares, B=16 32"]
    assert row[:3] == ["4", "0", "2000"]
    assert [float(row[5]), float(row[7])] == pytest.approx(
        [shares.min(), shares.max()], rel=1e-3
    )  # fmt: skip
    assert rows["16 32"] == ["4", "0%", "100%", "0%"]
    assert "head weights" not in said and "thresholds" not in said
    least, middle, most = np.quantile(fitted.compiled.worth, [0, 0.5, 1])
    line = mix_line(fitted)
    assert f"{least:.2g} / {middle:.2g} / {most:.2g} of a standard deviation" in line
    assert line.startswith("8 of 8 query heads retrieve") and line in said

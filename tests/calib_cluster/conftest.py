"""Fixtures of the calibration tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calib_cluster.tiny import Calibration, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A random 6-layer Llama with SmolLM2's tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", smollm2)


@pytest.fixture
def calibration(tiny_model: Path, tmp_path: Path) -> Calibration:
    """The calibration command on the tiny model, with an output folder of its own."""
    return Calibration(tiny_model, tmp_path / "artifacts")

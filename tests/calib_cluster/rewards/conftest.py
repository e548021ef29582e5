"""Tiny random models with their reward model and their masked reference, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from calib_cluster.rewards.model import RewardModel
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RULES, RetentionTables
from tests.calib_cluster.rewards.frozen import Pair
from tests.calib_cluster.tiny_models import save_tiny
from tests.harness.frozen_reference import FrozenReference


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """``pair(family)``: a random model as ``RewardModel`` and as ``FrozenReference``."""
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            folder: Path = save_tiny(family, tmp_path_factory.mktemp(family))
            geometry = read_geometry(folder)
            model = RewardModel(folder, geometry)
            units = model.units.layers, model.units.heads
            tables = RetentionTables.uniform(geometry, RULES["paper"])
            made[family] = Pair(model, FrozenReference(folder, None, 0, units, tables))
        return made[family]

    return get


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers of a fixed seed."""
    return np.random.default_rng(7)

"""The tiny packaged model, and a cache and package index that belong to one test."""

from collections.abc import Callable

import psutil
import pytest

from loadtest import model_specs
from tests.calib_cluster.judge.conftest import reader, texts  # noqa: F401
from tests.loadtest import fake_model


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> fake_model.FakeModel:
    return fake_model.pack(tmp_path_factory.mktemp("index"))


@pytest.fixture
def tiny(packed, tmp_path, monkeypatch) -> fake_model.FakeModel:
    """The packed model as the demo model ``tiny``: pip sees its wheels only."""
    monkeypatch.setenv("RAGGEDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packed.links))
    monkeypatch.setitem(model_specs.SPECS, fake_model.NAME, packed.spec)
    return packed


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """``children()``: child processes begun during the test.

    Earlier tests of this worker may have left one that lives as long as it, such as
    multiprocessing's resource tracker.
    """
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]

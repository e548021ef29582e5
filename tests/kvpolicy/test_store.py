"""Looking policies up: folders, names, versions, built-ins, search roots."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvpolicy import store
from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.store import resolve, search_roots
from kvpolicy.windows import FULL, WindowPolicy


@pytest.fixture
def publish(geometry, tmp_path):
    """Factory: a uniform policy of a named model under tmp_path/root."""

    def make(model: str, window: int, name: str = "uni", root: str = "root") -> Path:
        points = [
            PointSpec("default", WindowPolicy.uniform(geometry(model), window, 4)),
            PointSpec("half", WindowPolicy.uniform(geometry(model), window // 2, 4)),
        ]
        return write_artifact(tmp_path / root, model_name=model, name=name, points=points)

    return make


def test_built_ins_need_no_artifact(geometry):
    geom = geometry("gemma3")
    native, full = resolve("native", geom, []), resolve("full", geom, [])
    assert (native.policy_id, native.artifact, native.point) == ("native", None, None)
    assert native.policy == WindowPolicy.native(geom)
    assert set(full.policy.for_units().tolist()) == {FULL}
    with pytest.raises(PolicyError, match="has no points"):
        resolve("native", geom, [], point="x")


def test_folder_name_and_version_find_the_same(publish, geometry, tmp_path):
    folder = publish("smollm2", 64)
    geom = geometry("smollm2")
    for spec in (str(folder), "uni", f"uni@{folder.name}"):
        found = resolve(spec, geom, [tmp_path / "root"])
        assert found.policy_id == f"uni@{folder.name}"
        assert found.policy == WindowPolicy.uniform(geom, 64, 4)
        assert found.policy.geometry == geom
    assert resolve("uni", geom, [tmp_path / "root"], point="half").point == "half"


def test_several_versions_are_ambiguous_and_listed(publish, geometry, tmp_path):
    folders = [publish("smollm2", 64), publish("smollm2", 128)]
    with pytest.raises(PolicyError, match="ambiguous") as caught:
        resolve("uni", geometry("smollm2"), [tmp_path / "root"])
    assert all(f"uni@{folder.name}" in str(caught.value) for folder in folders)
    version = folders[1].name
    found = resolve(f"uni@{version}", geometry("smollm2"), [tmp_path / "root"])
    assert found.policy == WindowPolicy.uniform(geometry("smollm2"), 128, 4)


def test_same_name_for_two_models_is_told_apart_by_geometry(publish, geometry, tmp_path):
    publish("smollm2", 64), publish("gemma3", 128)
    found = resolve("uni", geometry("gemma3"), [tmp_path / "root"])
    assert found.policy == WindowPolicy.uniform(geometry("gemma3"), 128, 4)
    with pytest.raises(PolicyError, match=r"only for other models.*gemma3.*smollm2"):
        resolve("uni", geometry("qwen3"), [tmp_path / "root"])


def test_first_root_wins_and_equal_versions_are_not_ambiguous(publish, geometry, tmp_path):
    first, second = publish("smollm2", 64, root="a"), publish("smollm2", 64, root="b")
    found = resolve("uni", geometry("smollm2"), [tmp_path / "b", tmp_path / "a"])
    assert found.artifact.path == second != first


@pytest.mark.parametrize(
    "spec", ["nothing", "uni@000000000000", "", "@1", "no/such/folder", "u*", "uni@*", "../root"]
)
def test_unknown_specs_are_one_error(spec, publish, geometry, tmp_path, monkeypatch):
    publish("smollm2", 64)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match="no policy") as caught:
        resolve(spec, geometry("smollm2"), [tmp_path / "root"])
    assert "\n" not in str(caught.value)


def test_a_damaged_candidate_is_refused_not_skipped(publish, geometry, tmp_path):
    folder = publish("smollm2", 64)
    (folder / "policy.safetensors").write_bytes(b"")
    with pytest.raises(PolicyError, match="sha256"):
        resolve("uni", geometry("smollm2"), [tmp_path / "root"])


def test_a_folder_of_the_same_name_does_not_shadow_a_policy(
    publish, geometry, tmp_path, monkeypatch
):
    publish("smollm2", 64)
    (tmp_path / "uni").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("uni", geometry("smollm2"), [tmp_path / "root"]).artifact is not None


def test_environment_then_working_folder_are_searched(publish, geometry, tmp_path, monkeypatch):
    publish("smollm2", 64, root="elsewhere")
    publish("smollm2", 128, root="work/artifacts", name="local")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("RAGGEDKV_ARTIFACTS", str(tmp_path / "elsewhere"))
    assert search_roots()[:2] == [tmp_path / "elsewhere", tmp_path / "work" / "artifacts"]
    for name in ("uni", "local"):
        assert resolve(name, geometry("smollm2")).policy_id.startswith(name)


def test_policies_shipped_in_a_wheel_are_found(publish, geometry, tmp_path, monkeypatch):
    folder = publish("smollm2", 64)
    package = tmp_path / "site-packages" / "kvpolicy"
    shutil.copytree(folder, package / "shipped" / Path(*folder.parts[-3:]))
    monkeypatch.setattr(store, "__file__", str(package / "store.py"))
    monkeypatch.delenv("RAGGEDKV_ARTIFACTS", raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert search_roots() == [package / "shipped"]
    assert resolve("uni", geometry("smollm2")).artifact.path.is_relative_to(package)

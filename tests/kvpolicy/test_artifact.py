"""Artifacts: round trip, stable versions, strict loading, all-or-nothing writing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from kvpolicy import artifact as artifact_module
from kvpolicy.artifact import Artifact, PointSpec, load_artifact, read_manifest, write_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.store import find_folders
from kvpolicy.windows import WindowPolicy
from tests.kvpolicy.forging import edit_manifest, resign

CALIBRATION = CalibrationRecord(
    method="seqcalib",
    corpora={"kjv": "0" * 64},
    prompts=5,
    tokens=10240,
    seed=7,
    code_version="abc",
    hyperparameters={"codebook": [64, 128], "tau": 0.99, "shuffle": False, "note": None},
)


@pytest.fixture
def write(geometry, tmp_path):
    """Factory: write a small two-point SmolLM2 artifact under tmp_path."""

    def make(root: Path = tmp_path / "artifacts", **changes) -> Path:
        geom = geometry("smollm2")
        points = [
            PointSpec("tau-0.99", WindowPolicy.uniform(geom, 256, 4), tau=0.99, fidelity=0.991),
            PointSpec("tau-0.95", WindowPolicy.uniform(geom, 64, 4), tau=0.95),
        ]
        options = {"model_name": "smollm2", "name": "two", "points": points} | changes
        return write_artifact(root, **options)

    return make


def test_round_trip(write, geometry):
    folder = write(calibration=CALIBRATION, extra_files={"plot.png": b"png"})
    loaded = load_artifact(folder, geometry("smollm2"))
    assert folder.parts[-3:] == ("smollm2", "two", loaded.manifest.version)
    assert len(loaded.manifest.version) == 12
    assert loaded.policy() == WindowPolicy.uniform(geometry("smollm2"), 256, 4)
    assert loaded.policy("tau-0.95") == WindowPolicy.uniform(geometry("smollm2"), 64, 4)
    assert loaded.manifest.calibration == CALIBRATION
    assert loaded.manifest.points[0].residency[2048] == pytest.approx(260 / 2048, abs=1e-6)
    assert sorted(loaded.manifest.files) == ["plot.png", "policy.safetensors"]


def test_policy_can_carry_the_served_geometry(write, geometry):
    served = geometry("smollm2", torch_dtype="float32")
    assert load_artifact(write(), served).policy(geom=served).geometry.kv_dtype_bytes == 4


def test_unknown_point_lists_the_known(write):
    with pytest.raises(PolicyError, match=r"no point 'x'; it has: tau-0\.99, tau-0\.95"):
        load_artifact(write()).policy("x")


def test_version_depends_on_the_policy_alone(write, geometry, tmp_path, monkeypatch):
    base = write(tmp_path / "a").name
    monkeypatch.setattr(artifact_module, "_created_with", lambda: {"numpy": "0.0"})
    assert write(tmp_path / "b").name == base
    assert write(tmp_path / "c", model_name="renamed").name == base
    fp32 = geometry("smollm2", torch_dtype="float32", max_position_embeddings=99)
    same = [
        PointSpec("tau-0.99", WindowPolicy.uniform(fp32, 256, 4), tau=0.99, fidelity=0.991),
        PointSpec("tau-0.95", WindowPolicy.uniform(fp32, 64, 4), tau=0.95),
    ]
    # max_context belongs to the config's hash, dtype does not
    assert write(tmp_path / "d", points=same).name != base
    geom = geometry("smollm2")
    changed = [
        {"name": "other"},
        {"default_point": "tau-0.95"},
        {"calibration": CALIBRATION},
        {"weight_hashes": {"model.safetensors": "0" * 64}},
        {"points": [PointSpec("tau-0.99", WindowPolicy.uniform(geom, 256, 4), tau=0.99)]},
        {"points": [PointSpec("tau-0.99", WindowPolicy.uniform(geom, 257, 4), tau=0.99)]},
        {"points": [PointSpec("tau-0.99", WindowPolicy.uniform(geom, 256, 3), tau=0.99)]},
    ]
    versions = [write(tmp_path / str(i), **change).name for i, change in enumerate(changed)]
    assert len({*versions, base}) == len(changed) + 1


def test_dtype_alone_does_not_change_the_version(geometry, tmp_path):
    names = set()
    for dtype in ("float32", "bfloat16"):
        policy = WindowPolicy.uniform(geometry("smollm2", torch_dtype=dtype), 64, 4)
        points = [PointSpec("default", policy)]
        names.add(write_artifact(tmp_path / dtype, model_name="m", name="p", points=points).name)
    assert len(names) == 1


def test_known_version_is_stable(geometry, tmp_path):
    # a constant: versions must not move with library releases or machines
    points = [PointSpec("default", WindowPolicy.uniform(geometry("smollm2"), 64, 4))]
    folder = write_artifact(tmp_path, model_name="m", name="p", points=points)
    assert folder.name == "5273a362f8f6"


def test_writing_twice_returns_the_first(write):
    folder = write()
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert write() == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_writing_over_a_damaged_version_is_refused(write):
    folder = write()
    (folder / "policy.safetensors").write_bytes(b"damaged")
    with pytest.raises(PolicyError, match="sha256"):
        write()


# -- strict loading ------------------------------------------------------------------------------


def _drop(name):
    return lambda folder: (folder / name).unlink()


def _set(**fields):
    return lambda folder: edit_manifest(folder, lambda m: m.update(fields))


def _edit(edit):
    return lambda folder: edit_manifest(folder, edit)


def _write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def _append(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b" ")


def _flip_tensor(folder):
    path = folder / "policy.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _tensors(**tensors):
    def replace(folder):
        (folder / "policy.safetensors").write_bytes(save(tensors))
        resign(folder)

    return replace


def _resigned(edit):
    def apply(folder):
        edit_manifest(folder, edit)
        resign(folder)

    return apply


_GOOD = np.full((2, 30, 3), 64, np.int32)
CORRUPTIONS = {
    "no manifest": (_drop("manifest.json"), "is not a policy: no manifest.json"),
    "no tensors": (_drop("policy.safetensors"), "missing file policy.safetensors"),
    "truncated manifest": (_write("manifest.json", b'{"schema_version": 1'), "malformed"),
    "binary manifest": (_write("manifest.json", b"\xff\xfe\x00"), "malformed"),
    "flipped tensor bit": (_flip_tensor, "does not match its sha256"),
    "longer tensor file": (_append("policy.safetensors"), "does not match its sha256"),
    "unlisted file": (_write("notes.txt", b"x"), "not listed in the manifest: notes.txt"),
    "unknown field": (_set(surprise=1), "unknown field `surprise`"),
    "unknown nested field": (_edit(lambda m: m["model"].update(x=1)), "unknown field `x`"),
    "missing field": (_edit(lambda m: m.pop("sinks")), "missing required field `sinks`"),
    "wrong type": (_set(sinks="four"), "Expected `int`"),
    "future schema": (_set(schema_version=2), "schema_version 2 unknown; accepted: 1"),
    "unknown kind": (_set(kinds=["windows", "gate"]), "kinds .* unknown"),
    "edited sinks": (_set(sinks=3), "content does not match version|residency"),
    "edited name": (_set(name="other"), "content does not match version"),
    "edited version": (_set(version="0" * 12), "content does not match version"),
    "edited default": (_set(default_point="tau-0.95"), "content does not match version"),
    "edited tau": (_edit(lambda m: m["points"][0].update(tau=0.5)), "content does not match"),
    "edited geometry": (
        _edit(lambda m: m["model"]["geometry"]["layers"][0].update(head_dim=32)),
        "geometry does not match its hash",
    ),
    "impossible geometry": (
        _edit(lambda m: m["model"]["geometry"].update(layers=[])),
        "malformed: no attention layer",
    ),
    "no tensor hash": (_edit(lambda m: m["files"].clear()), "lists no policy.safetensors"),
    "forged: not safetensors": (
        lambda folder: (
            _write("policy.safetensors", b"junk")(folder),
            _edit(
                lambda m: m["files"].update(
                    {"policy.safetensors": hashlib.sha256(b"junk").hexdigest()}
                )
            )(folder),
        ),
        "not valid safetensors",
    ),
    "forged: missing tensor": (_tensors(window=_GOOD), r"exactly \[windows\], found \['window'\]"),
    "forged: extra tensor": (_tensors(windows=_GOOD, gate=_GOOD), "exactly"),
    "forged: wrong dtype": (_tensors(windows=_GOOD.astype(np.int64)), "must be int32 .* int64"),
    "forged: wrong shape": (_tensors(windows=_GOOD[:1]), r"found int32 \[1, 30, 3\]"),
    "forged: zero window": (_tensors(windows=_GOOD * 0), "point 'tau-0.99': windows of layer 0"),
    "forged: other windows": (_tensors(windows=_GOOD), "recorded residency is not"),
    "forged: negative sinks": (_resigned(lambda m: m.update(sinks=-1)), "sinks must be"),
    "forged: no such default": (_resigned(lambda m: m.update(default_point="x")), "default point"),
    "forged: equal points": (
        _resigned(lambda m: m["points"][1].update(name="tau-0.99")),
        "distinct",
    ),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_each_corruption_is_one_clear_error(what, write):
    corrupt, message = CORRUPTIONS[what]
    folder = write()
    load_artifact(folder)
    corrupt(folder)
    with pytest.raises(PolicyError, match=message) as caught:
        load_artifact(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("other", ["gemma3", "qwen3"])
def test_policy_of_another_model_is_refused_naming_both(other, write, geometry):
    with pytest.raises(PolicyError, match=r"made for smollm2 .*30 layers.*, not for this model"):
        load_artifact(write(), geometry(other))


def test_a_missing_folder_or_a_file_is_not_a_policy(tmp_path, write):
    with pytest.raises(PolicyError, match="is not a policy"):
        load_artifact(tmp_path / "nowhere")
    with pytest.raises(PolicyError, match="is not a policy"):
        load_artifact(write() / "manifest.json")


def test_manifest_has_no_surprises(write):
    text = (write() / "manifest.json").read_text()
    assert text.startswith('{\n  "schema_version": 1') and text.endswith("}\n")
    assert {"numpy", "safetensors", "python"} <= set(json.loads(text)["created_with"])


# -- all-or-nothing writing ----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_nothing(call, error, write, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(artifact_module.os, call, fail)
    expected = PolicyError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write()
    monkeypatch.undo()
    assert [p for p in (tmp_path / "artifacts").rglob("*") if p.is_file()] == []
    load_artifact(write())


def test_a_killed_writer_leaves_nothing_that_can_be_found(write, tmp_path):
    """The process dies without any clean-up, between the files and the rename."""
    program = (
        "import os, sys\n"
        "from kvpolicy.artifact import PointSpec, load_artifact, write_artifact\n"
        "old = load_artifact(sys.argv[1])\n"
        "os.rename = lambda *a: os._exit(9)\n"
        "points = [PointSpec('default', old.policy())]\n"
        "write_artifact(sys.argv[2], model_name='m', name='killed', points=points)\n"
    )
    root = tmp_path / "killed"
    repo = Path(artifact_module.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(write()), str(root)],
        env=os.environ | {"PYTHONPATH": str(repo)},
        timeout=60,
    )
    assert done.returncode == 9
    assert list(root.rglob("manifest.json"))  # it had got as far as its hidden folder
    assert find_folders([root]) == []


def test_losing_a_race_to_the_same_version_is_fine(write, monkeypatch, tmp_path):
    real, race = os.rename, []

    def slow(source, target):
        if not race:
            race.append(True)
            race.append(write())  # the other writer publishes first
        real(source, target)

    monkeypatch.setattr(artifact_module.os, "rename", slow)
    folder = write()
    assert folder == race[1]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert isinstance(load_artifact(folder), Artifact)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "Bad Name"}, "policy name 'Bad Name' is not accepted"),
        ({"model_name": "../up"}, "model name"),
        ({"points": []}, "at least one point"),
        ({"default_point": "x"}, "default point 'x'"),
        ({"extra_files": {"../x": b""}}, "plain, free file name"),
        ({"extra_files": {"manifest.json": b""}}, "plain, free file name"),
    ],
)
def test_bad_arguments_write_nothing(change, message, write, tmp_path):
    with pytest.raises(PolicyError, match=message):
        write(**change)
    assert not list(tmp_path.rglob("*.json"))


def test_points_must_agree(write, geometry):
    smol, other = geometry("smollm2"), geometry("gemma3")
    first = PointSpec("a", WindowPolicy.uniform(smol, 64, 4))
    for second, message in [
        (PointSpec("a", WindowPolicy.uniform(smol, 65, 4)), "distinct names"),
        (PointSpec("b", WindowPolicy.uniform(smol, 64, 3)), "other sinks"),
        (PointSpec("b", WindowPolicy.native(other)), "another model"),
    ]:
        with pytest.raises(PolicyError, match=message):
            write(points=[first, second])


def test_unwritable_root_is_one_error(write, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PolicyError, match="cannot write"):
        write(tmp_path / "file")


def test_manifest_round_trips_exactly(write):
    manifest = read_manifest(write(calibration=CALIBRATION))
    again = msgspec.json.decode(msgspec.json.encode(manifest), type=type(manifest))
    assert again == manifest

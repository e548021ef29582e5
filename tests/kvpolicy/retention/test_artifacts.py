"""Artifacts with retention: round trip, versions, strict loading; those without are unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

import kvpolicy
from kvpolicy.artifact import PointSpec, load_artifact, read_manifest, write_artifact
from kvpolicy.diff import compare
from kvpolicy.errors import PolicyError
from kvpolicy.manifest import RetentionRecord
from kvpolicy.retention import RULES, RetentionRule, RetentionTables
from kvpolicy.store import resolve
from kvpolicy.windows import WindowPolicy
from tests.kvpolicy.forging import edit_manifest, resign
from tests.kvpolicy.retention.tables import COMPILED, compiled, same

SHIPPED = sorted((Path(kvpolicy.__file__).parents[1] / "artifacts").glob("[!.]*/*/*/manifest.json"))


@pytest.fixture
def write(geometry, tmp_path):
    """Factory: write a SmolLM2 artifact with compiled tables under tmp_path."""

    def make(root: Path = tmp_path / "artifacts", **changes) -> Path:
        geom = geometry("smollm2")
        points = [PointSpec("default", WindowPolicy.full(geom))]
        options = {"model_name": "m", "name": "p", "points": points, "retention": compiled(geom)}
        return write_artifact(root, **(options | changes))

    return make


def test_round_trip(write, geometry):
    folder = write(retention_calibration=COMPILED)
    loaded = load_artifact(folder, geometry("smollm2"))
    assert same(loaded.retention, compiled(geometry("smollm2")))
    assert loaded.manifest.kinds == ("windows", "retention")
    assert loaded.manifest.retention == RetentionRecord(RULES["paper"], (128, 512), COMPILED)
    assert loaded.policy() == WindowPolicy.full(geometry("smollm2"))
    manifest = read_manifest(folder)
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=type(manifest)) == manifest


def test_tables_without_a_gate_round_trip(write, geometry):
    tables = RetentionTables.uniform(geometry("smollm2"), RULES["head"])
    assert same(load_artifact(write(retention=tables)).retention, tables)


def test_resolving_gives_the_tables(write, geometry, tmp_path):
    write()
    geom = geometry("smollm2")
    found = resolve("p", geom, [tmp_path / "artifacts"])
    assert same(found.retention, compiled(geom))
    assert resolve("full", geom, []).retention is None


def test_the_version_covers_the_whole_retention_part(write, geometry, tmp_path):
    geom = geometry("smollm2")
    base = compiled(geom)

    def with_tables(**changes) -> dict:
        fields = base.to_tensors() | {"rule": base.rule, "budgets": base.budgets} | changes
        return {"retention": RetentionTables(**fields)}

    changed = [
        {},
        {"retention": None},
        {"retention_calibration": COMPILED},
        {"calibration": COMPILED},
        with_tables(rule=RetentionRule("other")),
        with_tables(rule=RetentionRule("paper", observe=32)),
        with_tables(rule=RetentionRule("paper", keep_window=True)),
        with_tables(budgets=(128, 513)),
        with_tables(gate=base.gate + np.float32(0.01)),
        with_tables(head_weights=base.head_weights * np.float32(1.01)),
        with_tables(entropy_edges=base.entropy_edges * np.float32(1.01)),
        with_tables(perplexity_edges=base.perplexity_edges * np.float32(1.01)),
    ]
    versions = [write(tmp_path / str(i), **change).name for i, change in enumerate(changed)]
    assert len(set(versions)) == len(changed)
    assert write(tmp_path / "again").name == versions[0]


def test_known_version_is_stable(geometry, tmp_path):
    # a constant: versions must not move when a later release adds an option to the rule
    geom = geometry("smollm2")
    tables = RetentionTables.uniform(geom, RULES["head"])
    points = [PointSpec("default", WindowPolicy.full(geom))]
    folder = write_artifact(tmp_path, model_name="m", name="p", points=points, retention=tables)
    assert folder.name == "d4ded44b854a"


# -- policies without retention ------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.parts[-4])
def test_shipped_policies_are_what_they_were(path, tmp_path):
    shipped = load_artifact(path.parent)
    assert shipped.manifest.version == path.parent.name
    manifest = shipped.manifest
    again = write_artifact(
        tmp_path, model_name=manifest.model.name, name=manifest.name,
        points=[PointSpec(p.name, shipped.policy(p.name), p.tau, p.fidelity)
                for p in manifest.points],
        default_point=manifest.default_point, calibration=manifest.calibration,
        weight_hashes=manifest.model.weight_hashes,
        extra_files={f: (path.parent / f).read_bytes()
                     for f in manifest.files if f != "policy.safetensors"},
        retention=shipped.retention,
        retention_calibration=manifest.retention and manifest.retention.calibration,
    )  # fmt: skip
    assert again.name == path.parent.name
    before, after = (json.loads((f / "manifest.json").read_text()) for f in (path.parent, again))
    assert list(after) == list(before), "no field that an older reader does not know"
    rules = [_with_defaults(x.get("retention")) for x in (before, after)]
    same = {"created_with": 0, "retention": 0}
    assert rules[0] == rules[1] and before | same == after | same


def _with_defaults(record: dict | None) -> dict | None:
    """The retention record with every option of its rule, as releases before wrote it."""
    return record and record | {"rule": msgspec.convert(record["rule"], RetentionRule)}


def test_there_are_shipped_policies():
    assert len(SHIPPED) >= 2


# -- strict loading ------------------------------------------------------------------------------


def _manifest(edit):
    return lambda folder: edit_manifest(folder, edit)


def _retention(**changes):
    return _manifest(lambda m: m["retention"].update(changes))


def _rule(**changes):
    return _manifest(lambda m: m["retention"]["rule"].update(changes))


def _tensors(edit):
    """Edit the tensors and forge matching hashes."""

    def apply(folder):
        path = folder / "policy.safetensors"
        tensors = load(path.read_bytes())
        edit(tensors)
        path.write_bytes(save(tensors))
        resign(folder)

    return apply


def _resigned(change):
    def apply(folder):
        change(folder)
        resign(folder)

    return apply


def _truncate(folder):
    path = folder / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


ZEROS = np.zeros((2, 30, 4, 3), np.float32)
CORRUPTIONS = {
    "truncated": (_truncate, "does not match its sha256"),
    "unknown rule field": (_rule(surprise=1), "unknown field `surprise`"),
    "unknown record field": (_retention(surprise=1), "unknown field `surprise`"),
    "no rule": (_manifest(lambda m: m["retention"].pop("rule")), "missing required field `rule`"),
    "unknown choice": (_rule(share="unit"), "malformed: .*share"),
    "impossible option": (_rule(pool=2), "malformed: retention pool must be an odd kernel"),
    "wrong type": (_retention(budgets="512"), "Expected `array`"),
    "other budgets": (_retention(budgets=[128, 256]), "content does not match version"),
    "other rule": (_rule(observe=32), "content does not match version"),
    "kinds without retention": (_manifest(lambda m: m.update(kinds=["windows"])), "kinds"),
    "no retention field": (_manifest(lambda m: m.pop("retention")), "kinds"),
    "neither": (
        _manifest(lambda m: [m.pop("retention"), m.update(kinds=["windows"])]),
        r"must hold exactly \[windows\]",
    ),
    "forged: missing tensor": (_tensors(lambda t: t.pop("gate")), "must hold exactly"),
    "forged: extra tensor": (_tensors(lambda t: t.update(more=ZEROS)), "must hold exactly"),
    "forged: wrong dtype": (
        _tensors(lambda t: t.update(gate=ZEROS.astype(np.float64))),
        "gate must be a float32 array, found float64",
    ),
    "forged: fewer layers": (
        _tensors(lambda t: t.update(head_weights=t["head_weights"][:29], gate=t["gate"][:, :29])),
        r"head_weights must have shape \[30, 3\]",
    ),
    "forged: fewer heads": (
        _tensors(lambda t: t.update(head_weights=t["head_weights"][:, :2])),
        r"head_weights must have shape \[30, 3\]",
    ),
    "forged: fewer bins": (
        _tensors(lambda t: t.update(gate=t["gate"][:, :, :3])),
        r"gate must have shape \[2, 30, 4, 3\]",
    ),
    "forged: fewer budgets": (_resigned(_retention(budgets=[128])), "gate must have shape"),
    "forged: falling edges": (
        _tensors(lambda t: t.update(entropy_edges=t["entropy_edges"][::-1].copy())),
        "entropy_edges must be one ascending row",
    ),
    "forged: not a number": (
        _tensors(lambda t: t.update(head_weights=t["head_weights"] * np.nan)),
        "head_weights holds a value that is not finite",
    ),
    "forged: negative": (_tensors(lambda t: t.update(gate=ZEROS - 1)), "negative threshold"),
    "forged: gate off": (_resigned(_rule(gate="off")), "gate=off, found 2 budgets"),
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


def test_a_field_without_tables_is_refused(write):
    folder = write(retention=None)
    record = {"rule": {"name": "paper"}, "budgets": [512]}
    edit_manifest(folder, lambda m: m.update(retention=record, kinds=["windows", "retention"]))
    with pytest.raises(PolicyError, match=r"must hold exactly .*gate.* found"):
        load_artifact(folder)


def test_tables_of_another_model_write_nothing(write, geometry, tmp_path):
    for change, message in [
        ({"retention": compiled(geometry("gemma3"))}, r"shape \[30, 3\] .* found \[18, 1\]"),
        ({"retention": None, "retention_calibration": COMPILED}, "needs the tables"),
    ]:
        with pytest.raises(PolicyError, match=message):
            write(**change)
    assert not list(tmp_path.rglob("*.json"))


# -- comparing -----------------------------------------------------------------------------------


def test_diff_sees_rule_and_tables(write, geometry, tmp_path):
    geom = geometry("smollm2")
    changed = {
        "none": None,
        "rule": compiled(geom, RetentionRule("paper", floor=3)),
        "tables": compiled(geom, seed=1),
    }
    base = load_artifact(write())
    assert compare(base, load_artifact(write(tmp_path / "again"))).identical
    fields = {}
    for name, tables in changed.items():
        other = load_artifact(write(tmp_path / name, retention=tables))
        found = compare(base, other)
        assert not found.identical
        fields[name] = {difference.field for difference in found.manifest}
    assert fields["rule"] == {"retention floor"}
    assert fields["tables"] == {"retention table head_weights", "retention table gate"}
    assert {"retention", "retention gate", "retention budgets"} <= fields["none"]

"""Retention tables for another model: the mapping's properties, the artifact, ``transfer``."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.artifact import PointSpec, load_artifact, write_artifact
from kvpolicy.diff import compare
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.retention import RULES, RetentionTables
from kvpolicy.transfer import (
    TransferRecord,
    map_heads,
    map_layers,
    nearest,
    transfer_record,
    transfer_tables,
)
from kvpolicy.windows import WindowPolicy
from tests.kvpolicy.forging import edit_manifest, resign
from tests.kvpolicy.retention.tables import COMPILED, compiled, compiled_mix, same

COUNT = st.integers(1, 40)
_KINDS = {"g": LayerKind.GLOBAL, "n": LayerKind.NATIVE, "r": LayerKind.RECURRENT}


def decoder(kinds: str, heads: int = 2) -> ModelGeometry:
    """One layer for each letter: g global, n native, r recurrent."""
    layers = []
    for index, kind in enumerate(kinds):
        sizes = (0, 0, 0, 0) if kind == "r" else (2 * heads, heads, 16, 16)
        layers.append(LayerGeometry(index, _KINDS[kind], *sizes, 32 if kind == "n" else 0))
    return ModelGeometry("TestForCausalLM", "test", tuple(layers), 128, 64, 100, 2)


@st.composite
def decoders(draw) -> ModelGeometry:
    """A decoder with at least one global layer."""
    kinds = draw(st.lists(st.sampled_from("gnr"), max_size=24))
    kinds.insert(draw(st.integers(0, len(kinds))), "g")
    return decoder("".join(kinds), draw(st.integers(1, 9)))


def depth(geometry: ModelGeometry, layer_id: int) -> Fraction:
    """Relative depth of a layer's middle, 0 to 1."""
    return Fraction(2 * layer_id + 1, 2 * len(geometry.layers))


def globals_of(geometry: ModelGeometry) -> list[int]:
    return [layer.layer_id for layer in geometry.layers if layer.kind is LayerKind.GLOBAL]


# -- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "taken"),
    [
        (3, 3, (0, 1, 2)),
        (2, 6, (0, 0, 0, 1, 1, 1)),
        (1, 4, (0, 0, 0, 0)),
        (8, 4, (0, 2, 4, 6)),
        (9, 3, (1, 4, 7)),
        (8, 2, (1, 5)),
        (8, 1, (3,)),
        (2, 3, (0, 0, 1)),
        (3, 2, (0, 2)),
        (3, 8, (0, 0, 0, 1, 1, 2, 2, 2)),
    ],
)
def test_heads_by_hand(source, target, taken):
    assert map_heads(source, target) == taken


@settings(deadline=None)
@given(COUNT, COUNT)
def test_heads_keep_their_order_and_none_is_lost(source, target):
    taken = map_heads(source, target)
    assert len(taken) == target and list(taken) == sorted(taken)
    assert set(taken) <= set(range(source))
    uses = Counter(taken)
    if target >= source:
        assert sorted(uses) == list(range(source))
        assert max(uses.values()) - min(uses.values()) <= 1
    else:
        assert max(uses.values()) == 1


@settings(deadline=None)
@given(COUNT, st.integers(1, 8))
def test_whole_multiples_of_heads(count, k):
    assert map_heads(count, count) == tuple(range(count))
    assert map_heads(count, count * k) == tuple(h // k for h in range(count * k))
    assert map_heads(count * k, count) == tuple(i * k + (k - 1) // 2 for i in range(count))


@settings(deadline=None)
@given(COUNT, COUNT)
def test_heads_come_from_the_nearest_relative_place(source, target):
    for head, taken in enumerate(map_heads(source, target)):
        place = Fraction(2 * head + 1, 2 * target)
        apart = [abs(Fraction(2 * other + 1, 2 * source) - place) for other in range(source)]
        assert taken == apart.index(min(apart))


def test_of_two_as_near_the_lower_is_taken():
    assert nearest(0, 1, [0, 1], 2) == 0
    assert map_layers(decoder("gg"), decoder("g")) == {0: 0}


# -- layers --------------------------------------------------------------------------------------


def test_layers_by_hand(geometry):
    gemma, smollm2 = geometry("gemma3"), geometry("smollm2")
    # middles of layers 5, 11 and 17 of 18: at .306, .639 and .972 of the depth
    assert map_layers(smollm2, gemma) == {5: 9, 11: 19, 17: 29}
    back = map_layers(gemma, smollm2)
    assert list(back) == list(range(30))
    assert Counter(back.values()) == {5: 14, 11: 10, 17: 6}
    assert [back[13], back[14], back[23], back[24]] == [5, 11, 11, 17]
    hybrid = geometry("qwen3_next")
    assert map_layers(smollm2, hybrid) == {
        3: 2, 7: 4, 11: 7, 15: 9, 19: 12, 23: 14, 27: 17, 31: 19, 35: 22, 39: 24, 43: 27, 47: 29,
    }  # fmt: skip


@settings(deadline=None)
@given(decoders(), decoders())
def test_depth_is_monotone_and_nearest(source, target):
    found = map_layers(source, target)
    assert list(found) == globals_of(target)
    assert list(found.values()) == sorted(found.values())
    for ours, theirs in found.items():
        apart = [abs(depth(source, s) - depth(target, ours)) for s in globals_of(source)]
        assert theirs == globals_of(source)[apart.index(min(apart))]


@settings(deadline=None)
@given(decoders())
def test_equal_shapes_map_to_themselves(geom):
    assert map_layers(geom, geom) == {layer: layer for layer in globals_of(geom)}


@settings(deadline=None)
@given(COUNT, COUNT)
def test_of_global_layers_none_is_lost_or_doubled_in_vain(source, target):
    taken = list(map_layers(decoder("g" * source), decoder("g" * target)).values())
    assert len(set(taken)) == min(source, target)


@pytest.mark.parametrize(("source", "target"), [("nn", "g"), ("g", "nrn")])
def test_without_global_layers_there_is_no_mapping(source, target):
    with pytest.raises(PolicyError, match="global"):
        map_layers(decoder(source), decoder(target))


# -- tables --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(decoders(), decoders())
def test_every_number_is_that_of_its_source(source, target):
    tables = compiled(source)
    record = transfer_record("p@v", "m", source, target)
    found = transfer_tables(tables, source, target, record)
    found.check_fits(target)
    record.check_fits(target)
    layers, heads = map_layers(source, target), record.source_heads
    for row, layer in enumerate(target.attention_layers):
        weights, gate = found.head_weights[row].tolist(), found.gate[:, row]
        if layer.layer_id not in layers:
            assert set(weights) == {1} and set(gate.flat) == {tables.gate.min()}
            continue
        other = source.attention_index(layers[layer.layer_id])
        mapped = heads[record.target_layers.index(layer.layer_id)]
        for head in range(layer.num_kv_heads):
            assert weights[head] == tables.head_weights[other, mapped[head]]
        assert np.array_equal(gate, tables.gate[:, other])
    assert (found.rule, found.budgets) == (tables.rule, tables.budgets)
    assert np.array_equal(found.entropy_edges, tables.entropy_edges)
    assert np.array_equal(found.perplexity_edges, tables.perplexity_edges)


def test_equal_shapes_keep_the_tables(geometry):
    source = geometry("smollm2")
    other = geometry("smollm2", vocab_size=1000)
    record = transfer_record("p@v", "m", source, other)
    assert same(transfer_tables(compiled(source), source, other, record), compiled(source))


def test_tables_without_a_gate_transfer(geometry):
    source, target = geometry("smollm2"), geometry("gemma3")
    tables = RetentionTables.uniform(source, RULES["head"], weight=1.25)
    record = transfer_record("p@v", "m", source, target)
    found = transfer_tables(tables, source, target, record)
    assert found.gate.shape == (0, 18, 1, 1) and found.budgets == ()
    assert np.flatnonzero(found.head_weights[:, 0] == 1.25).tolist() == [5, 11, 17]


def test_layers_of_other_head_counts_map_one_by_one():
    wide, narrow = decoder("gg", 4), decoder("gg", 2)
    source = msgspec.structs.replace(wide, layers=(wide.layers[0], narrow.layers[1]))
    record = transfer_record("p@v", "m", source, decoder("gg", 4))
    assert record.source_heads == ((0, 1, 2, 3), (0, 0, 1, 1))
    tables = compiled(source)
    found = transfer_tables(tables, source, decoder("gg", 4), record)
    assert found.head_weights[1].tolist() == tables.head_weights[1, [0, 0, 1, 1]].tolist()


# -- artifacts -----------------------------------------------------------------------------------


@pytest.fixture
def source(geometry, tmp_path):
    """Factory: a SmolLM2 artifact with compiled tables, under ``artifacts``."""

    def make(**changes) -> Path:
        geom = geometry("smollm2")
        points = [PointSpec("default", WindowPolicy.full(geom))]
        options = {
            "model_name": "smollm2", "name": "cql", "points": points, "retention": compiled(geom),
            "retention_calibration": COMPILED,
        }  # fmt: skip
        return write_artifact(tmp_path / "artifacts", **(options | changes))

    return make


@pytest.fixture
def moved(ok, source, model_dir):
    """Factory: the folder that ``transfer`` to a named model writes."""

    def make(model: str = "gemma3", *options: object) -> Path:
        args = ("--policy", source(), "--to", model_dir(model), "--out", "out", *options)
        return Path(ok("transfer", *args).strip())

    return make


def test_what_is_written_loads_and_says_where_it_is_from(source, moved, geometry, model_dir, ok):
    folder, origin = moved(), load_artifact(source())
    found = load_artifact(folder, geometry("gemma3"))
    assert folder.parts[-4:-1] == ("out", "gemma3", "cql-transferred")
    assert found.manifest.retention.transferred == TransferRecord(
        policy=origin.policy_id, model="smollm2",
        geometry_hash=geometry("smollm2").fingerprint(),
        config_hash=geometry("smollm2").config_hash,
        target_layers=(5, 11, 17), source_layers=(9, 19, 29), source_heads=((1,), (1,), (1,)),
        method="relative depth and head order", measured_on_target=False,
    )  # fmt: skip
    assert found.manifest.retention.calibration == COMPILED
    assert found.manifest.calibration is None
    assert found.policy() == WindowPolicy.native(geometry("gemma3"))
    weights = origin.retention.head_weights
    assert found.retention.head_weights[[5, 11, 17], 0].tolist() == weights[[9, 19, 29], 1].tolist()
    assert "measured_on_target" in (folder / "manifest.json").read_text()
    assert "ok: " in ok("verify", folder, "--model", model_dir("gemma3"))
    assert moved() == folder


def test_a_transferred_mix_loads_and_says_so(source, moved, model_dir, geometry, ok):
    tables = compiled_mix(geometry("smollm2"))
    origin = source(name="mix", retention=tables)
    args = ("--policy", origin, "--to", model_dir("gemma3"), "--out", "out")
    folder = Path(ok("transfer", *args).strip())
    found = load_artifact(folder, geometry("gemma3")).retention
    assert (found.mix.shares[:, [5, 11, 17], 0] == tables.mix.shares[:, [9, 19, 29], 1]).all()
    queries = list(map_heads(9, 4))
    expected = tables.mix.query_weights[[9, 19, 29]][:, queries]
    assert (found.mix.query_weights[[5, 11, 17]] == expected).all()
    shown = ok("show", folder)
    assert "transferred from mix@" in shown and "heads that keep most" in shown
    assert "transferred from mix@" in ok("verify", folder, "--model", model_dir("gemma3"))


def test_show_list_and_verify_say_so(source, moved, ok):
    origin, folder = load_artifact(source()), moved("qwen3")
    said = (
        f"transferred from {origin.policy_id} (smollm2) by relative depth and head order; "
        "not measured on this model"
    )
    shown = ok("show", folder)
    for text in (
        said, "layers (ours<-theirs): 0<-0 1<-1", "27<-29", "heads, in our order: 0,0,0,1,1,2,2,2",
        "tables compiled for smollm2 by cql: 5 prompts",
    ):  # fmt: skip
        assert text in shown
    assert said in ok("verify", folder)
    assert said in " ".join(ok("list", "--root", "out").split())
    assert "transferred" not in ok("show", source()) + ok("verify", source())


def test_the_version_covers_the_transfer(source, moved, geometry, tmp_path):
    found = load_artifact(moved())
    record = found.manifest.retention.transferred
    options = {
        "model_name": "gemma3", "name": found.manifest.name, "retention": found.retention,
        "retention_calibration": COMPILED,
        "points": [PointSpec("default", WindowPolicy.native(geometry("gemma3")))],
    }  # fmt: skip
    changes = {
        "policy": "other@0", "geometry_hash": "0", "config_hash": "0", "method": "by hand",
        "source_layers": (9, 19, 28), "source_heads": ((0,), (1,), (1,)),
        "measured_on_target": True,
    }  # fmt: skip
    records = [None, record]
    records += [msgspec.structs.replace(record, **{k: v}) for k, v in changes.items()]
    versions = [
        write_artifact(tmp_path / str(i), transferred=r, **options).name
        for i, r in enumerate(records)
    ]
    assert len(set(versions)) == len(records)
    assert versions[1] == found.manifest.version
    # as with the model itself, a folder's name is no part of it
    renamed = msgspec.structs.replace(record, model="another-folder")
    again = write_artifact(tmp_path / "again", transferred=renamed, **options)
    assert again.name == found.manifest.version


FORGED = {
    "layers": ({"target_layers": [4, 11, 17]}, "does not map this model's layers"),
    "heads": ({"source_heads": [[1], [1], [1, 2]]}, "does not map this model's layers"),
    "fewer": ({"source_layers": [9, 19]}, "needs one source layer"),
    "unknown": ({"surprise": 1}, "unknown field `surprise`"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_mapping_is_refused(what, moved):
    changes, message = FORGED[what]
    folder = moved()
    edit_manifest(folder, lambda m: m["retention"]["transferred"].update(changes))
    if what in ("layers", "heads"):
        resign(folder)
    with pytest.raises(PolicyError, match=message) as caught:
        load_artifact(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_an_edited_mapping_is_refused(moved):
    folder = moved()
    edit_manifest(folder, lambda m: m["retention"]["transferred"].update(policy="cql@other"))
    with pytest.raises(PolicyError, match="content does not match version"):
        load_artifact(folder)


def test_a_transfer_without_tables_is_refused(geometry, tmp_path):
    geom = geometry("gemma3")
    record = transfer_record("p@v", "m", geometry("smollm2"), geom)
    points = [PointSpec("default", WindowPolicy.native(geom))]
    with pytest.raises(PolicyError, match="needs the tables"):
        write_artifact(tmp_path, model_name="m", name="n", points=points, transferred=record)


def test_merging_keeps_the_label_and_diff_sees_it(moved, calibrated, ok, tmp_path):
    windows = calibrated("gemma3").write(tmp_path / "w", files={})
    folder = moved()
    merged = ok("merge", "--windows", windows, "--retention", folder, "--out", "both").strip()
    transferred = load_artifact(folder).manifest.retention.transferred
    assert load_artifact(merged).manifest.retention.transferred == transferred
    plain = write_artifact(
        tmp_path / "plain", model_name="gemma3", name="plain",
        points=[PointSpec("default", WindowPolicy.native(load_artifact(folder).geometry))],
        retention=load_artifact(folder).retention,
    )  # fmt: skip
    fields = {d.field for d in compare(load_artifact(folder), load_artifact(plain)).manifest}
    assert "retention transferred" in fields


# -- the command ---------------------------------------------------------------------------------


def test_found_by_name_among_all_models(source, ok, run, model_dir):
    version = source().name
    for spec in ("cql", f"cql@{version}"):
        args = ("--policy", spec, "--to", model_dir("gemma3"), "--name", "mine", "--out", "out")
        assert load_artifact(ok("transfer", *args).strip()).manifest.name == "mine"
    source(model_name="twin", retention_calibration=None)
    status, _, err = run("transfer", "--policy", "cql", "--to", model_dir("gemma3"), "--out", "out")
    assert status == 2 and "ambiguous" in err and f"cql@{version} (smollm2)" in err


def test_windows_stay_behind_and_that_is_said(calibrated, geometry, run, model_dir, tmp_path):
    made = calibrated()
    folder = write_artifact(
        tmp_path / "w", model_name="m", name="both", retention=compiled(made.geom),
        points=[PointSpec("default", WindowPolicy(made.geom, made.windows[0], 4))],
    )  # fmt: skip
    status, out, err = run(
        "transfer", "--policy", folder, "--to", model_dir("gemma3"), "--out", "out"
    )
    assert (status, err.count("\n")) == (0, 1) and "windows do not transfer" in err
    assert load_artifact(out.strip()).policy() == WindowPolicy.native(geometry("gemma3"))


BAD = [
    (("--policy", "{windows}"), "has no retention tables"),
    (("--policy", "full"), "'full' is built in and has no retention tables"),
    (("--policy", "{moved}", "--to", "{qwen3}"), "was itself transferred; transfer cql@"),
    (("--policy", "{cql}", "--to", "{smollm2}"), "was made for this model"),
    (("--policy", "{cql}", "--to", "{mistral}"), "no layer of this model is global"),
    (("--policy", "{cql}", "--to", "nowhere"), "no config.json in nowhere"),
    (("--policy", "{cql}", "--name", "A b"), "not accepted"),
    (("--policy", "{cql}", "--name", "native"), "taken by a built-in"),
    (("--policy", "elsewhere"), "no policy 'elsewhere' found"),
    (("--policy", "./elsewhere"), "no policy './elsewhere'"),
    ((), "required: --policy"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_refuses_in_one_line(args, message, run, source, moved, calibrated, model_dir, tmp_path):
    names = {
        "cql": source(), "windows": calibrated().write(tmp_path / "w"), "moved": moved(),
        **{name: model_dir(name) for name in ("qwen3", "smollm2", "mistral", "gemma3")},
    }  # fmt: skip
    given_to = () if "--to" in args else ("--to", names["gemma3"])
    filled = (arg.format(**names) for arg in args)
    status, out, err = run("transfer", "--out", "o", *given_to, *filled)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert not (tmp_path / "o").exists()


def test_tables_of_a_model_without_global_layers_go_nowhere(geometry, run, model_dir, tmp_path):
    geom = geometry("mistral")
    folder = write_artifact(
        tmp_path / "a", model_name="m", name="p", retention=compiled(geom),
        points=[PointSpec("default", WindowPolicy.native(geom))],
    )  # fmt: skip
    status, _, err = run("transfer", "--policy", folder, "--to", model_dir("gemma3"), "--out", "o")
    assert (status, err.count("\n")) == (2, 1) and "no global layer to take them from" in err

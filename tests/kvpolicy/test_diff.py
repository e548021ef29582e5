"""Comparing points: which windows differ, rank correlation, origin."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvpolicy.artifact import PointSpec, load_artifact, write_artifact
from kvpolicy.diff import average_ranks, compare, spearman
from kvpolicy.errors import PolicyError
from kvpolicy.residency import residency
from kvpolicy.windows import FULL, WindowPolicy

VECTORS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        *[arrays.arrays(np.int32, n, elements=st.sampled_from((64, 128, 512, FULL)))] * 2
    )
)


def written(root, windows, sinks=4, name="made"):
    points = [PointSpec(f"p{i}", policy) for i, policy in enumerate(windows)]
    return load_artifact(write_artifact(root, model_name="m", name=name, points=points))


@settings(deadline=None)
@given(VECTORS)
def test_ranks_are_counted_one_by_one(pair):
    values = pair[0]
    expected = [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]
    assert average_ranks(values).tolist() == expected


@settings(deadline=None)
@given(VECTORS)
def test_spearman_is_scipys(pair):
    stats = pytest.importorskip("scipy.stats")
    a, b = pair
    mine = spearman(a, b)
    if len(set(a.tolist())) == 1 or len(set(b.tolist())) == 1:
        assert mine is None
    else:
        assert mine == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_spearman_by_hand():
    a = np.array([64, 128, 256, FULL], dtype=np.int32)
    assert spearman(a, a * 0 + 5) is None
    assert spearman(a, a) == 1.0 and spearman(a, a[::-1]) == -1.0
    # ranks 1 2 3 4 against 1.5 1.5 3 4
    b = np.array([10, 10, 20, 30], dtype=np.int32)
    assert spearman(a, b) == pytest.approx(4.5 / math.sqrt(5 * 4.5), abs=1e-12)
    # full is the largest window whatever the distance
    c = np.array([64, 128, 256, 512], dtype=np.int32)
    assert spearman(a, c) == 1.0


def test_points_of_one_artifact(calibrated, tmp_path):
    made = calibrated("gemma3")
    found = load_artifact(made.write(tmp_path))
    result = compare(found, found, "tau-0.95", "tau-0.995")
    globals_ = [layer.layer_id for layer in made.geom.layers if layer.native_window == 0]
    assert {c.layer_id for c in result.changes} == set(globals_)
    for change in result.changes:
        row = made.geom.attention_index(change.layer_id)
        windows = made.windows[[0, 2], row, change.head].tolist()
        assert [change.window_a, change.window_b] == windows
    assert [entry.field for entry in result.manifest] == ["tau", "fidelity"]
    for context, shares in result.residency.items():
        policies = (found.policy("tau-0.95"), found.policy("tau-0.995"))
        assert shares == tuple(residency(policy, made.geom, context) for policy in policies)
    assert list(result.residency)[-1] == made.geom.max_context
    assert not result.identical


def test_native_layers_take_no_part_in_the_correlation(geometry, tmp_path):
    geom = geometry("gemma3")
    windows = WindowPolicy.native(geom).windows.copy()
    rows = [i for i, layer in enumerate(geom.attention_layers) if layer.native_window == 0]
    a, b = windows.copy(), windows.copy()
    a[rows, 0], b[rows, 0] = (64, 128, 256), (256, 128, 64)
    found = written(tmp_path, [WindowPolicy(geom, a, 4), WindowPolicy(geom, b, 4)])
    assert compare(found, found, "p0", "p1").spearman == -1.0


def test_equal_windows_of_another_calibration_are_not_identical(calibrated, tmp_path):
    made = calibrated()
    a = load_artifact(made.write(tmp_path / "a"))
    assert compare(a, a).identical
    made.record = type(made.record)(
        "seqcalib", {"bible": "ab" * 32, "novel": "34" * 32}, 7, 10240, 0, "ef" * 20,
        {"length": 4096, "codebook": [64, 256, 1024]},
    )  # fmt: skip
    result = compare(a, load_artifact(made.write(tmp_path / "b")))
    assert not result.changes and not result.identical
    assert {(d.field, d.a, d.b) for d in result.manifest} == {
        ("prompts", "5", "7"),
        ("corpus code", "cd" * 32, None),
        ("corpus novel", None, "34" * 32),
        ("setting length", "2048", "4096"),
    }


def test_sinks_and_calibration_are_part_of_the_origin(calibrated, geometry, tmp_path):
    made = calibrated()
    a = load_artifact(made.write(tmp_path))
    b = written(tmp_path, [WindowPolicy(geometry("smollm2"), made.windows[1], 0)])
    fields = {d.field: (d.a, d.b) for d in compare(a, b).manifest}
    assert fields["sinks"] == ("4", "0") and fields["method"] == ("seqcalib", "not calibrated")


def test_other_models_and_unknown_points_are_refused(calibrated, tmp_path):
    a = load_artifact(calibrated("smollm2").write(tmp_path))
    b = load_artifact(calibrated("qwen3").write(tmp_path))
    with pytest.raises(PolicyError, match=r"different models: LlamaFor.* and Qwen3For"):
        compare(a, b)
    with pytest.raises(PolicyError, match="no point 'odd'"):
        compare(a, a, "tau-0.99", "odd")

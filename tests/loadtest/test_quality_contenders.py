"""Baselines keep as much as their point, whatever the model and the policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.artifact import PointSpec, load_artifact, write_artifact
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.residency import residency
from kvpolicy.store import ResolvedPolicy
from kvpolicy.windows import FULL, WindowPolicy
from loadtest.errors import UserError
from loadtest.quality_contenders import (
    Baselines,
    Kind,
    choose_points,
    line_up,
    parse_baselines,
    shuffled_like,
    uniform_like,
)

NATIVE = 24
CONTEXT = 200


@st.composite
def policies(draw) -> WindowPolicy:
    """Any mix of global, sliding and recurrent layers, with any windows and sinks."""
    kinds = draw(st.lists(st.sampled_from(list(LayerKind)), min_size=1, max_size=5))
    kinds.append(LayerKind.GLOBAL)
    layers = tuple(_layer(i, kind, draw(st.integers(1, 3))) for i, kind in enumerate(kinds))
    geometry = ModelGeometry("X", "llama", layers, 4096, 32, 64, 4)
    windows = WindowPolicy.native(geometry).windows.copy()
    for row, layer in zip(windows, geometry.attention_layers, strict=True):
        if layer.kind is LayerKind.GLOBAL:
            size = st.one_of(st.integers(1, 2 * CONTEXT), st.just(FULL))
            row[: layer.num_kv_heads] = [draw(size) for _ in range(layer.num_kv_heads)]
    return WindowPolicy(geometry, windows, draw(st.integers(0, 20)))


def _layer(index: int, kind: LayerKind, heads: int) -> LayerGeometry:
    if kind is LayerKind.RECURRENT:
        return LayerGeometry(index, kind, state_bytes=64)
    window = NATIVE if kind is LayerKind.NATIVE else 0
    return LayerGeometry(index, kind, 2 * heads, heads, 8, 8, window)


def kept(policy: WindowPolicy) -> int:
    """Keys that the last query of CONTEXT tokens reads in all global units, one by one."""
    total = 0
    for unit, window in enumerate(policy.for_units().tolist()):
        if policy.geometry.layer_of_unit(unit).kind is LayerKind.GLOBAL:
            first = max(0, CONTEXT - window)
            total += len({*range(first, CONTEXT), *range(min(policy.sinks, CONTEXT))})
    return total


def native_cells(policy: WindowPolicy) -> np.ndarray:
    is_native = [layer.kind is LayerKind.NATIVE for layer in policy.geometry.attention_layers]
    return policy.windows[np.array(is_native)]


@settings(max_examples=150, deadline=None)
@given(policies())
def test_uniform_is_the_smallest_window_that_keeps_no_less(policy):
    uniform = uniform_like(policy, CONTEXT)
    cells = {w for w in uniform.windows.flat if w} - {NATIVE}
    assert kept(uniform) >= kept(policy) and uniform.sinks == policy.sinks
    assert len(cells) <= 1
    np.testing.assert_array_equal(native_cells(uniform), native_cells(policy))
    window = max(uniform.for_units()[_global_units(policy)])
    if window > 1:
        smaller = WindowPolicy.uniform(policy.geometry, int(window) - 1, policy.sinks)
        assert kept(smaller) < kept(policy)


def _global_units(policy: WindowPolicy) -> list[int]:
    geometry = policy.geometry
    return [
        unit
        for unit in range(geometry.num_units)
        if geometry.layer_of_unit(unit).kind is LayerKind.GLOBAL
    ]


@settings(max_examples=150, deadline=None)
@given(policies(), st.integers(0, 5), st.integers(1, 5))
def test_shuffled_has_the_same_windows_and_keeps_exactly_as_much(policy, seed, number):
    shuffled = shuffled_like(policy, seed, number)
    units = _global_units(policy)
    assert sorted(shuffled.for_units()[units]) == sorted(policy.for_units()[units])
    assert residency(shuffled, policy.geometry, CONTEXT) == residency(
        policy, policy.geometry, CONTEXT
    )
    assert shuffled.sinks == policy.sinks
    np.testing.assert_array_equal(native_cells(shuffled), native_cells(policy))
    np.testing.assert_array_equal(shuffled.windows, shuffled_like(policy, seed, number).windows)


def test_shuffles_differ_by_number_and_seed():
    policy = WindowPolicy(llama(), np.arange(1, 61, dtype=np.int32).reshape(20, 3), 4)
    drawn = [shuffled_like(policy, *key).windows for key in ((0, 1), (0, 2), (1, 1))]
    drawn.append(policy.windows)
    assert len({matrix.tobytes() for matrix in drawn}) == 4


def llama() -> ModelGeometry:
    layers = tuple(LayerGeometry(i, LayerKind.GLOBAL, 9, 3, 8, 8) for i in range(20))
    return ModelGeometry("X", "llama", layers, 4096, 32, 64, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Baselines(False, 0)),
        ("uniform", Baselines(True, 0)),
        ("shuffled", Baselines(False, 1)),
        ("shuffled:2,uniform", Baselines(True, 2)),
    ],
)
def test_baselines_are_understood(text, expected):
    assert parse_baselines(text) == expected


@pytest.mark.parametrize("text", ["", "random", "shuffled:0", "shuffled:21", "uniform;shuffled"])
def test_other_baselines_are_refused(text):
    with pytest.raises(UserError, match=r"--baselines .* give uniform, shuffled or shuffled:K"):
        parse_baselines(text)


@pytest.fixture
def found(tmp_path) -> ResolvedPolicy:
    """Points tau-0.95 (all 64) and tau-0.99 (half full)."""
    geometry = llama()
    half = np.full((20, 3), FULL, dtype=np.int32)
    half[::2] = 64
    points = [
        PointSpec("tau-0.95", WindowPolicy.uniform(geometry, 64, 4)),
        PointSpec("tau-0.99", WindowPolicy(geometry, half, 4)),
        PointSpec("tau-0.995", WindowPolicy.uniform(geometry, FULL, 4)),
    ]
    folder = write_artifact(tmp_path, model_name="m", name="p", points=points)
    artifact = load_artifact(folder)
    return ResolvedPolicy("p@1", artifact.policy(), artifact, "tau-0.95")


@pytest.mark.parametrize(
    ("asked", "beside", "expected"),
    [
        (None, None, (["tau-0.95", "tau-0.99", "tau-0.995"], "tau-0.99")),
        (["tau-0.995", "tau-0.95"], None, (["tau-0.95", "tau-0.995"], "tau-0.995")),
        (["tau-0.95"], "tau-0.99", (["tau-0.95", "tau-0.99"], "tau-0.99")),
    ],
)
def test_points_are_chosen_and_the_baselines_point_is_among_them(found, asked, beside, expected):
    assert choose_points(found, asked, beside) == expected


@pytest.mark.parametrize(
    ("asked", "beside", "says"),
    [
        (["tau-1"], None, "--point 'tau-1' is not in the policy; it has: tau-0.95, tau-0.99"),
        (None, "best", "--baseline-point 'best' is not in the policy"),
    ],
)
def test_unknown_points_are_refused(found, asked, beside, says):
    with pytest.raises(UserError, match=says):
        choose_points(found, asked, beside)


def test_a_built_in_policy_has_no_points():
    built_in = ResolvedPolicy("native", WindowPolicy.native(llama()))
    with pytest.raises(UserError, match="--policy native is built in and has no points"):
        choose_points(built_in, None, None)


def test_all_contenders_in_order(found):
    entries = line_up(
        found, llama(), ["tau-0.95", "tau-0.99"], "tau-0.99", Baselines(True, 2), 1000, 0
    )
    assert [(e.name, e.kind, e.beside) for e in entries] == [
        ("full", Kind.FULL, None),
        ("tau-0.95", Kind.POINT, None),
        ("tau-0.99", Kind.POINT, None),
        ("uniform", Kind.UNIFORM, "tau-0.99"),
        ("shuffled-1", Kind.SHUFFLED, "tau-0.99"),
        ("shuffled-2", Kind.SHUFFLED, "tau-0.99"),
    ]
    shares = [round(residency(e.policy, llama(), 1000), 3) for e in entries]
    assert shares == [1.0, 0.068, 0.534, 0.534, 0.534, 0.534]

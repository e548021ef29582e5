"""Window policies: units, levels, sinks and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.errors import PolicyError
from kvpolicy.windows import FULL, WindowPolicy


def test_full_stores_everything_but_attends_natively(geometry):
    policy = WindowPolicy.full(geometry("gemma3"))
    assert [(k.window, k.sinks, len(k.units)) for k in policy.levels()] == [(FULL, 0, 18)]
    attended = policy.attention_for_units()
    assert attended.dtype == np.int32
    assert attended.tolist() == ([512] * 5 + [FULL]) * 3


def test_native_windows_only_native_layers(geometry):
    policy = WindowPolicy.native(geometry("gemma3"))
    assert policy.for_units().tolist() == ([512] * 5 + [FULL]) * 3
    native, full = policy.levels()
    assert (native.window, native.sinks, len(native.units)) == (512, 0, 15)
    assert (full.window, full.sinks, full.units) == (FULL, 0, (5, 11, 17))
    assert full.is_full and not native.is_full


def test_uniform_leaves_native_layers_alone_and_gives_them_no_sinks(geometry):
    policy = WindowPolicy.uniform(geometry("gemma3"), 512, 4)
    # equal windows, different sinks: two levels
    assert [(k.index, k.window, k.sinks) for k in policy.levels()] == [(0, 512, 0), (1, 512, 4)]
    assert policy.levels()[1].units == (5, 11, 17)
    assert policy.sinks_for_units().tolist() == ([0] * 5 + [4]) * 3


def test_levels_partition_units_of_a_mixed_policy(geometry):
    geom = geometry("smollm2")
    windows = np.full((30, 3), FULL, dtype=np.int32)
    windows[:10, 0], windows[5:, 2] = 64, 1024
    levels = WindowPolicy(geom, windows, 4).levels()
    assert [(k.window, k.sinks) for k in levels] == [(64, 4), (1024, 4), (FULL, 0)]
    assert sorted(unit for k in levels for unit in k.units) == list(range(90))
    for level in levels:
        for unit in level.units:
            layer, head = geom.head_of(unit)
            assert windows[layer, head] == level.window


def test_window_beyond_the_context_is_not_full(geometry):
    geom = geometry("smollm2")
    policy = WindowPolicy.uniform(geom, geom.max_context * 2, 0)
    assert [k.window for k in policy.levels()] == [geom.max_context * 2]
    assert WindowPolicy.uniform(geom, FULL).levels()[0].is_full


def test_recurrent_layers_have_no_units(geometry):
    policy = WindowPolicy.uniform(geometry("qwen3_6_27b"), 100)
    assert policy.windows.shape == (16, 4)
    assert policy.for_units().shape == (64,)


def test_policy_is_immutable_and_does_not_alias_its_input(geometry):
    windows = np.full((30, 3), 64, dtype=np.int32)
    policy = WindowPolicy(geometry("smollm2"), windows)
    windows[0, 0] = 128
    assert policy.windows[0, 0] == 64
    with pytest.raises(ValueError, match="read-only"):
        policy.windows[0, 0] = 1


def test_equality_is_by_model_windows_and_sinks(geometry):
    geom = geometry("smollm2")
    assert WindowPolicy.uniform(geom, 64, 4) == WindowPolicy.uniform(geom, 64, 4)
    assert WindowPolicy.uniform(geom, 64, 4) != WindowPolicy.uniform(geom, 64, 3)
    assert WindowPolicy.uniform(geom, 64, 4) != WindowPolicy.uniform(geom, 65, 4)


@pytest.mark.parametrize("window", [0, -1, FULL + 1, 2.5, True, None])
def test_uniform_refuses_bad_windows(window, geometry):
    with pytest.raises(PolicyError, match="window must be"):
        WindowPolicy.uniform(geometry("smollm2"), window)


@pytest.mark.parametrize("sinks", [-1, 1.0, True])
def test_bad_sinks_are_refused(sinks, geometry):
    with pytest.raises(PolicyError, match="sinks must be"):
        WindowPolicy.uniform(geometry("smollm2"), 64, sinks)


@pytest.mark.parametrize(
    "windows, message",
    [
        (np.ones((30, 3), np.int64), "int32 array, found int64"),
        ([[1]], "int32 array, found list"),
        (np.ones((29, 3), np.int32), r"shape \[30, 3\], found \[29, 3\]"),
        (np.zeros((30, 3), np.int32), "layer 0 must be positive"),
    ],
)
def test_bad_matrices_are_refused(windows, message, geometry):
    with pytest.raises(PolicyError, match=message):
        WindowPolicy(geometry("smollm2"), windows)


def test_a_policy_must_keep_native_windows(geometry):
    geom = geometry("gemma3")
    windows = WindowPolicy.native(geom).windows.copy()
    windows[0, 0] = 256
    with pytest.raises(PolicyError, match=r"native window of 512.*found 256"):
        WindowPolicy(geom, windows)

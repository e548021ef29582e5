"""The budget selector against a brute-force reading of its rule."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.artifact import Artifact, load_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import geometry_from_config
from kvpolicy.manifest import Manifest, ModelRecord, Point
from kvpolicy.select import Selection, select_point
from kvpolicy.windows import FULL

LONGEST = 48
SINKS = 3
# two layers with 2 kv heads, the first of them native: it must not count
GEOMETRY = geometry_from_config(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "sliding_window": 5,
        "max_position_embeddings": LONGEST,
        "vocab_size": 8,
    }
)
HEADS = 4  # global ones


def artifact(points: list[tuple[str, float | None, tuple[int, ...]]]) -> Artifact:
    """An artifact in memory; each point is its name, tau, and windows of the global heads."""
    windows = np.array(
        [[(5, 5), chosen[:2], chosen[2:]] for _, _, chosen in points], dtype=np.int32
    )
    model = ModelRecord("m", GEOMETRY.fingerprint(), "", GEOMETRY)
    # recorded residencies are wrong on purpose: the selector must compute them
    records = tuple(Point(name, {2048: 0.0}, tau) for name, tau, _ in points)
    name = points[0][0]
    manifest = Manifest(1, "p", "0", ("windows",), model, None, SINKS, records, name, {}, {})
    return Artifact(Path("nowhere"), manifest, windows)


def kept_share(windows: tuple[int, ...], context: int) -> Fraction:
    """Keys that the last query reads, counted one by one."""
    last = context - 1
    kept = sum(
        key < SINKS or last - window + 1 <= key for window in windows for key in range(context)
    )
    return Fraction(kept, HEADS * context)


def beats(a, b, context: int) -> bool:
    """Whether point ``a`` is to be chosen over ``b``."""
    (name_a, tau_a, windows_a), (name_b, tau_b, windows_b) = a, b
    if tau_a != tau_b:
        return tau_b is None or (tau_a is not None and tau_a > tau_b)
    share_a, share_b = kept_share(windows_a, context), kept_share(windows_b, context)
    return share_a < share_b if share_a != share_b else name_a < name_b


WINDOWS = st.sampled_from((1, 4, 7, 16, LONGEST, FULL))
POINT = st.tuples(
    st.sampled_from("abcdefgh"),
    st.sampled_from((None, 0.9, 0.95, 0.99)),
    st.tuples(WINDOWS, WINDOWS, WINDOWS, WINDOWS),
)
POINTS = st.lists(POINT, min_size=1, max_size=6, unique_by=lambda point: point[0])


@settings(deadline=None)
@given(POINTS, st.integers(1, 1000), st.integers(1, LONGEST))
def test_it_chooses_as_the_rule_says(points, thousandths, context):
    budget = Fraction(thousandths, 1000)
    fitting = [p for p in points if kept_share(p[2], context) <= budget]
    if not fitting:
        least = min((kept_share(p[2], context), p[0]) for p in points)
        with pytest.raises(PolicyError, match=rf"no point .* \(point {least[1]}\)") as refused:
            select_point(artifact(points), thousandths / 1000, context)
        assert f"the smallest is {float(least[0]):.6f}" in str(refused.value)
        return
    (best,) = [p for p in fitting if all(p is q or beats(p, q, context) for q in fitting)]
    chosen = select_point(artifact(points), thousandths / 1000, context)
    assert (chosen.point, chosen.tau) == best[:2]
    assert chosen.residency == float(kept_share(best[2], context))
    rows = [(c.point, c.tau, c.fits) for c in chosen.candidates]
    assert rows == [(p[0], p[1], p in fitting) for p in points]


@settings(deadline=None)
@given(POINTS, st.integers(1, LONGEST), st.randoms())
def test_the_order_of_the_points_does_not_matter(points, context, random):
    shuffled = random.sample(points, len(points))
    first = select_point(artifact(points), 1.0, context)
    assert select_point(artifact(shuffled), 1.0, context).point == first.point


@settings(deadline=None)
@given(POINTS, st.integers(1, LONGEST))
def test_a_budget_of_exactly_a_points_residency_fits_it(points, context):
    name, _, windows = points[0]
    chosen = select_point(artifact(points), float(kept_share(windows, context)), context)
    assert {c.point: c.fits for c in chosen.candidates}[name]


def test_a_longer_context_lets_a_higher_tau_fit():
    found = artifact([("low", 0.9, (4, 4, 4, 4)), ("high", 0.99, (4, 4, 16, 16))])
    assert select_point(found, 0.5, 20).point == "low"
    assert select_point(found, 0.5, LONGEST).point == "high"
    assert select_point(found, 0.5) == select_point(found, 0.5, LONGEST)


def test_the_served_models_length_counts_not_the_recorded_ones():
    found = artifact([("only", None, (4, 4, 4, 4))])
    longer = msgspec.structs.replace(GEOMETRY, max_context=1000)
    chosen = select_point(found, 0.5, geom=longer)
    assert (chosen.context, chosen.residency) == (1000, 7 / 1000)


@pytest.mark.parametrize("budget", [0, 0.0, -0.5, 1.0001, 2, float("nan"), float("inf"), True, "1"])
def test_a_budget_must_be_a_share(budget):
    with pytest.raises(PolicyError, match="above 0 and at most 1"):
        select_point(artifact([("only", None, (4, 4, 4, 4))]), budget)


@pytest.mark.parametrize("context", [0, -1, LONGEST + 1, 4.0, True])
def test_a_context_must_be_within_the_models(context):
    with pytest.raises(PolicyError, match=f"1 to {LONGEST} tokens"):
        select_point(artifact([("only", None, (4, 4, 4, 4))]), 0.5, context)


def test_the_whole_cache_always_fits_and_the_choice_is_plain_json(calibrated, tmp_path):
    chosen = select_point(load_artifact(calibrated().write(tmp_path)), 1)
    assert (chosen.point, chosen.tau, chosen.budget) == ("tau-0.995", 0.995, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=Selection) == chosen

"""Rules and tables: what is accepted, nearest budgets, uniform tables, which units freeze."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy.retention as package
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerKind
from kvpolicy.retention import RULES, RetentionRule, RetentionTables, retention_units
from kvpolicy.windows import FULL, WindowPolicy
from tests.kvpolicy.retention import literal

OFF = RULES["head"]


def test_the_named_rules():
    assert RULES["paper"] == RetentionRule("paper", 64, "global", 1, False, "table", 1, "layer"), (
        "the defaults are the paper's"
    )
    assert RULES["paper"].departures == {}
    assert RULES["head"].departures == {
        "alpha_scope": "head", "pool": 5, "keep_window": True, "gate": "off", "share": "head",
    }  # fmt: skip
    assert RULES["head"].options == (
        "observe=64 alpha_scope=head pool=5 keep_window=True gate=off floor=1 share=head"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Bad Name"}, "rule name 'Bad Name' is not accepted"),
        ({"name": None}, "rule name None is not accepted"),
        ({"observe": 0}, "observe must be an integer >= 1, found 0"),
        ({"observe": True}, "observe must be an integer >= 1, found True"),
        ({"observe": 64.0}, "observe must be an integer >= 1, found 64.0"),
        ({"pool": 4}, "odd kernel, found 4"),
        ({"pool": -1}, "pool must be an integer >= 1, found -1"),
        ({"floor": 0}, "floor must be an integer >= 1, found 0"),
        ({"keep_window": 1}, "keep_window must be a bool, found 1"),
        ({"alpha_scope": "unit"}, "alpha_scope must be global or layer or head, found 'unit'"),
        ({"gate": "on"}, "gate must be table or off, found 'on'"),
        ({"share": None}, "share must be layer or head, found None"),
    ],
)
def test_bad_rules_are_one_line(change, message):
    with pytest.raises(PolicyError, match=message) as caught:
        RetentionRule(**({"name": "rule"} | change))
    assert "\n" not in str(caught.value)
    if change != {"observe": 64.0}:  # JSON has one kind of number
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": "rule"} | change, type=RetentionRule)


def parts(**changes) -> dict:
    """Arguments of valid tables: 2 budgets, 3 layers, 2 heads, 4 x 3 bins."""
    return {
        "rule": RULES["paper"],
        "head_weights": np.full((3, 2), 1.1, np.float32),
        "budgets": (128, 512),
        "gate": np.full((2, 3, 4, 3), 0.9, np.float32),
        "entropy_edges": np.array([0.2, 0.2, 0.8], np.float32),
        "perplexity_edges": np.array([4, 30], np.float32),
    } | changes


def filled(shape, value, dtype=np.float32) -> np.ndarray:
    return np.full(shape, value, dtype)


BAD_TABLES = [
    ({"head_weights": filled((3, 2), 1, np.float64)}, "head_weights must be a float32 array"),
    ({"head_weights": [[1.0]]}, "head_weights must be a float32 array, found list"),
    ({"head_weights": filled(3, 1)}, r"head_weights must be \[layers, kv heads\], found \[3\]"),
    ({"head_weights": filled((3, 0), 1)}, "head_weights must be"),
    ({"head_weights": filled((3, 2), 0)}, "head_weights must be above 0"),
    ({"head_weights": filled((3, 2), np.nan)}, "head_weights holds a value that is not finite"),
    ({"gate": filled((2, 3, 4, 3), np.inf)}, "gate holds a value that is not finite"),
    ({"gate": filled((2, 3, 4, 3), -0.1)}, "negative threshold"),
    ({"gate": filled((2, 3, 3, 3), 1)}, r"gate must have shape \[2, 3, 4, 3\].*\[2, 3, 3, 3\]"),
    ({"gate": filled((1, 3, 4, 3), 1)}, "gate must have shape"),
    ({"gate": filled((2, 4, 4, 3), 1)}, "gate must have shape"),
    ({"entropy_edges": np.float32([0.8, 0.2, 0.9])}, "entropy_edges must be one ascending row"),
    ({"entropy_edges": filled((1, 3), 1)}, "entropy_edges must be one ascending row"),
    ({"perplexity_edges": filled(1, 1)}, "gate must have shape"),
    ({"budgets": (512, 128)}, r"budgets must ascend from 1 or more, found \[512, 128\]"),
    ({"budgets": (128, 128)}, "budgets must ascend"),
    ({"budgets": (0, 128)}, "budgets must ascend"),
    ({"budgets": (128.0, 512)}, "budgets must ascend"),
    ({"budgets": [128, 512]}, "budgets must ascend"),
    ({"budgets": ()}, "gate=table, found 0 budgets"),
    ({"rule": OFF}, "gate=off, found 2 budgets"),
    ({"rule": OFF, "budgets": (), "gate": filled((0, 3, 4, 3), 1)}, "one bin, found"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TABLES)
def test_bad_tables_are_one_line(change, message):
    with pytest.raises(PolicyError, match=message) as caught:
        RetentionTables(**parts(**change))
    assert "\n" not in str(caught.value)


def test_tables_are_copies_and_read_only():
    given = parts()
    tables = RetentionTables(**given)
    given["gate"][:] = 7
    assert tables.gate.max() < 1
    with pytest.raises(ValueError, match="read-only"):
        tables.gate[:] = 1


@given(
    budgets=st.sets(st.integers(1, 5000), min_size=1, max_size=5).map(sorted),
    budget=st.integers(1, 10**6),
)
def test_the_nearest_budget_in_log(budgets, budget):
    gate = np.arange(len(budgets), dtype=np.float32).reshape(-1, 1, 1, 1)
    tables = RetentionTables(
        RULES["paper"], filled((1, 1), 1), tuple(budgets), gate, filled(0, 0), filled(0, 0)
    )
    index = literal.nearest_budget(budgets, budget)
    assert tables.budget_index(budget) == index
    assert tables.gate_for(budget).tolist() == [[[float(index)]]]


@pytest.mark.parametrize(("budget", "index"), [(1, 0), (255, 0), (256, 0), (257, 1), (9999, 1)])
def test_ties_between_budgets_go_to_the_smaller(budget, index):
    assert RetentionTables(**parts()).budget_index(budget) == index


def test_a_budget_needs_a_gate_and_a_token(geometry):
    with pytest.raises(PolicyError, match="at least 1 token, found 0"):
        RetentionTables(**parts()).gate_for(0)
    with pytest.raises(PolicyError, match="no gate"):
        RetentionTables.uniform(geometry("smollm2"), OFF).gate_for(64)


@pytest.mark.parametrize("name", RULES)
def test_uniform_tables(name, geometry):
    geom = geometry("gemma3")
    tables = RetentionTables.uniform(geom, RULES[name], weight=1.25, threshold=0.85)
    tables.check_fits(geom)
    assert tables.head_weights.shape == (18, 1) and set(tables.head_weights.flat) == {1.25}
    assert (tables.mix is not None) == (name == "mix")
    if name != "paper":
        assert len(tables.budgets) == (name == "mix") and tables.gate.shape == (0, 18, 1, 1)
    else:
        assert tables.gate_for(7).tolist() == [[[np.float32(0.85)]]] * 18
    with pytest.raises(PolicyError, match=r"shape \[30, 3\] .* found \[18, 1\]"):
        tables.check_fits(geometry("smollm2"))
    with pytest.raises(PolicyError, match="above 0"):
        RetentionTables.uniform(geom, RULES[name], weight=0)


@pytest.mark.parametrize("model", ["smollm2", "gemma3", "qwen3_next", "mistral"])
def test_only_full_units_of_global_layers_freeze(model, geometry):
    geom = geometry(model)
    windows = WindowPolicy.full(geom).windows.copy()
    for row, layer in enumerate(geom.attention_layers):
        if layer.kind is LayerKind.GLOBAL and row % 2:
            windows[row, 0] = 128
    units, layers, heads = retention_units(WindowPolicy(geom, windows, 4))
    expected = [
        (geom.unit_of(layer.layer_id, head), row, head)
        for row, layer in enumerate(geom.attention_layers)
        for head in range(layer.num_kv_heads)
        if layer.kind is LayerKind.GLOBAL and windows[row, head] == FULL
    ]
    assert list(zip(units.tolist(), layers.tolist(), heads.tolist(), strict=True)) == expected
    assert {x.dtype for x in (units, layers, heads)} == {np.dtype(np.int64)}


def test_torch_is_loaded_only_for_its_functions():
    program = (
        "import sys, kvpolicy.retention as r; r.RULES, r.RetentionTables;"
        "assert 'torch' not in sys.modules; r.retain; assert 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(package.__file__).parents[2])
    assert done.returncode == 0


def test_every_public_name_is_there():
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_written_alike_wherever_it_comes_from(name):
    """Sent to another process its strings are other objects, which msgspec takes for no default."""
    sent = pickle.loads(pickle.dumps(RULES[name]))
    assert msgspec.json.encode(sent) == msgspec.json.encode(RULES[name])
    assert b"global" not in msgspec.json.encode(sent)

"""Records on disk, read back strictly; risk cells; the rewards they hold."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ALL, PAPER_GRID
from calib_cluster.rewards.bandit import gate_records, head_records
from calib_cluster.rewards.records import (
    COLUMNS,
    HEADER,
    RecordHeader,
    RewardRecords,
    concatenate,
    numpy_type,
    read_shard,
    write_shard,
)
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.retention import RULES

HEAD = RecordHeader(
    "0" * 64, RULES["paper"], PAPER_GRID, "factorial", (0, 0, 2), (0, 1, 0), (0.5,), (3.0, 9.0)
)


def made(count: int = 6, seed: int = 0, header: RecordHeader = HEAD, **changes) -> RewardRecords:
    """Random records of 3 units in 2 layers; two prompts, budgets 4 and 8."""
    rng = np.random.default_rng(seed)
    values = {
        "prompt": [f"{i % 2:016x}" for i in range(count)],
        "corpus": ["kjv"] * count,
        "context": 16,
        "continuation": 8,
        "scored": 0,
        "budget": [4 if i < count / 2 else 8 for i in range(count)],
        "varied": ALL,
        "weights": rng.integers(0, 29, (count, 3)),
        "thresholds": rng.integers(0, 21, (count, 2)),
        "shares": 0,
        "mixtures": 0,
        "kept": rng.integers(1, 8, (count, 3)),
        "psi": rng.integers(0, 9, (count, 2)),
        "kept_set": np.arange(count),
        "nll_full": rng.random(count),
        "nll_compressed": rng.random(count),
        "divergence": rng.random(count),
        "entropy": rng.random(count),
        "perplexity": rng.random(count) * 12,
        "entropy_bin": rng.integers(0, 2, count),
        "perplexity_bin": rng.integers(0, 3, count),
    } | changes
    columns = {}
    for name, column in COLUMNS.items():
        width = {"units": (3,), "layers": (2,), None: ()}[column.per]
        array = np.empty((count, *width), numpy_type(column.kind))
        array[:] = values[name]
        columns[name] = array
    return RewardRecords(header, columns)


def test_a_shard_is_read_back_as_it_was_written(tmp_path):
    records = made()
    write_shard(tmp_path / "a.parquet", records)
    found = read_shard(tmp_path / "a.parquet")
    assert found.header == records.header
    for name in COLUMNS:
        assert found[name].dtype == records[name].dtype
        np.testing.assert_array_equal(found[name], records[name])
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_an_empty_shard_too(tmp_path):
    write_shard(tmp_path / "a.parquet", made(0))
    assert len(read_shard(tmp_path / "a.parquet")) == 0


def test_others_can_read_the_columns(tmp_path):
    """Plain Parquet: any reader gets the numbers without this package."""
    records = made()
    write_shard(tmp_path / "a.parquet", records)
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert rows[3]["weights"] == records["weights"][3].tolist()
    assert rows[3]["prompt"] == records["prompt"][3]


def test_any_flipped_byte_is_noticed_or_harmless(tmp_path):
    """Never other records than those written."""
    records = made(40)
    path = tmp_path / "a.parquet"
    write_shard(path, records)
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            found = read_shard(path)
        except CalibrationError as error:
            assert "\n" not in str(error) and "a.parquet" in str(error)
            noticed += 1
        else:
            for name in COLUMNS:
                np.testing.assert_array_equal(found[name], records[name])
    assert noticed > len(whole) / 41 / 2


def test_a_cut_file_and_a_missing_one_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_shard(path, made())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CalibrationError, match="is damaged or of another version"):
        read_shard(path)
    with pytest.raises(CalibrationError, match="is not there"):
        read_shard(tmp_path / "b.parquet")


def rewrite(path, change) -> None:
    """Replace a shard by ``change(table)``."""
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace_schema_metadata({}), "not a shard of reward records"),
        (lambda t: t.drop_columns(["psi"]), "not those of its header"),
        (lambda t: t.append_column("more", t["budget"]), "not those of its header"),
        (
            lambda t: t.replace_schema_metadata(
                {HEADER: t.schema.metadata[HEADER].replace(b'"format":2', b'"format":3')}
            ),
            "format 3",
        ),
        (
            lambda t: t.replace_schema_metadata(
                {HEADER: t.schema.metadata[HEADER].replace(b'"grid"', b'"grit"')}
            ),
            "unknown field",
        ),
    ],
)
def test_other_shards_are_refused(tmp_path, change, message):
    path = tmp_path / "a.parquet"
    write_shard(path, made())
    rewrite(path, change)
    with pytest.raises(CalibrationError, match=message):
        read_shard(path)


def test_a_null_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_shard(path, made())

    def with_null(table: pa.Table) -> pa.Table:
        budgets = pa.array([None, *table["budget"].to_pylist()[1:]], pa.int32())
        return table.set_column(table.schema.get_field_index("budget"), "budget", budgets)

    rewrite(path, with_null)
    with pytest.raises(CalibrationError, match="damaged or of another version"):
        read_shard(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": 29}, "weights holds 29..29, accepted are 0..28"),
        ({"thresholds": 21}, "thresholds holds"),
        ({"varied": 5}, "varied holds 5..5, accepted are -1..4"),
        ({"budget": 0}, "budget holds"),
        ({"psi": -1}, "psi holds"),
        ({"perplexity_bin": 3}, "perplexity_bin holds"),
        ({"nll_full": np.nan}, "nll_full holds a value that is not finite"),
        ({"psi": np.inf}, "psi holds a value that is not finite"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(CalibrationError, match=message):
        made(**changes)


def test_columns_of_another_type_or_shape_are_refused():
    records = made()
    wrong = records.columns | {"budget": records["budget"].astype(np.int64)}
    with pytest.raises(CalibrationError, match=r"budget must be int32 \[6\], found int64"):
        RewardRecords(HEAD, wrong)
    wrong = records.columns | {"weights": records["weights"][:, :2]}
    with pytest.raises(CalibrationError, match=r"weights must be uint8 \[6, 3\]"):
        RewardRecords(HEAD, wrong)
    with pytest.raises(CalibrationError, match="columns psi"):
        RewardRecords(HEAD, {k: v for k, v in records.columns.items() if k != "psi"})


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(CalibrationError, match="cannot write"):
        write_shard(tmp_path / "no" / "a.parquet", made())
    (tmp_path / "there").mkdir()
    with pytest.raises(CalibrationError, match="cannot write"):
        write_shard(tmp_path / "there", made())
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_sets_of_records_join_only_if_alike():
    one, two = made(4), made(6, seed=1)
    both = concatenate([one, two])
    assert len(both) == 10
    np.testing.assert_array_equal(both["weights"][4:], two["weights"])
    other = msgspec.structs.replace(HEAD, rule=RULES["head"])
    with pytest.raises(CalibrationError, match="differ in rule"):
        concatenate([one, made(4, header=other)])
    with pytest.raises(CalibrationError, match="no reward records"):
        concatenate([])


def test_new_edges_give_new_bins():
    records = made(50, entropy=np.linspace(0, 1, 50), perplexity=4.0)
    risk = RiskGrid.quantiles(records["entropy"], records["perplexity"], (5, 2))
    found = records.rebinned(risk)
    assert np.bincount(found["entropy_bin"]).tolist() == [10] * 5
    assert set(found["perplexity_bin"]) == {1}  # a value on an edge belongs above it
    assert found.header.risk == risk


def test_bins_are_those_that_serving_looks_up():
    import torch

    from kvpolicy.retention import bin_of

    rng = np.random.default_rng(0)
    values = rng.random(200).astype(np.float32)
    risk = RiskGrid.quantiles(values, values * 9, (20, 4))
    assert risk.shape == (20, 4)
    entropy, perplexity = risk.bins(values, values * 9)
    for edges, value, found in (
        (risk.entropy_edges, values, entropy),
        (risk.perplexity_edges, values * 9, perplexity),
    ):
        lookup = bin_of(torch.from_numpy(value), torch.tensor(edges))
        np.testing.assert_array_equal(found, lookup.numpy())


@pytest.mark.parametrize("edges", [(2.0, 1.0), (float("nan"),)])
def test_bad_edges_are_refused(edges):
    with pytest.raises(CalibrationError, match="edges must ascend"):
        RiskGrid(edges, ())


def test_head_rewards_by_hand():
    """-(compressed - full), less the mean of the same prompt and budget; no penalty."""
    records = made(
        4, prompt=["a", "a", "b", "a"], budget=[4, 4, 4, 8], nll_full=1.0,
        nll_compressed=[1.5, 1.1, 3.0, 2.0],
    )  # fmt: skip
    plain = head_records(records, baseline=False)
    assert plain.shape == (3, 29) and len(plain.rewards) == 4 * 3
    assert plain.rewards == pytest.approx(np.repeat([-0.5, -0.1, -2.0, -1.0], 3))
    assert plain.states.tolist() == [0, 1, 2] * 4
    np.testing.assert_array_equal(plain.actions, records["weights"].reshape(-1))
    found = head_records(records)
    assert found.rewards == pytest.approx(np.repeat([-0.2, 0.2, 0.0, 0.0], 3))


def test_gate_rewards_by_hand():
    """The layer's own Psi costs beta / T a token; states are layer, entropy bin, perplexity bin."""
    records = made(
        2, prompt=["a", "a"], budget=4, nll_full=1.0, nll_compressed=[1.5, 1.1], context=[16, 16],
        psi=[[8, 0], [4, 4]], entropy_bin=[1, 0], perplexity_bin=[2, 1],
    )  # fmt: skip
    plain = gate_records(records, baseline=False)
    assert plain.shape == (2 * 2 * 3, 21)
    assert plain.rewards == pytest.approx([-0.5 - 0.5, -0.5, -0.1 - 0.25, -0.1 - 0.25])
    assert plain.states.tolist() == [0 * 6 + 1 * 3 + 2, 1 * 6 + 1 * 3 + 2, 1, 6 + 1]
    np.testing.assert_array_equal(plain.actions, records["thresholds"].reshape(-1))
    centred = gate_records(records)
    assert centred.rewards == pytest.approx([-0.325, -0.075, 0.325, 0.075])
    doubled = gate_records(records, beta=2.0, baseline=False)
    assert doubled.rewards == pytest.approx([-0.5 - 1, -0.5, -0.1 - 0.5, -0.1 - 0.5])


def test_one_at_a_time_gives_one_record_an_evaluation():
    records = made(5, varied=[0, 2, 3, 4, 4])
    heads, gates = head_records(records), gate_records(records)
    assert heads.states.tolist() == [0, 2] and heads.rows.tolist() == [0, 1]
    assert (gates.states // 6).tolist() == [0, 1, 1] and gates.rows.tolist() == [2, 3, 4]
    assert gates.actions.tolist() == [
        records["thresholds"][row, layer] for row, layer in ((2, 0), (3, 1), (4, 1))
    ]
    assert heads.statistics.counts.sum() == 2

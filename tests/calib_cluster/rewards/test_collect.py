"""A prompt's records: what is scored, how often, and that the same comes out again."""

from __future__ import annotations

import numpy as np
import pytest

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ALL, PAPER_GRID
from calib_cluster.rewards.collect import Collector, Task
from calib_cluster.rewards.evaluate import evaluate
from calib_cluster.rewards.keep import keep
from calib_cluster.rewards.records import read_shard, write_shard
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.retention import RULES, RetentionTables
from tests.calib_cluster.rewards.frozen import text

BUDGET, COUNT = 20, 24
RISK = RiskGrid((0.5, 0.99), (10.0,))


def task(rng) -> Task:
    prompt, continuation = text(rng)
    return Task(tuple(prompt), tuple(continuation), "random")


def collector(model, behaviour: str = "factorial", **options) -> Collector:
    header = Collector.header(model, RULES["paper"], PAPER_GRID, behaviour, RISK)
    return Collector(model, header, **options)


def collect(made: Collector, item: Task, count: int = COUNT, budget: int = BUDGET):
    return made.collect(item, made.prefill(item), budget, count)


def same(a, b) -> bool:
    return all((a[name] == b[name]).all() for name in a.columns)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_record_is_the_masked_models_loss(pair, family, rng):
    """End to end: the recorded actions, given to the literal algorithm and a dense mask."""
    both, item = pair(family), task(rng)
    model = both.model
    records = collect(collector(model), item, count=6)
    prefill = model.prefill(item.prompt, item.continuation)
    draws = type("Drawn", (), {n: records[n] for n in ("weights", "thresholds", "varied")})
    sets = keep(prefill, model.units, RULES["paper"], BUDGET, draws, PAPER_GRID)
    full = both.reference.token_logprobs([*item.prompt, *item.continuation])
    assert records["nll_full"] == pytest.approx(-full[len(item.prompt) - 1 :].mean(), abs=1e-5)
    for n in range(6):
        kept = [[p for p in row.tolist() if p >= 0] for row in sets.positions[n]]
        losses = both.masked_losses(list(item.prompt), list(item.continuation), kept)
        assert records["nll_compressed"][n] == pytest.approx(losses.mean(), abs=2e-5)
        assert records["kept"][n].tolist() == [len(row) for row in kept]
    assert set(records["context"]) == {90} and set(records["continuation"]) == {12}
    assert set(records["budget"]) == {BUDGET} and set(records["corpus"]) == {"random"}


def test_duplicates_are_scored_once_and_get_the_same_loss(pair, rng, monkeypatch):
    """One freezing layer and few tokens to move: many draws keep the same."""
    model, item = pair("gemma3").model, task(rng)
    scored = []
    plain = model.continuation_scores
    monkeypatch.setattr(
        model, "continuation_scores", lambda p, sets: scored.append(len(sets)) or plain(p, sets)
    )
    made = collector(model, batch=4)
    records = collect(made, item)
    sets = keep(
        made.prefill(item), model.units, RULES["paper"], BUDGET,
        type("Drawn", (), {n: records[n] for n in ("weights", "thresholds", "varied")}), PAPER_GRID,
    )  # fmt: skip
    rows = [sets.positions[n].numpy().tobytes() for n in range(COUNT)]
    assert 1 < len(set(rows)) < COUNT
    assert sum(scored) == len(set(rows)) and max(scored) <= 4
    for a in range(COUNT):
        for b in range(COUNT):
            equal = rows[a] == rows[b]
            assert (records["kept_set"][a] == records["kept_set"][b]) == equal
            if equal:
                assert records["nll_compressed"][a] == records["nll_compressed"][b]


def test_the_batch_changes_nothing_but_rounding(pair, rng):
    model, item = pair("llama").model, task(rng)
    one, many = (collect(collector(model, batch=batch), item) for batch in (1, 16))
    np.testing.assert_allclose(one["nll_compressed"], many["nll_compressed"], atol=1e-5)
    assert (one["weights"] == many["weights"]).all()


def test_records_follow_from_the_seed_alone(pair, rng):
    """Not from what was collected before; another seed, part or budget is another draw."""
    model, first, second = pair("llama").model, task(rng), task(rng)
    made = collector(model, seed=3)
    expected = collect(made, second)
    collect(made, first)
    assert same(collect(made, second), expected)
    assert same(collect(collector(model, seed=3), second), expected)
    prefill = made.prefill(second)
    others = [
        collect(collector(model, seed=4), second),
        made.collect(second, prefill, BUDGET, COUNT, part=1),
        made.collect(second, prefill, BUDGET + 1, COUNT),
    ]
    assert all((other["weights"] != expected["weights"]).any() for other in others)


def test_shards_of_the_same_work_are_the_same_bytes(pair, rng, tmp_path):
    model, item = pair("llama").model, task(rng)
    for name in ("a", "b"):
        write_shard(tmp_path / name, collect(collector(model), item))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert same(read_shard(tmp_path / "a"), collect(collector(model), item))


def test_risks_and_bins_are_those_of_the_freeze(pair, rng):
    both, item = pair("llama"), task(rng)
    records = collect(collector(both.model), item, count=2)
    paper = both.reference.kept(item.prompt, BUDGET)
    assert records["entropy"] == pytest.approx(paper.entropy, rel=1e-4)
    assert records["perplexity"] == pytest.approx(paper.perplexity, rel=1e-4)
    assert set(records["entropy_bin"]) == {1} and set(records["perplexity_bin"]) == {1}


def test_one_at_a_time_varies_around_the_tables_of_the_prompts_cell(pair, rng):
    model, item = pair("llama").model, task(rng)
    tables = RetentionTables(
        RULES["paper"],
        np.full((4, 2), 1.25, np.float32),
        (BUDGET,),
        np.arange(24, dtype=np.float32).reshape(1, 4, 3, 2) / 100 + 0.8,
        np.array(RISK.entropy_edges, np.float32),
        np.array(RISK.perplexity_edges, np.float32),
    )
    records = collect(collector(model, "one-at-a-time", tables=tables), item, count=40)
    assert (records["varied"] != ALL).all()
    for weights, thresholds, varied in zip(
        records["weights"], records["thresholds"], records["varied"], strict=True
    ):
        moved = np.flatnonzero(weights != 18).tolist()  # 1.25 is action 18
        base = [3, 9, 15, 20]  # cell (1, 1) of layers 0..3: .83, .89, .95, 1.01 (past the grid)
        moved += (8 + np.flatnonzero(thresholds != base)).tolist()
        assert moved in ([], [varied])


def test_uncompiled_tables_are_weight_1_and_threshold_point_9(pair, rng):
    model, item = pair("llama").model, task(rng)
    records = collect(collector(model, "one-at-a-time"), item, count=12)
    assert np.median(records["weights"]) == 8 and np.median(records["thresholds"]) == 10


def test_one_at_a_time_scores_few_sets(pair, rng):
    """Most single changes keep what the base keeps."""
    model, item = pair("llama").model, task(rng)
    made = collector(model, "one-at-a-time")
    prefill = made.prefill(item)
    draws = made._draw(item, BUDGET, 60, 0, (0, 0))
    found = evaluate(model, prefill, RULES["paper"], BUDGET, draws, PAPER_GRID)
    assert found.distinct < 45
    assert found.distinct == len(set(found.kept_set.tolist()))


def test_an_unknown_behaviour_is_refused(pair):
    with pytest.raises(CalibrationError, match="factorial or one-at-a-time"):
        collector(pair("llama").model, "greedy")


def test_units_of_another_model_are_refused(pair):
    header = Collector.header(
        pair("gemma2").model, RULES["paper"], PAPER_GRID, "factorial", RiskGrid()
    )
    with pytest.raises(CalibrationError, match="other units"):
        Collector(pair("llama").model, header)

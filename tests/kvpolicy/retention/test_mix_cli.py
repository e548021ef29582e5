"""``python -m kvpolicy`` on policies that mix: new, show, list, verify, diff, merge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from kvpolicy.artifact import PointSpec, load_artifact, write_artifact
from kvpolicy.diff import compare
from kvpolicy.geometry import ModelGeometry
from kvpolicy.mix_view import alike, keep_most, mixtures, query_heads, retrieving
from kvpolicy.retention import RULES, MixTables, RetentionTables
from kvpolicy.retention_evidence import RetentionEvidence, to_file
from kvpolicy.windows import WindowPolicy
from tests.kvpolicy.retention.tables import COMPILED, compiled, compiled_mix, same
from tests.kvpolicy.retention.test_evidence import cells


def with_mix(tables: RetentionTables, **changes: np.ndarray) -> RetentionTables:
    return dataclasses.replace(tables, mix=dataclasses.replace(tables.mix, **changes))


def by_hand(geom: ModelGeometry) -> RetentionTables:
    """Equal shares but for two heads, three mixtures, three query heads that retrieve."""
    tables = RetentionTables.uniform(geom, RULES["mix"])
    shares = np.full((3, 30, 3), 0.95, np.float32)
    shares[:, 12, 1], shares[:, 4, 0] = 4.25, 2.5
    quotas = np.broadcast_to(np.array([0.8, 0.6, 0.6], np.float32), (3, 30, 3, 3)).copy()
    quotas[:, 12, 1] = 0, 0, 5
    quotas[:, 3, :2] = 0.7, 0, 0.3
    weights = np.zeros((30, 9), np.float32)
    weights[12, 4], weights[17, 0], weights[17, 1], weights[2, 2] = 0.5, 0.05, 0.4, 0.04
    mix = MixTables(shares, quotas, weights)
    return dataclasses.replace(tables, budgets=(64, 128, 256), mix=mix)


@pytest.fixture
def write(geometry, tmp_path):
    """Factory: a SmolLM2 artifact with the tables given."""

    def make(tables: RetentionTables, name: str = "mix", **options) -> Path:
        points = [PointSpec("default", WindowPolicy.full(geometry("smollm2")))]
        return write_artifact(
            tmp_path / "out", model_name="m", name=name, points=points, retention=tables, **options
        )

    return make


# -- the numbers -----------------------------------------------------------------------------------


def test_mixtures_are_counted_by_proportion():
    quotas = np.array([[1, 0, 0], [4, 3, 3], [7, 0, 0], [0.4, 0.3, 0.3], [2, 0, 0]], np.float32)
    assert mixtures(quotas) == [((1, 0, 0), 3), ((0.4, 0.3, 0.3), 2)]


def test_retrieving_is_relative_to_the_highest(geometry):
    geom = geometry("gemma3")  # 18 layers of 4 query heads, of which 3 are global
    assert query_heads(geom).sum() == 12
    weights = np.zeros((18, 4), np.float32)
    weights[5] = 0.2, 0.021, 0.019, 0
    weights[0] = 1  # of a native layer: no freeze reads it
    mix = dataclasses.replace(MixTables.uniform(geom, 1), query_weights=weights)
    assert retrieving(mix, geom) == (2, 12)
    nothing = dataclasses.replace(mix, query_weights=0 * weights)
    assert retrieving(nothing, geom) == (0, 12)


def test_budgets_with_equal_tables_are_one(geometry):
    tables = by_hand(geometry("smollm2"))
    assert alike(tables) == [(0, 1, 2)]
    shares = tables.mix.shares.copy()
    shares[2, 0, 0] = 3
    assert alike(with_mix(tables, shares=shares)) == [(0, 1), (2,)]


def test_those_that_keep_most_come_in_order():
    shares = np.array([[1, 9, 3], [5, 3, 8]])
    heads = np.array([[True, False, True], [True, True, True]])
    assert keep_most(shares, heads, 4) == [(1, 2), (1, 0), (0, 2), (1, 1)]


# -- new, show, list, verify -----------------------------------------------------------------------


def test_new_writes_a_uniform_mix(ok, model_dir):
    common = ("new", "--model", model_dir("gemma3"), "--kind", "native", "--out", "out")
    artifact = load_artifact(ok(*common, "--retention", "mix").strip())
    assert artifact.retention.rule == RULES["mix"]
    for tensor, value in (("shares", 1), ("quotas", 1), ("query_weights", 1)):
        assert set(getattr(artifact.retention.mix, tensor).flat) == {value}
    assert artifact.retention.mix.query_weights.shape == (18, 4)
    shown = ok("show", artifact.path)
    assert "shares min / mean / max: 1 / 1 / 1\n" in shown
    assert "3 heads: window 33% focus 33% retrieval 33%\n" in shown
    assert "12 of 12 query heads weigh" in shown and "head weights" not in shown
    options = ("--retention-sinks", 2, "--recent", 9, "--focus", 4)
    changed = load_artifact(ok(*common, "--retention", "mix", *options).strip())
    departures = changed.retention.rule.departures
    assert {k: departures[k] for k in ("sinks", "recent", "focus")} == {
        "sinks": 2, "recent": 9, "focus": 4,
    }  # fmt: skip
    assert changed.retention.rule.name == "mix-custom" and changed.manifest.sinks == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--retention", "mix", "--gate", "table"), "mix=table needs gate=off and share=head"),
        (("--retention", "mix", "--focus", "65"), "focus must be within the 64 observed"),
        (("--retention", "mix", "--threshold", "0.9"), "--threshold needs a rule with --gate"),
        (("--retention-sinks", "4"), "--retention-sinks needs --retention paper or head or mix"),
    ],
)
def test_new_refuses_in_one_line(args, message, run, model_dir, tmp_path):
    common = ("new", "--model", model_dir("smollm2"), "--kind", "full", "--out", "o")
    status, out, err = run(*common, *args)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert not (tmp_path / "o").exists()


def test_show_says_who_keeps_most_and_how(ok, write, geometry):
    tables = by_hand(geometry("smollm2"))
    shown = ok("show", write(tables, retention_calibration=COMPILED))
    mean = float(tables.mix.shares[0].mean(dtype=np.float64))
    for text in (
        "retention rule mix: observe=64 alpha_scope=head",
        "  at budgets 64 128 256, where share 1 is the budget itself:\n",
        f"    shares min / mean / max: 0.95 / {mean:.4g} / 4.25\n",
        "    heads that keep most (layer/head share): 12/1 4.25, 4/0 2.5, 0/0 0.95, ",
        "    87 heads: window 40% focus 30% retrieval 30%\n",
        "    2 heads: window 70% retrieval 30%\n",
        "    1 head: retrieval 100%\n",
        "  retrieval source: 3 of 270 query heads weigh at least 0.1 of the highest\n",
        "  tables compiled by cql: 5 prompts",
    ):
        assert text in shown, text
    assert "head weights" not in shown and "gate:" not in shown


def test_show_keeps_other_budgets_apart_and_long_lists_short(ok, write, geometry):
    geom = geometry("smollm2")
    shown = ok("show", write(compiled_mix(geom)))
    assert "  at budget 64, where" in shown and "  at budget 256, where" in shown
    quotas = np.random.default_rng(0).uniform(0.1, 1, (2, 30, 3, 3)).astype(np.float32)
    shown = ok("show", write(with_mix(compiled_mix(geom), quotas=quotas), "many"))
    assert shown.count("1 head: window") == 16 and shown.count("and 82 more mixtures") == 2


def test_list_and_verify_say_it_in_a_line(ok, write, geometry):
    tables = by_hand(geometry("smollm2"))
    folder = write(tables)
    mean = float(tables.mix.shares.mean(dtype=np.float64))
    summary = (
        f"rule mix ({RULES['mix'].options}), budgets 64 128 256, no gate, shares "
        f"0.95/{mean:.4g}/4.25 (min/mean/max), 3 mixtures, 3 of 270 query heads retrieve"
    )
    assert summary in " ".join(ok("list", "--root", "out").split())
    assert f", retention {summary}\n" in ok("verify", folder)


def test_support_and_worth_are_shown_and_verified(ok, run, write, geometry):
    tables = by_hand(geometry("smollm2"))
    worth = np.linspace(-0.25, 1, 90, dtype=np.float32).reshape(30, 3)
    evidence = RetentionEvidence(cells((30, 3)), worth=worth)
    folder = write(tables, extra_files=to_file(evidence))
    shown = ok("show", folder)
    assert "support of each head's best share: " in shown
    line = "a doubled share adds to the standardised reward, min / mean / max: -0.25 / 0.375 / 1\n"
    assert line in shown
    assert "has the support of every cell" in ok("verify", folder)
    wrong = RetentionEvidence(cells((30, 3)), worth=worth.astype(np.float64))
    status, _, err = run("verify", write(tables, "wrong", extra_files=to_file(wrong)))
    assert status == 2 and "head_worth must be float32" in err


# -- diff ------------------------------------------------------------------------------------------


def test_diff_compares_shares_mixtures_and_retrieval(write, geometry, ok):
    tables = by_hand(geometry("smollm2"))
    shares, quotas = tables.mix.shares.copy(), tables.mix.quotas.copy()
    weights = tables.mix.query_weights.copy()
    shares[1:, 12, 1], shares[1:, 0, 2] = 2.125, 0.475 * 3  # by a factor 2, and by 1.5
    quotas[0, 3, 0], quotas[0, 7, 1] = (14, 0, 6), (1, 0, 0)  # the first only scaled
    weights[20, 3] = 1
    other = with_mix(tables, shares=shares, quotas=quotas, query_weights=weights)
    a, b = write(tables, "a"), write(other, "b")
    found = compare(load_artifact(a), load_artifact(b))
    at64, at128, at256 = found.mix
    assert [change.budget for change in found.mix] == [64, 128, 256]
    assert at64.shares == () and (at64.mixtures, at64.spearman) == (1, pytest.approx(1))
    assert at128.shares == at256.shares
    assert [(c.layer_id, c.head, c.a, c.b) for c in at128.shares] == [
        (12, 1, 4.25, 2.125), (0, 2, np.float32(0.95), np.float32(1.425)),
    ]  # fmt: skip
    assert at128.mixtures == 0 and at128.heads == 90 and at128.spearman < 1
    assert at128.retrieving == (3, 3)  # 1, .5 and .4 are at least a tenth of 1; .05 is not
    assert not found.identical
    fields = {difference.field for difference in found.manifest}
    assert {f"retention table {t}" for t in ("shares", "quotas", "query_weights")} == fields
    printed = ok("diff", a, b)
    assert "shares and mixtures of kv heads" in printed
    for text in ("2 of 90", "1 of 90", "12/1 4.25", "3 -> 3"):
        assert text in printed
    assert json.loads(ok("diff", a, b, "--json"))["mix"][0]["budget"] == 64


def test_diff_takes_the_tables_that_serve_a_budget(write, geometry):
    """One side compiled for 64 and 256, the other for 128 alone: each is asked for all three."""
    tables = compiled_mix(geometry("smollm2"))
    one = compiled_mix(geometry("smollm2"), budgets=(128,), seed=5)
    found = compare(*(load_artifact(write(t, n)) for t, n in ((tables, "a"), (one, "b"))))
    assert [change.budget for change in found.mix] == [64, 128, 256]
    for change, row in zip(found.mix, (0, 0, 1), strict=True):  # 128 is as near to 64: the smaller
        first = change.shares[0]
        assert first.a == tables.mix.shares[row, first.layer_id, first.head]
        assert first.b == one.mix.shares[0, first.layer_id, first.head]


def test_diff_of_a_mix_with_itself_and_with_another_rule(write, geometry):
    geom = geometry("smollm2")
    mix, paper = load_artifact(write(by_hand(geom))), load_artifact(write(compiled(geom), "paper"))
    assert compare(mix, mix).identical and compare(mix, mix).mix == ()
    found = compare(mix, paper)
    assert found.mix == () and not found.identical
    assert "retention table shares" in {difference.field for difference in found.manifest}


# -- merge -----------------------------------------------------------------------------------------


def test_merge_carries_a_mix_and_its_evidence(run, write, geometry, calibrated, tmp_path):
    tables = compiled_mix(geometry("smollm2"))
    evidence = to_file(RetentionEvidence(cells((30, 3)), worth=np.ones((30, 3), np.float32)))
    source = write(tables, extra_files=evidence)
    windows = calibrated().write(tmp_path / "a", files={})
    status, out, err = run("merge", "--windows", windows, "--retention", source, "--out", "both")
    assert (status, err) == (0, "")
    merged = load_artifact(out.strip())
    assert merged.path.parent.name == "seqcalib-mix" and same(merged.retention, tables)
    ((name, content),) = evidence.items()
    assert (merged.path / name).read_bytes() == content

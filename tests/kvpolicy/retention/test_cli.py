"""``python -m kvpolicy`` on policies with retention: new, merge, show, list, verify."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.artifact import PointSpec, load_artifact, write_artifact
from kvpolicy.retention import RULES, RetentionRule
from kvpolicy.windows import WindowPolicy
from tests.kvpolicy.retention.tables import COMPILED, compiled, same


@pytest.fixture
def new(ok, model_dir):
    """``new(*options, model="smollm2")``: the artifact that ``new`` writes under ``out``."""

    def make(*options: object, model: str = "smollm2") -> Path:
        return Path(ok("new", "--model", model_dir(model), "--out", "out", *options).strip())

    return make


def test_new_writes_the_named_rules(new):
    for name in RULES:
        folder = new("--kind", "full", "--retention", name)
        artifact = load_artifact(folder)
        assert folder.parent.name == f"full-{name}"
        assert artifact.retention.rule == RULES[name]
        assert artifact.policy() == WindowPolicy.full(artifact.geometry)
        assert set(artifact.retention.head_weights.flat) == {1}
    assert load_artifact(new("--kind", "full")).retention is None


def test_new_takes_every_option(new):
    options = (
        "--threshold", 0.75, "--observe", 32, "--alpha-scope", "layer", "--pool", 3,
        "--no-keep-window", "--gate", "table", "--floor", 2, "--share", "layer",
    )  # fmt: skip
    folder = new("--kind", "native", "--retention", "head", *options, model="gemma3")
    tables = load_artifact(folder).retention
    assert folder.parent.name == "native-head-custom"
    assert tables.rule == RetentionRule(
        "head-custom", 32, "layer", 3, False, "table", 2, "layer"
    )  # fmt: skip
    assert set(tables.gate.flat) == {0.75} and tables.gate.shape == (1, 18, 1, 1)
    kept = load_artifact(new("--kind", "full", "--retention", "paper", "--keep-window"))
    assert kept.retention.rule.departures == {"keep_window": True}
    # an option at the rule's own value changes nothing
    same_rule = new("--kind", "full", "--retention", "paper", "--pool", 1)
    assert load_artifact(same_rule).retention.rule == RULES["paper"]


BAD_NEW = [
    (("--threshold", "0.9"), "--threshold needs --retention paper or head"),
    (("--alpha-scope", "head"), "--alpha-scope needs --retention"),
    (("--no-keep-window",), "--keep-window needs --retention"),
    (("--retention", "odd"), "invalid choice: 'odd'"),
    (("--retention", "head", "--threshold", "0.9"), "--threshold needs a rule with --gate table"),
    (("--retention", "paper", "--threshold", "-1"), "negative threshold"),
    (("--retention", "paper", "--threshold", "nan"), "not finite"),
    (("--retention", "paper", "--pool", "4"), "odd kernel, found 4"),
    (("--retention", "paper", "--observe", "0"), "observe must be an integer >= 1"),
    (("--retention", "paper", "--floor", "x"), "invalid int value: 'x'"),
    (("--retention", "paper", "--share", "unit"), "invalid choice: 'unit'"),
    (("--retention", "paper", "--name", "full"), "taken by a built-in policy"),
]


@pytest.mark.parametrize(("args", "message"), BAD_NEW)
def test_new_refuses_in_one_line(args, message, run, model_dir, tmp_path):
    common = ("new", "--model", model_dir("smollm2"), "--kind", "full", "--out", "o")
    status, out, err = run(*common, *args)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert not (tmp_path / "o").exists()


def test_new_refuses_a_policy_with_nothing_to_freeze(run, new, model_dir, tmp_path):
    options = ("--retention", "paper", "--kind", "uniform", "--window")
    status, _, err = run("new", "--model", model_dir("smollm2"), "--out", "o", *options, 64)
    assert status == 2 and "leaves none" in err and not (tmp_path / "o").exists()
    status, _, err = run(
        "new", "--model", model_dir("mistral"), "--out", "o", "--kind", "native",
        "--retention", "paper",
    )  # fmt: skip
    assert status == 2 and "leaves none" in err
    assert load_artifact(new(*options, 2**31 - 1)).retention.rule == RULES["paper"]


# -- merge -------------------------------------------------------------------------------------


@pytest.fixture
def tables(geometry, tmp_path):
    """Factory: an artifact of a named model with compiled tables and their calibration."""

    def make(model: str = "smollm2", root: str = "b") -> Path:
        geom = geometry(model)
        return write_artifact(
            tmp_path / root, model_name="m", name="tables",
            points=[PointSpec("default", WindowPolicy.full(geom))],
            retention=compiled(geom), retention_calibration=COMPILED,
        )  # fmt: skip

    return make


def test_merge_takes_windows_of_one_and_tables_of_the_other(run, ok, calibrated, tables, tmp_path):
    a, b = calibrated().write(tmp_path / "a"), tables()
    status, out, err = run("merge", "--windows", a, "--retention", b, "--out", tmp_path / "out")
    assert (status, err) == (0, "kvpolicy: note: not carried over: report.html\n")
    folder = Path(out.strip())
    assert folder.parent == tmp_path / "out" / "model" / "seqcalib-paper"
    merged, windows, retention = map(load_artifact, (folder, a, b))
    for field in ("points", "default_point", "calibration", "sinks", "model"):
        assert getattr(merged.manifest, field) == getattr(windows.manifest, field)
    assert (merged.windows == windows.windows).all()
    assert same(merged.retention, retention.retention)
    assert merged.manifest.retention.calibration == COMPILED
    for file in ("evidence.safetensors", "evaluation.json"):
        assert (folder / file).read_bytes() == (a / file).read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == [
        "evaluation.json", "evidence.safetensors", "manifest.json", "policy.safetensors",
    ]  # fmt: skip
    assert "evidence.safetensors has cosines" in ok("verify", folder)


def test_merge_finds_by_name_and_takes_a_name(ok, calibrated, tables, model_dir, tmp_path):
    a = calibrated().write(tmp_path / "artifacts", files={})
    tables(root="artifacts")
    model = model_dir("smollm2")
    out = ok(
        "merge", "--windows", f"seqcalib@{a.name}", "--retention", "tables", "--model", model,
        "--out", "out", "--name", "both",
    )  # fmt: skip
    assert load_artifact(out.strip()).manifest.name == "both"


def test_merge_replaces_tables_that_were_there(ok, new, tables):
    a, b = new("--kind", "full", "--retention", "head"), tables()
    merged = load_artifact(
        ok("merge", "--windows", a, "--retention", b, "--out", "out2", "--name", "x").strip()
    )
    assert same(merged.retention, load_artifact(b).retention)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--windows", "{a}", "--retention", "{foreign}"), "are for different models"),
        (("--windows", "{b}", "--retention", "{a}"), "has no retention tables"),
        (("--windows", "{windowed}", "--retention", "{b}"), "leaves none to freeze"),
        (("--windows", "{a}", "--retention", "{b}", "--name", "A b"), "not accepted"),
        (("--windows", "{a}", "--retention", "{b}", "--name", "native"), "taken by a built-in"),
        (("--windows", "nowhere", "--retention", "{b}"), "no folder nowhere"),
        (("--windows", "{a}"), "required: --retention"),
    ],
)
def test_merge_refuses_in_one_line(args, message, run, calibrated, tables, new, tmp_path):
    folders = {
        "a": calibrated().write(tmp_path / "a"),
        "b": tables(),
        "foreign": tables("qwen3", root="foreign"),
        "windowed": new("--kind", "uniform", "--window", 64),
    }
    status, out, err = run("merge", "--out", "o", *(arg.format(**folders) for arg in args))
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert not (tmp_path / "o").exists()


# -- show, list, verify ------------------------------------------------------------------------


def test_show_says_what_the_retention_part_is(ok, new, tables):
    shown = ok("show", tables())
    weights = load_artifact(tables()).retention.head_weights
    spread = " / ".join(f"{float(x):.4g}" for x in (weights.min(), weights.mean(), weights.max()))
    for text in (
        f"retention rule paper: {RULES['paper'].options}\n",
        "freezes the 90 of 90 units that have no window\n",
        f"head weights min / mean / max: {spread}\n",
        "gate: budgets 128 512, 4 x 3 bins",
        "thresholds min / mean / max: 0.8",
        "tables compiled by cql: 5 prompts, 10240 tokens, seed 7, code abc\n",
        "corpus kjv (000000000000)",
    ):
        assert text in shown
    uncompiled = ok("show", new("--kind", "native", "--retention", "head", model="gemma3"))
    assert "freezes the 3 of 18 units" in uncompiled
    assert "tables not compiled" in uncompiled
    assert "thresholds" not in uncompiled
    assert "retention" not in ok("show", new("--kind", "full"))


def test_list_and_verify_say_so_too(ok, new, tables):
    folder = tables(root="out")
    head = new("--kind", "full", "--retention", "head")
    new("--kind", "full")
    listed = " ".join(ok("list", "--root", "out").split())
    weights = load_artifact(folder).retention.head_weights
    spread = "/".join(f"{float(x):.4g}" for x in (weights.min(), weights.mean(), weights.max()))
    summary = (
        f"rule paper ({RULES['paper'].options}), budgets 128 512, 4 x 3 bins, "
        f"head weights {spread} (min/mean/max)"
    )
    assert f"retention of tables@{folder.name}: {summary}" in listed
    assert f"rule head ({RULES['head'].options}), no gate, head weights 1/1/1" in listed
    assert listed.count("retention of") == 2
    assert f", retention {summary}" in ok("verify", folder)
    assert "no gate" in ok("verify", head)

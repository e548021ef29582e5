"""``python -m kvpolicy`` on calibrated policies: show, select, diff, list and verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.artifact import load_artifact
from kvpolicy.diff import compare
from kvpolicy.evidence import margin
from kvpolicy.residency import residency
from kvpolicy.select import select_point


def cells(table: str, first: str) -> list[str]:
    """Cells of the one table row whose first cell is ``first``."""
    rows = [[c.strip() for c in line.strip("│").split("│")] for line in table.splitlines()]
    (row,) = [row for row in rows if row[0] == first]
    return row


# -- show --------------------------------------------------------------------------------------


def test_show_tells_how_it_was_calibrated_and_what_each_point_keeps(ok, calibrated, tmp_path):
    made = calibrated("gemma3")
    folder = made.write(tmp_path / "a")
    out = ok("show", folder)
    for text in (
        "calibrated by seqcalib: 5 prompts, 10240 tokens, seed 0, code efefefefefef\n",
        "corpus bible (abababababab)",
        "corpus code (cdcdcdcdcdcd)",
        "settings: length=2048, codebook=[64, 256, 1024]",
        "report: report.html",
        "held-out: 3 prompts, 6000 tokens of moby-dick; full 3.0000 nats per token",
        "windows shown: tau-0.99",
    ):
        assert text in out
    artifact = load_artifact(folder)
    shares = [
        f"{residency(artifact.policy('tau-0.95'), made.geom, c):.2%}" for c in (2048, 8192, 32768)
    ]
    found = margin(made.evidence, artifact, "tau-0.95")
    over_tau = f"{found.least:+.4f} / {found.mean:+.4f}"
    assert cells(out, "tau-0.95") == ["tau-0.95", "0.95", "0.9510", *shares, over_tau, "-"]
    default = cells(out, "tau-0.99 (default)")
    assert default[1:3] == ["0.99", "0.9910"] and default[-1] == "3.0125 (+0.0125)"
    assert "at 32768" in out and out.count("at 32768") == 1, "the longest context is shown once"


def test_show_without_extra_files(ok, calibrated, tmp_path):
    out = ok("show", calibrated().write(tmp_path / "a", files={}))
    assert "calibrated by seqcalib" in out and "at 2048" in out
    for text in ("report", "cosine", "held-out", "at 32768"):
        assert text not in out


def test_show_of_an_uncalibrated_policy_has_no_table_of_points(ok, model_dir, tmp_path):
    model = model_dir("gemma3")
    folder = ok("new", "--model", model, "--kind", "native", "--out", tmp_path / "o").strip()
    out = ok("show", folder)
    assert "not calibrated" in out and "tau" not in out


def test_show_and_verify_refuse_malformed_evidence(run, calibrated, tmp_path):
    folder = calibrated().write(tmp_path / "a", extra={"evidence.safetensors": b"x"})
    for command in ("show", "verify"):
        status, out, err = run(command, folder)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "evidence.safetensors is malformed" in err


# -- verify ------------------------------------------------------------------------------------


def test_verify_says_what_was_checked(ok, calibrated, tmp_path):
    folder = calibrated().write(tmp_path / "a")
    out = ok("verify", folder)
    for text in (
        f"ok: seqcalib@{folder.name}, 4 file hash(es)",
        "recorded residency of 3 point(s) match",
        "evidence.safetensors has cosines of 3 windows at every point",
        "evaluation.json has 1 points' losses",
    ):
        assert text in out


def test_verify_refuses_a_window_that_was_no_candidate(run, calibrated, tmp_path):
    made = calibrated()
    made.windows[2, 0, 0] = 100
    status, out, err = run("verify", made.write(tmp_path / "a"))
    assert (status, out) == (2, "") and "window 100, which is not in the codebook" in err


# -- list --------------------------------------------------------------------------------------


def test_list_shows_tau_and_goes_on_past_damaged_ones(run, ok, calibrated, model_dir, tmp_path):
    root = tmp_path / "artifacts"
    good = calibrated().write(root)
    model = model_dir("smollm2")
    ok("new", "--model", model, "--kind", "native", "--out", root)
    row = ok("list", "--root", root)
    assert "0.95-0.995" in row and "seqcalib" in row and "not calibrated" in row
    bad = [calibrated(seed=seed).write(root) for seed in (1, 2)]
    (bad[0] / "report.html").unlink()
    (bad[1] / "policy.safetensors").write_bytes(b"x")
    status, out, err = run("list", "--root", root)
    assert status == 2
    assert f"seqcalib@{good.name}" in out and "native@" in out
    assert not any(folder.name in out for folder in bad)
    lines = err.splitlines()
    assert len(lines) == 2 and all(line.startswith("kvpolicy: ") for line in lines)
    assert any(f"{bad[0]}: missing file report.html" in line for line in lines)
    assert any(str(bad[1]) in line and "sha256" in line for line in lines)


# -- select ------------------------------------------------------------------------------------


def test_select_prints_every_point_and_the_chosen_one(ok, calibrated, model_dir, tmp_path):
    folder = calibrated().write(tmp_path / "artifacts")
    artifact = load_artifact(folder)
    middle = residency(artifact.policy("tau-0.99"), artifact.geometry, 8192)
    args = ("--residency", f"{middle:.4f}9")
    out = ok("select", "--policy", folder, *args)
    assert f"residency <= {middle:.4f}9 at 8192 tokens" in out, "the model's longest"
    assert f"chosen: tau-0.99 (tau 0.99), residency {middle:.2%}" in out
    share = f"{middle:.4%}"
    assert cells(out, "tau-0.99") == ["tau-0.99", "0.99", "0.9910", share, "yes", "<--"]
    assert cells(out, "tau-0.95")[-2:] == ["yes", ""]
    assert cells(out, "tau-0.995")[-2:] == ["no", ""]
    name = f"seqcalib@{folder.name}"  # a policy of that name ships as well
    by_name = ("select", "--policy", name, "--model", model_dir("smollm2"), *args)
    assert ok(*by_name) == out


def test_select_as_json_is_the_selection(ok, calibrated, tmp_path):
    folder = calibrated().write(tmp_path / "a")
    args = ("--policy", folder, "--residency", 0.9, "--context", 512, "--json")
    found = json.loads(ok("select", *args))
    chosen = select_point(load_artifact(folder), 0.9, 512)
    assert (found["point"], found["residency"]) == (chosen.point, chosen.residency)
    assert found["context"] == 512 and len(found["candidates"]) == 3


def test_select_uses_the_given_models_longest_context(ok, calibrated, model_dir, tmp_path):
    folder = calibrated().write(tmp_path / "a")
    longer = model_dir("smollm2", max_position_embeddings=16384)
    out = ok("select", "--policy", folder, "--model", longer, "--residency", 1)
    assert "at 16384 tokens" in out


BAD_SELECT = [
    (("--residency", "0"), "above 0 and at most 1, found 0.0"),
    (("--residency", "1.5"), "above 0 and at most 1"),
    (("--residency", "nan"), "above 0 and at most 1"),
    (("--residency", "half"), "invalid float value: 'half'"),
    (("--residency", "0.5", "--context", "0"), "1 to 8192 tokens"),
    (("--residency", "0.5", "--context", "8193"), "1 to 8192 tokens"),
    (("--residency", "0.5", "--context", "8k"), "invalid int value: '8k'"),
    (("--residency", "0.0001"), "the smallest is"),
    ((), "required: --residency"),
]


@pytest.mark.parametrize(("args", "message"), BAD_SELECT)
def test_select_refuses_in_one_line(args, message, run, calibrated, tmp_path):
    status, out, err = run("select", "--policy", calibrated().write(tmp_path / "a"), *args)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_select_and_diff_need_a_policy_with_points(run, model_dir):
    model = model_dir("smollm2")
    for args in (
        ("select", "--policy", "native", "--model", model, "--residency", 0.5),
        ("diff", "full", "native", "--model", model),
    ):
        status, out, err = run(*args)
        assert (status, out, err.count("\n")) == (2, "", 1) and "built in" in err
    status, _, err = run("select", "--policy", "nowhere", "--residency", 0.5)
    assert status == 2 and "give --model DIR" in err


# -- diff --------------------------------------------------------------------------------------


@pytest.fixture
def pair(calibrated, tmp_path) -> tuple[Path, Path]:
    return calibrated().write(tmp_path / "a"), calibrated(seed=1).write(tmp_path / "b")


def test_diff_of_two_policies(ok, pair):
    a, b = map(load_artifact, pair)
    out = ok("diff", *pair)
    found = compare(a, b)
    for text in (
        f"A = seqcalib@{a.manifest.version} point tau-0.99",
        f"B = seqcalib@{b.manifest.version} point tau-0.99",
        f"{len(found.changes)} of 90 units differ: B keeps more in ",
        f"Spearman correlation of the windows of global units: {found.spearman:.4f}",
    ):
        assert text in out
    assert cells(out, "seed") == ["seed", "0", "1"]
    share_a, share_b = found.residency[2048]
    assert cells(out, "2048")[:3] == ["2048", f"{share_a:.2%}", f"{share_b:.2%}"]
    first = found.changes[0]
    row = cells(out, str(first.layer_id))[1]
    names = ["full" if w > 2**30 else str(w) for w in (first.window_a, first.window_b)]
    assert f"{first.head}: {names[0]} -> {names[1]}" in row


def test_diff_of_two_points(ok, pair):
    out = ok("diff", pair[0], "--point", "tau-0.95", "--against", "tau-0.995")
    assert "point tau-0.95\n" in out and "point tau-0.995\n" in out
    assert cells(out, "tau") == ["tau", "0.95", "0.995"]
    found = json.loads(ok("diff", pair[0], "--against", "tau-0.995", "--json"))
    assert (found["point_a"], found["point_b"]) == ("tau-0.99", "tau-0.995")
    # one --point for two policies names both
    found = json.loads(ok("diff", *pair, "--point", "tau-0.95", "--json"))
    assert (found["point_a"], found["point_b"]) == ("tau-0.95", "tau-0.95")


def test_diff_of_the_same_is_one_line(ok, pair):
    out = ok("diff", pair[0], pair[0])
    assert out.startswith("identical: ") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{a}",), "a second policy, or --against POINT"),
        (("{a}", "--point", "tau-0.95"), "a second policy, or --against POINT"),
        (("{a}", "{b}", "--point", "odd"), "no point 'odd'"),
        (("{a}", "--against", "odd"), "no point 'odd'"),
        (("{a}", "{other}"), "different models"),
        (("{a}", "nowhere"), "no folder nowhere"),
    ],
)
def test_diff_refuses_in_one_line(args, message, run, pair, calibrated, tmp_path):
    other = calibrated("qwen3").write(tmp_path / "other")
    status, out, err = run("diff", *(arg.format(a=pair[0], b=pair[1], other=other) for arg in args))
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err

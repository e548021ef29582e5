"""From a command line to compiled tables: growth, refits, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from calib_cluster.__main__ import main
from calib_cluster.fingerprint import _RECORD_SOURCES
from calib_cluster.rewards.records import concatenate, read_shard
from kvpolicy.__main__ import main as kvpolicy_main
from kvpolicy.artifact import Artifact, load_artifact
from kvpolicy.retention_evidence import read_retention_evidence
from tests.calib_cluster.in_process import without_ray
from tests.calib_cluster.tiny import ROOT, artifact_of, environment
from tests.calib_cluster.tiny_compile import BUDGETS, DRAWS, PROMPTS, TinyCompile

Run = Callable[..., str]


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyCompile:
    """A compile with one worker that nobody disturbed; tests do not change it."""
    made = TinyCompile(tiny_model, tmp_path_factory.mktemp("compiled") / "artifacts")
    done = made.run("--summary", str(made.out.parent / "summary.json"))
    assert done.returncode == 0, done.stderr
    made.log = done.stdout
    return made


@pytest.fixture
def copied(finished: TinyCompile, tmp_path: Path) -> TinyCompile:
    """The same in a folder that a test may change."""
    copy = TinyCompile(finished.model, tmp_path / "artifacts")
    shutil.copytree(finished.out, copy.out)
    return copy


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process; its single line of refusal."""

    def run(arguments: list[str]) -> str:
        capsys.readouterr()
        status = main(arguments)
        error = capsys.readouterr().err.strip()
        assert status == 2, error
        assert len(error.splitlines()) == 1 and error.startswith("calib_cluster: "), error
        return error

    return run


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process that succeeds; its log."""

    def run(arguments: list[str]) -> str:
        capsys.readouterr()
        status = main(arguments)
        out, error = capsys.readouterr()
        assert status == 0, error
        return out

    return run


def version(log: str) -> str:
    """Version of the artifact that a log's last line names."""
    return artifact_of(log).manifest.version


def only_artifact(out: Path) -> Artifact:
    """The one artifact under ``out``."""
    (manifest,) = out.glob("*/*/*/manifest.json")
    return load_artifact(manifest.parent)


def test_artifact_says_what_it_is_compiled_from(finished: TinyCompile) -> None:
    artifact = artifact_of(finished.log)
    record = artifact.manifest.retention.calibration
    evaluations = PROMPTS * len(BUDGETS) * DRAWS
    assert (record.method, record.prompts, record.tokens) == ("cql", 4, 4 * 176)
    assert set(record.corpora) == {"dialogue", "key-value"}
    settings = record.hyperparameters
    assert settings["evaluations"] == evaluations
    assert settings["records"] == evaluations * (12 + 6)  # heads and layers
    assert settings["settled"] and settings["residual"] < 1e-6
    assert (settings["behaviour"], settings["draws"], settings["alpha"]) == ("factorial", 6, 0.75)
    assert len(settings["actions_weights"]) == 29 and len(settings["actions_thresholds"]) == 21
    assert artifact.retention.gate.shape == (2, 6, 2, 2)
    assert artifact.manifest.retention.budgets == BUDGETS
    assert (artifact.windows == 2**31 - 1).all() and artifact.manifest.calibration is None


def test_evidence_counts_what_the_shards_hold(finished: TinyCompile) -> None:
    artifact = artifact_of(finished.log)
    evidence = read_retention_evidence(artifact)
    records = concatenate([read_shard(path) for path in finished.shards])
    assert (evidence.heads.records == len(records)).all()
    grid = np.array(records.header.grid.weights, np.float32)
    taken = grid[records["weights"]].reshape(-1, 6, 2) == artifact.retention.head_weights
    np.testing.assert_array_equal(evidence.heads.support, taken.sum(axis=0))
    assert evidence.cell_prompts.sum() == PROMPTS
    # every prompt has DRAWS evaluations a budget, each a record of every layer in its cell
    expected = np.broadcast_to(evidence.cell_prompts * DRAWS, evidence.gate.records.shape)
    np.testing.assert_array_equal(evidence.gate.records, expected)


def test_summary_says_what_it_took(finished: TinyCompile) -> None:
    found = json.loads((finished.out.parent / "summary.json").read_text())
    assert found["evaluations"] == found["evaluated_now"] == 48
    assert found["records_per_cpu_second"] == pytest.approx(864 / found["cpu_seconds"])
    assert 0 < found["peak_bytes"] < found["predicted_peak_bytes"] * 1.1
    assert found["head_support"]["cells"] == 12 and found["gate_support"]["cells"] == 48
    assert "prompt 4 of 4 | 48 evaluations" in finished.log and "ETA 0:00" in finished.log


def test_shown_and_verified_with_its_support(finished: TinyCompile, capsys) -> None:
    folder = str(artifact_of(finished.log).path)
    assert kvpolicy_main(["show", folder]) == 0
    shown = capsys.readouterr().out
    assert "support of head weights: 0 of 12 cells without records" in shown
    assert "tables compiled by cql: 4 prompts" in shown
    assert kvpolicy_main(["verify", folder, "--model", str(finished.model)]) == 0
    assert "has the support of every cell" in capsys.readouterr().out


def test_merge_carries_the_tables_evidence(finished: TinyCompile, tmp_path: Path, capsys) -> None:
    artifact = artifact_of(finished.log)
    windows = f"new --model {finished.model} --kind uniform --window 8 --out {tmp_path}".split()
    assert kvpolicy_main(windows) == 0
    uniform = capsys.readouterr().out.split()[-1]
    merged = ["merge", "--windows", str(artifact.path), "--retention", str(artifact.path)]
    assert kvpolicy_main([*merged, "--out", str(tmp_path / "m"), "--name", "both"]) == 0
    both = load_artifact(capsys.readouterr().out.split()[-1])
    assert read_retention_evidence(both).heads.records.sum() > 0
    assert both.manifest.retention == artifact.manifest.retention
    refused = ["merge", "--windows", uniform, "--retention", str(artifact.path)]
    assert kvpolicy_main([*refused, "--out", str(tmp_path / "m")]) == 2


def test_finished_run_is_complete_and_never_dropped_unasked(
    finished: TinyCompile, said: Run, refused: Run
) -> None:
    for again in ([], ["--resume"], ["--extend"]):
        assert said(finished.arguments(*again)).splitlines()[-1].startswith("already complete: ")
    error = refused(finished.arguments("--alpha", "0"))
    assert "alpha: 0.75 -> 0.0" in error and "fit --records" in error
    assert len(finished.shards) == PROMPTS


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--draws", "7"], "draws: 6 -> 7"),
        (["--seed", "1"], "seed: 0 -> 1"),
        (["--budgets", "24"], "budgets: (24, 48) -> (24,)"),
        (["--corpus", "key-value"], "corpora: "),
        (["--behaviour", "one-at-a-time"], "behaviour: factorial -> one-at-a-time"),
        (["--beta", "2"], "beta: 1.0 -> 2.0"),
        (["--rule", "head"], "gate: table -> off"),
    ],
)
def test_another_run_is_not_resumed(
    finished: TinyCompile, refused: Run, extra: list[str], named: str
) -> None:
    assert named in refused(finished.arguments("--resume", *extra))


def test_records_are_not_extended_to_other_rewards(finished: TinyCompile, refused: Run) -> None:
    error = refused(finished.arguments("--extend", "--draws", "7", "--prompts", "6"))
    assert "--extend: these are other rewards" in error and "draws: 6 -> 7" in error
    assert "prompt" not in error


def test_other_code_and_weights_are_not_resumed(copied: TinyCompile, refused: Run) -> None:
    path = copied.records / "run.json"
    run = json.loads(path.read_text())
    run["records"]["code_version"] = "raggedkv 0.0.9+000000000000"
    run["records"]["model_weights"] = {"model.safetensors": "0" * 64}
    path.write_text(json.dumps(run))
    for how in ("--resume", "--extend"):
        error = refused(copied.arguments(how))
        assert "code version: raggedkv 0.0.9+000000000000 -> " in error
        assert "model weights: {model.safetensors=000000000000} -> " in error


def test_other_code_of_the_fit_fits_again(copied: TinyCompile, said: Run) -> None:
    path = copied.records / "result.json"
    result = json.loads(path.read_text()) | {"code_version": "raggedkv 0.0.9+000000000000"}
    path.write_text(json.dumps(result))
    log = said(copied.arguments("--resume"))
    assert "4 shards of reward records are there already" in log and "prompt 1" not in log
    assert "artifact: " in log


def test_damaged_shard_is_named_and_only_it_is_computed_again(
    copied: TinyCompile, refused: Run, said: Run
) -> None:
    before = only_artifact(copied.out).manifest.version
    (copied.records / "result.json").unlink()
    whole = {path.name: path.stat().st_mtime_ns for path in copied.shards}
    victim = copied.shards[1]
    data = victim.read_bytes()
    victim.write_bytes(data[:500] + bytes(8) + data[508:])
    error = refused(copied.arguments("--resume"))
    assert str(victim) in error and "delete it, and --resume computes it again" in error
    assert str(victim) in refused(copied.fit_arguments())

    victim.unlink()
    assert "is not there; --resume computes it again" in refused(copied.fit_arguments())
    with without_ray():
        log = said(copied.arguments("--resume"))
    assert "prompt 1 of 1" in log
    assert version(log) == before
    kept = {path.name: path.stat().st_mtime_ns for path in copied.shards}
    assert {name for name in whole if kept[name] != whole[name]} == {victim.name}


def test_swapped_shards_are_refused(copied: TinyCompile, refused: Run) -> None:
    first, second = copied.shards[:2]
    shutil.copy(second, first)
    assert f"{first} holds other prompts than" in refused(copied.fit_arguments())


def test_growth_evaluates_new_prompts_only_and_equals_a_fresh_run(
    copied: TinyCompile, said: Run, tmp_path: Path
) -> None:
    old = only_artifact(copied.out).manifest.version
    more = ["--prompts", "6", "--draws-per-cell", "13"]
    with without_ray():
        grown = said(copied.arguments(*more, "--extend"))
    assert "4 shards of reward records are there already" in grown
    assert "prompt 2 of 2 | 24 evaluations" in grown
    evidence = read_retention_evidence(artifact_of(grown))
    some = evidence.cell_prompts > 0
    # cells of 2 prompts had 12 evaluations a budget and got as many again
    assert evidence.gate.records[:, :, some].min() >= 13
    assert evidence.gate.records[:, :, some].max() <= 24

    fresh = TinyCompile(copied.model, tmp_path / "fresh")
    with without_ray():
        done = said(fresh.arguments(*more, "--workers", "2"))
    assert version(done) == version(grown) != old
    assert [p.read_bytes() for p in fresh.shards] == [p.read_bytes() for p in copied.shards]


def test_refit_needs_no_model_and_gives_the_same_tables(
    finished: TinyCompile, copied: TinyCompile, said: Run, tmp_path: Path
) -> None:
    same = said(copied.fit_arguments("--out", str(tmp_path / "again")))
    assert version(same) == version(finished.log)
    other = artifact_of(said(copied.fit_arguments("--alpha", "0", "--name", "alpha0")))
    assert other.manifest.name == "alpha0"
    assert other.manifest.retention.calibration.hyperparameters["alpha"] == 0.0
    assert other.manifest.version != version(finished.log)


def test_refit_of_a_part_of_the_records(finished: TinyCompile, said: Run, tmp_path: Path) -> None:
    extra = ["--only-corpus", "key-value", "--budgets", "48", "--out", str(tmp_path)]
    part = artifact_of(said(finished.fit_arguments(*extra)))
    record = part.manifest.retention.calibration
    assert set(record.corpora) == {"key-value"} and record.prompts == 2
    assert part.manifest.retention.budgets == (48,)
    assert record.hyperparameters["evaluations"] == 2 * DRAWS


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--budgets", "24,x"], "--budgets '24,x' is not accepted"),
        (["--budgets", "0"], "--budgets '0' is not accepted"),
        (["--budgets", "24,160"], "--budgets 160 cuts nothing off prompts of --length 160"),
        (["--continuation", "1"], "--continuation 1 is not accepted: give at least 2"),
        (["--draws", "0"], "--draws 0 is not accepted"),
        (["--draws-per-cell", "-1"], "--draws-per-cell -1 is not accepted"),
        (["--draws-per-cell", "9", "--rule", "head"], "has no gate and no risk cells"),
        (["--alpha", "-1"], "--alpha -1 is not accepted"),
        (["--beta", "nan"], "--beta nan is not accepted"),
        (["--method", "sgd"], "exact, converged, paper"),
        (["--entropy-bins", "0"], "--entropy-bins 0 is not accepted"),
        (["--gpus-per-worker", "2"], "rewards are evaluated on one GPU"),
        (["--workers", "5"], "--workers 5 is more than --prompts 4"),
        (["--corpus", "no-such-corpus"], "no-such-corpus"),
        (["--name", "native"], "taken by a built-in policy"),
        (["--name", "Not OK"], "--name: policy name"),
        (["--resume"], "nothing to resume"),
        (["--extend"], "nothing to extend"),
        (["--address", "127.0.0.1:1"], "Ray is not reachable"),
    ],
)
def test_bad_input(
    tiny_model: Path, tmp_path: Path, refused: Run, extra: list[str], message: str
) -> None:
    made = TinyCompile(tiny_model, tmp_path / "artifacts")
    assert message in refused(made.arguments(*extra))
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--records", "/no/such/folder"], "--records /no/such/folder: no such folder"),
        (["--budgets", "32"], "--budgets 32: no reward records; there are: 24, 48"),
        (["--only-corpus", "kjv"], "--only-corpus kjv: no reward records; there are: dialogue"),
        (["--alpha", "inf"], "--alpha inf is not accepted"),
    ],
)
def test_bad_input_of_a_refit(
    finished: TinyCompile, tmp_path: Path, refused: Run, extra: list[str], message: str
) -> None:
    assert message in refused(finished.fit_arguments("--out", str(tmp_path), *extra))
    assert not list(tmp_path.glob("*/*"))


def test_unfinished_records_are_not_fitted(
    copied: TinyCompile, refused: Run, tmp_path: Path
) -> None:
    (copied.records / "records.json").unlink()
    assert "has not evaluated every prompt: --resume it" in refused(copied.fit_arguments())
    arguments = copied.fit_arguments("--records", str(tmp_path))
    assert "give the folder that compile keeps under OUT/.calibration" in refused(arguments)


def test_texts_that_are_too_short(tiny_model: Path, tmp_path: Path, refused: Run) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "too short"}) + "\n")
    made = TinyCompile(tiny_model, tmp_path / "artifacts")
    error = refused(made.arguments("--corpus", str(short)))
    assert "short.jsonl" in error and "--length plus --continuation" in error


def test_worker_that_does_not_fit_in_memory(
    tiny_model: Path, tmp_path: Path, refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calib_cluster.compile_memory.count_weights", lambda _: 10**12)
    made = TinyCompile(tiny_model, tmp_path / "artifacts")
    with without_ray():
        error = refused(made.arguments())
    assert "not enough memory on" in error and "smaller --budgets" in error
    assert not made.shards and not (made.records / "run.json").exists()


def test_code_that_decides_records_is_all_in_their_version() -> None:
    """What a worker imports of ours, but for what cannot change a record."""
    code = (
        "import sys, calib_cluster.compile_worker\n"
        "print(*(n for n in sys.modules if n.split('.')[0] in ('calib_cluster', 'kvpolicy')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment()
    ).stdout.split()
    decides = {name.removesuffix(".py").replace("/", ".") for name in _RECORD_SOURCES}
    other = {
        name
        for name in found
        if not any(name == one or name.startswith(f"{one}.") for one in decides)
    }
    harmless = {
        "calib_cluster", "calib_cluster.errors", "calib_cluster.fingerprint",
        "calib_cluster.worker", "kvpolicy", "kvpolicy.errors", "kvpolicy.names",
        "kvpolicy.weights",
    }  # fmt: skip
    assert {name for name in other if not name.startswith("calib_cluster.cql")} == harmless

"""Kills at any moment change nothing: the same artifact, bit for bit, as an undisturbed run.

Real processes are killed with SIGKILL in the middle of a layer.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from calib_cluster.__main__ import main
from kvpolicy.artifact import load_artifact
from tests.calib_cluster.tiny import Calibration, artifact_of, wait_for


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(version, output folder) of a run with one worker that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    done = Calibration(tiny_model, out).run()
    assert done.returncode == 0, done.stderr
    return artifact_of(done.stdout).manifest.version, out


def _workers_of(driver: int, method: str) -> list[psutil.Process]:
    """Ray workers below ``driver`` that are inside ``method`` right now (Ray titles them so)."""
    title = f"ray::CalibrationWorker.{method}"
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # ended meanwhile
            continue
    return found


@pytest.mark.slow  # two minutes
def test_two_workers_and_a_killed_one_give_the_same_artifact(
    calibration: Calibration, undisturbed: tuple[str, Path]
) -> None:
    run = calibration.start("--workers", "2")
    run.read_until("layer 2 of 6")
    victim = wait_for(
        lambda: _workers_of(run.process.pid, "judge") or _workers_of(run.process.pid, "advance")
    )[0]
    os.kill(victim.pid, signal.SIGKILL)
    status, log = run.finish()
    assert status == 0, log
    assert "replaced, its shard is computed again" in log
    assert ", 1 replaced" in log
    assert artifact_of(log).manifest.version == undisturbed[0]


@pytest.mark.slow  # a minute
def test_killed_driver_resumes_to_the_same_artifact(
    calibration: Calibration, undisturbed: tuple[str, Path]
) -> None:
    run = calibration.start()
    run.read_until("layer 3 of 6")
    wait_for(lambda: _workers_of(run.process.pid, "judge"))
    run.process.kill()
    run.process.wait()
    assert not list(calibration.out.glob("*/*/*/manifest.json"))

    again = calibration.run()
    assert again.returncode == 2
    assert "--resume continues it, --restart drops it" in again.stderr

    resumed = calibration.run("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after layer 2" in resumed.stdout
    assert "layer 3 of 6" not in resumed.stdout
    artifact = artifact_of(resumed.stdout)
    assert artifact.manifest.version == undisturbed[0]
    for file in artifact.manifest.files:
        other = undisturbed[1] / artifact.path.relative_to(calibration.out) / file
        assert (artifact.path / file).read_bytes() == other.read_bytes(), file


def test_finished_run_says_that_it_is_complete(
    tiny_model: Path, undisturbed: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    version, out = undisturbed
    assert main(Calibration(tiny_model, out).arguments("--resume")) == 0
    folder = out / "tiny-llama" / "seqcalib" / version
    assert capsys.readouterr().out.splitlines()[-1] == f"already complete: {folder}"


@pytest.mark.slow  # a calibration of its own
def test_deleted_artifact_of_a_finished_run_is_written_again(
    tiny_model: Path, undisturbed: tuple[str, Path]
) -> None:
    version, out = undisturbed
    folder = out / "tiny-llama" / "seqcalib" / version
    (folder / "policy.safetensors").rename(folder / "moved")
    hidden = folder.rename(out / "kept-aside")
    again = Calibration(tiny_model, out).run("--resume")
    assert again.returncode == 0, again.stderr
    assert "every layer was calibrated before" in again.stdout
    assert load_artifact(folder).manifest.version == version
    assert hidden.exists()


def test_damaged_artifact_is_never_overwritten(
    calibration: Calibration, undisturbed: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed[1], calibration.out)
    damaged = calibration.out / "tiny-llama" / "seqcalib" / undisturbed[0] / "evidence.safetensors"
    damaged.write_bytes(b"damaged")
    assert main(calibration.arguments("--resume")) == 2
    assert "move that folder away, then --resume" in capsys.readouterr().err
    assert damaged.read_bytes() == b"damaged"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--tau", "0.6,0.8"], "taus: (0.6, 0.8, 0.95) -> (0.6, 0.8)"),
        (["--corpus", "stdlib", "key-value"], "corpora: "),
        (["--seed", "1"], "seed: 0 -> 1"),
    ],
)
def test_another_run_is_not_resumed(
    tiny_model: Path, undisturbed: tuple[str, Path], change: list[str], named: str, capsys
) -> None:
    assert main(Calibration(tiny_model, undisturbed[1]).arguments("--resume", *change)) == 2
    refusal = capsys.readouterr().err
    assert named in refusal
    assert "--restart drops the old one" in refusal


def test_other_code_and_other_weights_are_not_resumed(
    calibration: Calibration, undisturbed: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = undisturbed
    state = out / ".calibration" / "tiny-llama.seqcalib"
    recorded = msgspec.json.decode((state / "run.json").read_bytes())
    recorded["code_version"] = "raggedkv 0.0.9+000000000000"
    recorded["model_weights"] = {"model.safetensors": "0" * 64}
    older = calibration.out / ".calibration" / "tiny-llama.seqcalib"
    older.mkdir(parents=True)
    (older / "run.json").write_bytes(msgspec.json.encode(recorded))
    assert main(calibration.arguments("--resume")) == 2
    refusal = capsys.readouterr().err
    assert "code version: raggedkv 0.0.9+000000000000 -> " in refusal
    assert "model weights: {model.safetensors=000000000000} -> " in refusal

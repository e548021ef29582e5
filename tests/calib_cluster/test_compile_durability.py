"""Kills at any moment change nothing: the same tables as an undisturbed compile.

Real processes are killed with SIGKILL in the middle of a prompt.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.calib_cluster.tiny import artifact_of, wait_for
from tests.calib_cluster.tiny_compile import PROMPTS, TinyCompile

# long enough to be killed in the middle of a prompt
LONG = ("--draws", "48")


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Version of a run with one worker that nobody disturbed."""
    made = TinyCompile(tiny_model, tmp_path_factory.mktemp("undisturbed"))
    done = made.run(*LONG)
    assert done.returncode == 0, done.stderr
    return artifact_of(done.stdout).manifest.version


def _collecting(driver: int) -> list[psutil.Process]:
    """Ray workers below ``driver`` that evaluate a prompt right now (Ray titles them so)."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if "ray::RewardWorker.collect" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # ended meanwhile
            continue
    return found


@pytest.mark.slow
def test_two_workers_and_a_killed_one_give_the_same_tables(
    tiny_model: Path, tmp_path: Path, undisturbed: str
) -> None:
    made = TinyCompile(tiny_model, tmp_path)
    run = made.start(*LONG, "--workers", "2")
    run.read_until("prompt 1 of 4")
    os.kill(wait_for(lambda: _collecting(run.process.pid))[0].pid, signal.SIGKILL)
    status, log = run.finish()
    assert status == 0, log
    assert "replaced, its shard is computed again" in log
    assert ", 1 replaced" in log
    assert artifact_of(log).manifest.version == undisturbed


@pytest.mark.slow
def test_killed_driver_resumes_to_the_same_tables(
    tiny_model: Path, tmp_path: Path, undisturbed: str
) -> None:
    made = TinyCompile(tiny_model, tmp_path)
    run = made.start(*LONG)
    run.read_until("prompt 2 of 4")
    wait_for(lambda: _collecting(run.process.pid))
    run.process.kill()
    run.process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in made.shards}
    assert 2 <= len(kept) < PROMPTS and not list(tmp_path.glob("*/*/*/manifest.json"))

    again = made.run(*LONG)
    assert again.returncode == 2
    assert "--resume continues it, --restart drops it" in again.stderr

    resumed = made.run(*LONG, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{len(kept)} shards of reward records are there already" in resumed.stdout
    assert f"prompt 1 of {PROMPTS - len(kept)}" in resumed.stdout
    assert artifact_of(resumed.stdout).manifest.version == undisturbed
    after = {path.name: path.stat().st_mtime_ns for path in made.shards}
    assert all(after[name] == changed for name, changed in kept.items())

"""The README's ``ray job submit`` against a real head node, from another folder than it runs in."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvpolicy.artifact import load_artifact
from tests.calib_cluster.tiny import ROOT, Calibration, environment, wait_for
from tests.calib_cluster.tiny_compile import PROMPTS, TinyCompile

RAY = str(Path(sys.executable).with_name("ray"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(job address, folder in which ``ray start`` was run) of a head node."""
    folder = tmp_path_factory.mktemp("head")
    port, dashboard = _free_port(), _free_port()
    start = [
        RAY, "start", "--head", "--block", "--port", str(port), "--dashboard-port", str(dashboard),
        "--num-cpus", "2", "--num-gpus", "0",
        # another Ray on this machine has the default port: without its agent a node takes no job
        "--dashboard-agent-listen-port", str(_free_port()),
    ]  # fmt: skip
    env = environment() | {"RAY_USAGE_STATS_ENABLED": "0", "PWD": str(folder)}
    # --block: ending this process ends its node, and no other Ray on the machine
    node = subprocess.Popen(start, cwd=folder, env=env)
    try:
        wait_for(lambda: node.poll() is not None or _answers(dashboard), timeout=120)
        assert node.poll() is None, "ray start failed"
        yield f"http://127.0.0.1:{dashboard}", folder
    finally:
        node.terminate()
        node.wait(timeout=60)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/api/version").status_code == 200
    except httpx.TransportError:
        return False


def _submit(address: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--"]

    def submitted() -> subprocess.CompletedProcess[str] | None:
        done = subprocess.run(
            [*command, sys.executable, "-m", "calib_cluster", *arguments],
            cwd=ROOT, env=environment(), capture_output=True, text=True,
        )  # fmt: skip
        # a head node answers before it takes jobs
        return None if "No available agent" in done.stderr else done

    return wait_for(submitted, timeout=120)


@pytest.mark.slow
def test_submitted_job_writes_where_ray_was_started(
    head: tuple[str, Path], tiny_model: Path
) -> None:
    """A relative --out survives the job, and the job's status is the command's."""
    address, folder = head
    arguments = Calibration(tiny_model, Path("artifacts")).arguments("--workers", "2")
    done = _submit(address, arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layer 6 of 6" in done.stdout
    (manifest,) = folder.glob("artifacts/tiny-llama/seqcalib/*/manifest.json")
    assert load_artifact(manifest.parent).manifest.calibration.method == "seqcalib"
    assert f"artifact: {manifest.parent}" in done.stdout

    failed = _submit(address, [*arguments, "--corpus", "no-such-corpus"])
    assert failed.returncode != 0
    assert "calib_cluster: " in failed.stdout and "no-such-corpus" in failed.stdout

    greedy = _submit(address, [*arguments, "--workers", "3", "--restart"])
    assert greedy.returncode != 0
    assert "the Ray cluster has 2" in greedy.stdout


@pytest.mark.slow
def test_submitted_compile_keeps_its_records_where_ray_was_started(
    head: tuple[str, Path], tiny_model: Path
) -> None:
    """So that a later job may fit them again, by a relative path too."""
    address, folder = head
    made = TinyCompile(tiny_model, Path("compiled"))
    done = _submit(address, made.arguments("--workers", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"prompt {PROMPTS} of {PROMPTS}" in done.stdout
    (manifest,) = folder.glob("compiled/tiny-llama/compilerkv/*/manifest.json")
    assert load_artifact(manifest.parent).manifest.retention.calibration.method == "cql"

    again = _submit(address, made.fit_arguments("--alpha", "0", "--name", "alpha0"))
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(list(folder.glob("compiled/tiny-llama/alpha0/*/manifest.json"))) == 1

"""The demo as a stranger runs it, on a smaller load: real servers, real weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SIZES = ("--requests", "6", "--prompt-tokens", "700", "--output-tokens", "16", "--checks", "2")


def demo(out: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "loadtest", "demo", "--out", str(out), *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_more_requests_run_at_once_and_every_answer_is_its_references(smollm2, tmp_path):
    policy = tmp_path / "policies"
    make = [sys.executable, "-m", "kvpolicy", "new", "--model", str(smollm2), "--kind", "uniform"]
    make += ["--window", "128", "--sinks", "4", "--out", str(policy)]
    subprocess.run(make, cwd=ROOT, check=True)
    (manifest,) = policy.rglob("manifest.json")
    flags = (
        "--kv-bytes",
        "70MB",
        "--policy",
        str(manifest.parent),
        "--budget-tokens",
        "64",
        *SIZES,
    )
    process = demo(tmp_path / "out", *flags)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "requests at once where stock SGLang ran 2" in " ".join(stdout.split())
    stock, ragged, frozen = json.loads((tmp_path / "out" / "demo.json").read_text())["rows"]
    assert (stock["measured"]["predicted"], stock["measured"]["peak_running"]) == (2, 2)
    assert ragged["measured"]["peak_running"] == 6 <= ragged["measured"]["predicted"]
    for row in (stock, ragged):
        assert row["checked"]["equal"] == row["checked"]["answers"] == 2
        assert row["measured"]["retractions"] == 0
        assert 0 < row["measured"]["peak_bytes"] <= 70_000_000
    assert stock["beside_stock"]["same"] == 6
    measured = frozen["measured"]
    assert measured["kept_share"] == pytest.approx(64 / 700, abs=0.01)
    assert measured["peak_running"] == 6 <= measured["predicted"] and measured["retractions"] == 0


@pytest.mark.slow
def test_interrupting_it_leaves_no_server(smollm2, tmp_path):
    process = demo(tmp_path / "out", "--requests", "2")
    deadline = time.monotonic() + 120
    while not psutil.Process(process.pid).children(recursive=True):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "python -m loadtest demo: interrupted"
    assert psutil.wait_procs(started, timeout=10)[1] == []

"""max-batch and max-context as a stranger runs them, at their quick sizes: real servers."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.capacity.max_batch import QUICK
from loadtest.capacity.max_context import STEP
from loadtest.capacity.results import BatchResult, ContextResult
from loadtest.capacity.sides import Role

POLICY = ("--policy", "seqcalib@b34b784ae412", "--point", "tau-0.99")


@pytest.mark.slow  # six servers
@pytest.mark.timeout(3600)
def test_both_commands_measure_what_was_predicted(smollm2, tmp_path, capsys):
    assert main(["max-batch", "--quick", *POLICY, "--out", str(tmp_path)]) == 0
    result = msgspec.json.decode((tmp_path / "max-batch.json").read_bytes(), type=BatchResult)
    stock, full, windows = result.sides
    assert [side.server.role for side in result.sides] == [Role.STOCK, Role.FULL, Role.WINDOWS]
    for side in result.sides:
        assert side.largest == side.predicted == side.at_largest.peak_running
        assert side.probes[0].sent == side.predicted + 2 and side.probes[0].withdrawn == 2
        for run in side.runs:
            assert run.output_tokens == run.batch * QUICK.output
            assert run.retractions == 0 and run.cached_tokens < 16 * run.batch
            assert run.cpu_seconds > 0 and run.memory_bytes > 500_000_000
        assert side.kv_bytes <= result.kv_bytes
    assert stock.largest == full.largest == result.equal < windows.largest
    assert windows.request_bytes * windows.largest <= result.kv_bytes
    assert stock.needles.hits == full.needles.hits and stock.needles.found > 0

    assert main(["max-context", "--quick", *POLICY, "--out", str(tmp_path)]) == 0
    result = msgspec.json.decode((tmp_path / "max-context.json").read_bytes(), type=ContextResult)
    stock, full, windows = result.sides
    for side in result.sides:
        assert side.longest <= side.predicted < side.longest + STEP or side.longest == 2048
        assert side.answered > 0 and side.kv_bytes <= result.kv_bytes
    for side in (full, windows):
        assert side.kv_bytes <= side.predicted_kv_bytes
        assert side.kv_bytes > 0.9 * side.predicted_kv_bytes
    assert stock.longest < windows.longest
    page = (tmp_path / "report.html").read_text()
    assert "Largest batch" in page and "Longest context" in page
    assert "as far as was tried" in " ".join(capsys.readouterr().out.split())

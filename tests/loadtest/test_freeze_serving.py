"""The freeze benchmark as a stranger runs it, at its quick sizes: real servers, real weights."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.freeze_results import Result
from loadtest.freeze_setup import QUICK


@pytest.mark.slow  # three servers
def test_as_many_decode_together_as_predicted_and_the_rest_waits(smollm2, tmp_path, capsys):
    assert main(["freeze", "--quick", "--out", str(tmp_path)]) == 0
    assert "Frozen requests that decode together" in " ".join(capsys.readouterr().out.split())
    result = msgspec.json.decode((tmp_path / "freeze.json").read_bytes(), type=Result)
    stock, unfrozen, frozen = result.sides
    for side in result.sides:
        largest = side.largest
        assert largest.peak_decoding == side.predicted == largest.finished
        assert largest.withdrawn == largest.sent - side.predicted == 2
        assert side.equal.finished == stock.predicted and side.retractions == 0
        assert largest.output_tokens == side.predicted * QUICK.output_tokens
    assert unfrozen.predicted == stock.predicted < frozen.predicted
    assert frozen.largest.peak_frozen == frozen.predicted
    assert frozen.kept_share == pytest.approx(QUICK.budget_tokens / QUICK.prompt_tokens, abs=0.01)
    assert len(result.first_token.pairs) == QUICK.pairs

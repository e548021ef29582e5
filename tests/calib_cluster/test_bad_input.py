"""Bad input ends with one clear line, status 2, and nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from calib_cluster.__main__ import main
from tests.calib_cluster.tiny import Calibration, make_tiny_model


def _refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run in this process; the single line of the refusal."""
    capsys.readouterr()  # what making models printed
    status = main(list(args))
    error = capsys.readouterr().err.strip()
    assert status == 2, error
    assert len(error.splitlines()) == 1 and error.startswith("calib_cluster: "), error
    return error


@pytest.fixture
def arguments(calibration: Calibration) -> list[str]:
    """A good command line to spoil."""
    return calibration.arguments()


def _assert_nothing_written(calibration: Calibration) -> None:
    assert not [p for p in calibration.out.rglob("*") if p.is_file() and p.suffix != ".lock"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--tau", "1.5"], "--tau '1.5' is not accepted: give numbers in (0, 1]"),
        (["--tau", "x"], "--tau 'x' is not accepted"),
        (["--tau", "0.9999999,1"], "two points would be called tau-1"),
        (["--gpus-per-worker", "1.5"], "--gpus-per-worker 1.5 is not accepted"),
        (["--gpus-per-worker", "nan"], "--gpus-per-worker nan is not accepted"),
        (["--summary", "/no/such/folder/x.json"], "--summary /no/such/folder/x.json: not a file"),
        (["--codebook", "full"], "--codebook 'full' is not accepted"),
        (["--codebook", "64,-1"], "--codebook '64,-1' is not accepted"),
        (["--codebook", "4096,full"], "--length 768 is too short"),
        (["--prompts", "0"], "--prompts 0 is not accepted: give at least 1"),
        (["--workers", "9"], "--workers 9 is more than --prompts 4"),
        (["--sinks", "-1"], "--sinks -1 is not accepted"),
        (["--corpus", "no-such-corpus"], "no-such-corpus"),
        (["--name", "Not OK"], "--name: policy name 'Not OK' is not accepted"),
        (["--resume"], "nothing to resume"),
        (["--address", "127.0.0.1:1"], "Ray is not reachable at 127.0.0.1:1"),
        (["--address", "http://127.0.0.1:8265"], "give host:port of a running head node"),
    ],
)
def test_option(
    arguments: list[str],
    calibration: Calibration,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    said: str,
) -> None:
    assert said in _refused(capsys, *arguments, *extra)
    assert not list(calibration.out.glob("*/*/*"))


def test_corpora_without_a_usable_prompt(
    arguments: list[str],
    calibration: Calibration,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty, short = tmp_path / "empty.jsonl", tmp_path / "short.jsonl"
    empty.write_text("")
    short.write_text(json.dumps({"text": "too short"}) + "\n")
    assert "empty.jsonl" in _refused(capsys, *arguments, "--corpus", str(empty))
    refused = _refused(capsys, *arguments, "--corpus", str(short))
    assert "short.jsonl" in refused and "the smallest window plus sinks" in refused
    _assert_nothing_written(calibration)


def test_unwritable_output(arguments: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("in the way")
    out = str(tmp_path / "file" / "artifacts")
    assert "not writable" in _refused(capsys, *arguments, "--out", out)


def test_model_that_has_nothing_to_calibrate(
    arguments: list[str], smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "local-only", smollm2, layers=2)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    refused = _refused(capsys, *arguments, "--model", str(model))
    assert "nothing to calibrate" in refused and "--kv-policy native" in refused


def test_no_model_and_no_weights(arguments: list[str], tiny_model: Path, tmp_path, capsys) -> None:
    assert "config.json" in _refused(capsys, *arguments, "--model", str(tmp_path))
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "no weights" in _refused(capsys, *arguments, "--model", str(tmp_path))


def test_overlapping_held_out_texts(
    arguments: list[str], calibration: Calibration, tmp_path: Path, capsys
) -> None:
    words = " ".join(f"word{i} of a long and telling passage" for i in range(400))
    for name in ("seen.txt", "held.txt"):
        (tmp_path / name).write_text(f"{name} begins here. {words}")
    seen, held = str(tmp_path / "seen.txt"), str(tmp_path / "held.txt")
    spoiled = [*arguments, "--corpus", seen, "--prompts", "1", "--eval-corpus", held]
    assert "share text" in _refused(capsys, *spoiled, "--eval-prompts", "1")
    _assert_nothing_written(calibration)


def test_worker_that_does_not_fit_in_memory(
    arguments: list[str],
    calibration: Calibration,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("calib_cluster.memory.count_weights", lambda _: 10**12)
    refused = _refused(capsys, *arguments)
    assert "not enough memory on" in refused and "fewer --workers" in refused
    assert not list(calibration.out.glob("*/*/*"))


def test_help_lists_both_commands() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "seqcalib" in out.getvalue() and "corpus" in out.getvalue()

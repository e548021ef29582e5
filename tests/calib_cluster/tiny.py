"""A tiny model with a real tokenizer, and the calibration command run as a user runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpolicy.artifact import Artifact, load_artifact

ROOT = Path(__file__).parents[2]
LAYERS = 6


def make_tiny_model(folder: Path, tokenizer_from: Path, layers: int = LAYERS) -> Path:
    """A random Llama (hidden 64, 2 KV heads) that takes ``tokenizer_from``'s tokens.

    Heads read at very different distances, because keys and queries are made large.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=49152, max_position_embeddings=4096, head_dim=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
            layer.self_attn.k_proj.weight.mul_(8)
    model.save_pretrained(folder)
    for file in tokenizer_from.glob("*token*"):
        shutil.copy(file, folder)
    return folder


class Calibration:
    """``python -m calib_cluster seqcalib`` with fixed inputs, as a subprocess.

    Args:
        model: model folder.
        out: artifacts root.
    """

    def __init__(self, model: Path, out: Path) -> None:
        self.model, self.out = model, out

    def arguments(self, *extra: str) -> list[str]:
        """Arguments of ``calib_cluster.__main__.main``; ``extra`` comes last and so overrides."""
        fixed = (
            f"seqcalib --model {self.model} --out {self.out} --corpus stdlib dialogue --prompts 4 "
            "--length 768 --codebook 64,128,256,512,full --tau 0.6,0.8,0.95 --sinks 4"
        )
        return [*fixed.split(), *extra]

    def command(self, *extra: str) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "calib_cluster", *self.arguments(*extra)]

    def run(self, *extra: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr are text."""
        return subprocess.run(
            self.command(*extra), capture_output=True, text=True, cwd=ROOT, env=environment()
        )

    def start(self, *extra: str) -> RunningCalibration:
        """Run in the background."""
        return RunningCalibration(self.command(*extra))


class RunningCalibration:
    """A calibration that is being watched through its log."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=environment(),
        )  # fmt: skip
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        """Read lines until one contains ``text``; fails if the log ends first."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return line
        raise AssertionError(f"the log ended without {text!r}:\n" + "\n".join(self.lines))

    def finish(self) -> tuple[int, str]:
        """Exit status and the whole log."""
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(), "\n".join(self.lines)


def environment() -> dict[str, str]:
    """The test's environment, without a cluster that it may know."""
    kept = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    # a token left by another use of Ray in the home folder would switch authentication on
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


def artifact_of(log: str) -> Artifact:
    """The artifact that a log's last line names, verified."""
    last = log.strip().splitlines()[-1]
    assert last.startswith("artifact: "), log
    return load_artifact(last.removeprefix("artifact: "))


def wait_for(condition: Callable[[], object], timeout: float = 60.0) -> object:
    """Poll until ``condition()`` is true; returns its value."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return value

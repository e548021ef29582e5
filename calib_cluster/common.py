"""What the commands that calibrate on a cluster share: their log, their inputs, their state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from calib_cluster.corpora import RECIPES, Corpus, Size, load_corpora
from calib_cluster.errors import CalibrationError
from calib_cluster.job_paths import input_path
from calib_cluster.run_state import RunFolder
from kvpolicy.artifact import check_name, folder_name, load_artifact
from kvpolicy.errors import KvPolicyError
from kvpolicy.geometry import LayerKind, ModelGeometry, read_geometry

State = TypeVar("State", bound=RunFolder)
_QUIET = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}  # fmt: skip


def quiet_libraries() -> None:
    """Keep libraries from asking the network and from talking; what the user set stays."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def say(line: str) -> None:
    """One line for the log, at once: a job's log is read while it runs."""
    print(line, flush=True)


def calibratable(model: Path) -> ModelGeometry:
    """Geometry of a model that has something to calibrate. Raises CalibrationError."""
    try:
        geometry = read_geometry(model)
    except KvPolicyError as error:
        raise CalibrationError(f"--model: {error}") from error
    if not any(layer.kind is LayerKind.GLOBAL for layer in geometry.layers):
        raise CalibrationError(
            f"--model {model}: nothing to calibrate, no layer attends to the whole context; "
            "serve it with --kv-policy native"
        )
    return geometry


def state_of(kind: type[State], out: Path, model: Path, name: str) -> State:
    """State of policy ``name`` for ``model`` under ``out``. Raises CalibrationError."""
    try:
        return kind.at(out, folder_name(model), check_name(name))
    except KvPolicyError as error:
        raise CalibrationError(f"--name: {error}") from error


def tokenizer_of(model: Path):
    """The model's tokenizer. Raises CalibrationError if its folder has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CalibrationError(f"--model {model}: no tokenizer: {reason}") from error


def load_texts(specs: list[str], size: Size, field: str | None) -> tuple[Corpus, ...]:
    """The corpora of a command line: recipes, and files wherever a job runs."""
    return load_corpora([_corpus_path(spec) for spec in specs], size, field)


def _corpus_path(spec: str) -> str:
    """A file's spec made absolute; names of recipes, and halves (``/a``, ``/b``), are kept."""
    stem, half = (spec[:-2], spec[-2:]) if spec[-2:] in ("/a", "/b") else (spec, "")
    return spec if stem in RECIPES else input_path(stem) + half


def is_there(artifact: Path) -> bool:
    """True if the artifact is whole, False if it is gone: then it is written again.

    Raises CalibrationError if it is damaged, since nothing is ever overwritten.
    """
    if not artifact.exists():
        return False
    try:
        load_artifact(artifact)
    except KvPolicyError as error:
        raise CalibrationError(
            f"{error}; move that folder away, then --resume writes the policy again"
        ) from error
    return True

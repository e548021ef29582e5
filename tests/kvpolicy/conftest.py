"""Configs of real model families, as published, cut to the keys that matter; a calibration."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from kvpolicy.__main__ import main
from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.evidence import Evidence, HeldOut, calibratable, to_files
from kvpolicy.geometry import ModelGeometry, geometry_from_config
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.windows import FULL, WindowPolicy

_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
}
_GEMMA3_NESTED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
    "torch_dtype": "float32",
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 24,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_QWEN2_WINDOWED = _QWEN2 | {"use_sliding_window": True, "max_window_layers": 21}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
# Qwen3.6-27B-like: the geometry published for the 27B model of this family
_QWEN3_6_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}
_CONFIGS = {
    "smollm2": _SMOLLM2,
    "gemma3": _GEMMA3,
    "gemma3_nested": _GEMMA3_NESTED,
    "gemma2": _GEMMA2,
    "qwen2": _QWEN2,
    "qwen2_windowed": _QWEN2_WINDOWED,
    "qwen3": _QWEN3,
    "mistral": _MISTRAL,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_6_27b": _QWEN3_6_27B,
}


@pytest.fixture
def config():
    """Factory: a fresh copy of a named config with top-level keys replaced."""

    def make(name: str, **changes) -> dict:
        return copy.deepcopy(_CONFIGS[name]) | changes

    return make


@pytest.fixture
def geometry(config):
    """Factory: geometry of a named config with top-level keys replaced."""

    def make(name: str, **changes) -> ModelGeometry:
        return geometry_from_config(config(name, **changes))

    return make


@pytest.fixture
def model_dir(config, tmp_path):
    """Factory: a folder with only the config.json of a named config."""

    def make(name: str, **changes) -> Path:
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(name, **changes)))
        return folder

    return make


CODEBOOK = (64, 256, 1024)
TAUS = {"tau-0.95": 0.95, "tau-0.99": 0.99, "tau-0.995": 0.995}


class Calibrated:
    """A made-up calibration of a model: windows, evidence and losses that fit each other.

    Point i gives head h of layer l the candidate ``steps[i, l, h]`` (len(CODEBOOK) is full); the
    mean cosine of a candidate is tau + 0.001 * (its place - the chosen one's) + 0.0005.
    """

    def __init__(self, geom: ModelGeometry, seed: int = 0) -> None:
        self.geom = geom
        rng = np.random.default_rng(seed)
        mask = calibratable(geom)
        first = rng.integers(0, 2, size=mask.shape)
        self.steps = np.stack([first, first + 1, first + 1 + (rng.random(mask.shape) < 0.5)])
        sizes = np.array([*CODEBOOK, FULL], dtype=np.int32)
        native = WindowPolicy.native(geom).windows
        self.windows = np.where(mask, sizes[self.steps], native)
        places = np.arange(len(CODEBOOK)) - self.steps[..., None]
        taus = np.array(list(TAUS.values())).reshape(-1, 1, 1, 1)
        self.cosine = np.where(mask[..., None], taus + 0.001 * places + 0.0005, np.nan)
        self.record = CalibrationRecord(
            "seqcalib", {"bible": "ab" * 32, "code": "cd" * 32}, 5, 10240, seed, "ef" * 20,
            {"length": 2048, "codebook": list(CODEBOOK)},
        )  # fmt: skip
        self.held_out = HeldOut({"moby-dick": "12" * 32}, 3, 6000, 3.0, {"tau-0.99": 3.0125})

    @property
    def evidence(self) -> Evidence:
        return Evidence(CODEBOOK, self.cosine, np.array([3000, 2000, 1000]))

    def files(self) -> dict[str, bytes]:
        """Evidence, losses and a report."""
        return to_files(self.evidence, self.held_out) | {"report.html": b"<p>windows</p>"}

    def write(self, root: Path, extra: dict | None = None, files: dict | None = None) -> Path:
        """Write an artifact with ``files`` (default: all) and ``extra``; returns its folder."""
        points = [
            PointSpec(point, WindowPolicy(self.geom, windows, 4), tau, tau + 0.001)
            for (point, tau), windows in zip(TAUS.items(), self.windows, strict=True)
        ]
        kept = (self.files() if files is None else files) | (extra or {})
        return write_artifact(
            root, model_name="model", name="seqcalib", points=points, default_point="tau-0.99",
            calibration=self.record, extra_files=kept,
            weight_hashes={"model.safetensors": "34" * 32},
        )  # fmt: skip


@pytest.fixture
def calibrated(geometry):
    """Factory: a made-up calibration of a named config."""

    def make(name: str = "smollm2", seed: int = 0) -> Calibrated:
        return Calibrated(geometry(name), seed)

    return make


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """``run(*args)``: exit status, stdout and stderr of one command in an empty folder."""
    monkeypatch.setenv("RAGGEDKV_ARTIFACTS", "")
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as leave:
            status = leave.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def ok(run):
    """``ok(*args)``: stdout of a command that must succeed silently otherwise."""

    def call(*args: object) -> str:
        status, out, err = run(*args)
        assert (status, err) == (0, "")
        return out

    return call

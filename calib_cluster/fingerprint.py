"""What a run is: everything that can change its result, compared field by field on resume."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import kvpolicy
from calib_cluster.errors import CalibrationError

LIBRARIES = ("torch", "transformers")
SAMPLE = 1 << 20


class RunFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a calibration run.

    Hashes are sha256 hex; ``prompts`` and ``held_out`` hash the token ids. ``workers`` is not part
    of it: the result does not depend on their number.
    """

    model_config: str
    model_weights: dict[str, str]
    corpora: dict[str, str]
    prompts: str
    prompt_count: int
    length: int
    seed: int
    chat_template: bool
    codebook: tuple[int, ...]
    taus: tuple[float, ...]
    sinks: int
    dtype: str
    device: str
    threads: int
    held_out_corpora: dict[str, str]
    held_out: str
    code_version: str
    libraries: dict[str, str]

    def digest(self) -> str:
        """12 hex digits over all fields."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]

    def differences(self, other: RunFingerprint) -> list[str]:
        """One phrase per field that differs: ``name: ours -> theirs``."""
        return [
            f"{name.replace('_', ' ')}: {_short(getattr(self, name))} -> "
            f"{_short(getattr(other, name))}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def _short(value: object) -> str:
    if isinstance(value, dict):
        parts = (f"{key}={_short(item)}" for key, item in sorted(value.items()))
        return "{" + ", ".join(parts) + "}"
    text = str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_hash else text


def code_version() -> str:
    """``raggedkv VERSION+HASH``, the hash over the sources that decide a policy.

    Those are ``calib_cluster`` without its report, and ``kvpolicy``: two artifacts with the same
    code version were calibrated by the same code.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in (here, Path(kvpolicy.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder.parent)
            if "report" not in name.parts:
                digest.update(name.as_posix().encode())
                digest.update(path.read_bytes())
    try:
        release = version("raggedkv")
    except PackageNotFoundError:
        release = "source checkout"
    return f"raggedkv {release}+{digest.hexdigest()[:12]}"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute."""
    return {name: version(name) for name in LIBRARIES}


def weight_files(model_dir: Path) -> list[Path]:
    """Weight files that transformers loads, sorted: an index's, else all of one format.

    Raises:
        CalibrationError: there is none.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [model_dir / name for name in sorted(names)]
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        if files := sorted(model_dir.glob(pattern)):
            return files
    raise CalibrationError(
        f"--model {model_dir}: no weights (*.safetensors or pytorch_model*.bin) in it"
    )


def sample_weights(model_dir: Path) -> str:
    """sha256 (hex) over names, sizes, first and last MiB of the weight files.

    Quick enough for every worker, and enough to tell two models apart.
    """
    digest = hashlib.sha256()
    for path in weight_files(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def hash_weights(model_dir: Path) -> dict[str, str]:
    """sha256 of every weight file of a model folder.

    Raises:
        CalibrationError: there is none.
    """
    hashes = {}
    for path in weight_files(model_dir):
        with open(path, "rb") as handle:
            hashes[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return hashes

"""What a run is: everything that can change its result, compared field by field on resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import kvpolicy
from calib_cluster.errors import CalibrationError
from kvpolicy.retention import RetentionRule

LIBRARIES = ("torch", "transformers")
SAMPLE = 1 << 20
_PACKAGES = Path(__file__).parent, Path(kvpolicy.__file__).parent
_NO_PART = {"report", "judge"}  # what shows policies, and what measures them
_RECORD_SOURCES = (
    "calib_cluster/attention.py", "calib_cluster/capture.py", "calib_cluster/compile_worker.py",
    "calib_cluster/rewards", "kvpolicy/geometry.py", "kvpolicy/hf_config.py", "kvpolicy/retention",
    "kvpolicy/windows.py",
)  # fmt: skip


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can change a run's result, a field each."""

    def digest(self) -> str:
        """12 hex digits over all fields."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]

    def differences(self, other: Fingerprint) -> list[str]:
        """One phrase per field that differs: ``name: ours -> theirs``."""
        return _differences(self, other)


def _differences(ours: msgspec.Struct, theirs: msgspec.Struct) -> list[str]:
    found = []
    for name in ours.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, msgspec.Struct) and type(mine) is type(other):
            found += _differences(mine, other)
        elif mine != other:
            found.append(f"{name.replace('_', ' ')}: {_short(mine)} -> {_short(other)}")
    return found


class RunFingerprint(Fingerprint, frozen=True, forbid_unknown_fields=True):
    """Identity of a SeqCalib run.

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


class RecordFingerprint(Fingerprint, frozen=True, forbid_unknown_fields=True):
    """Identity of a set of reward records: what was evaluated, by which code.

    As in ``RunFingerprint``; ``length`` and ``continuation`` in tokens, ``draws`` evaluations a
    prompt and budget, ``draws_per_cell`` at least as many in a risk cell (0: no such wish) of
    ``bins`` (entropy, perplexity), which is (0, 0) without that wish.
    """

    model_config: str
    model_weights: dict[str, str]
    corpora: dict[str, str]
    prompts: str
    prompt_count: int
    length: int
    continuation: int
    seed: int
    chat_template: bool
    rule: RetentionRule
    behaviour: str
    budgets: tuple[int, ...]
    draws: int
    draws_per_cell: int
    bins: tuple[int, int]
    batch: int
    device: str
    threads: int
    code_version: str
    libraries: dict[str, str]

    def grown(self, other: RecordFingerprint) -> RecordFingerprint:
        """This one with what ``other`` may add or leave out without changing a prompt's draws."""
        free = ("corpora", "prompts", "prompt_count", "draws_per_cell", "bins")
        return msgspec.structs.replace(self, **{name: getattr(other, name) for name in free})


def _short(value: object) -> str:
    if isinstance(value, dict):
        parts = (f"{key}={_short(item)}" for key, item in sorted(value.items()))
        return "{" + ", ".join(parts) + "}"
    text = str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_hash else text


def code_version() -> str:
    """``raggedkv VERSION+HASH``, the hash over the sources that decide a policy.

    Those are ``calib_cluster`` without what only reports or judges, and ``kvpolicy``: two artifacts
    with the same code version were calibrated by the same code.
    """
    return _version(lambda source: not _NO_PART & set(source.parts))


def record_code_version() -> str:
    """The same over the sources that decide a prompt's reward records, whatever is fitted to them.

    What chooses prompts does not count: their token ids say what was chosen.
    """
    names = {Path(name) for name in _RECORD_SOURCES}
    return _version(lambda source: bool(names & {source, *source.parents}))


def _version(counts: Callable[[Path], bool]) -> str:
    """Over every source ``package/...`` that ``counts``."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package.parent)
            if counts(name):
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

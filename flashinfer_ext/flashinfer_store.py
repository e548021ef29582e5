"""A folder of compiled modules: a manifest, verified loading, and one error for all that can fail.

Loading needs tvm-ffi only, neither FlashInfer nor a compiler. Writing is atomic: a module is
written beside its final name, synced and renamed, then the manifest likewise.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import msgspec
import torch
from filelock import FileLock

from flashinfer_ext.flashinfer_source import ModuleSpec

FOLDER_VARIABLE = "RAGGEDKV_FLASHINFER"
MANIFEST_FILE = "manifest.json"
SCHEMA = 1


class VariantError(RuntimeError):
    """A FlashInfer variant cannot be used. The message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ModuleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled module. ``digest`` is of its variant (``ModuleSpec.digest``), ``sha256`` of the
    file; ``archs`` such as 8.0, 9.0a; versions of what it was built with; ``seconds`` by the clock
    that it took."""

    name: str
    digest: str
    archs: tuple[str, ...]
    file: str
    size: int
    sha256: str
    flashinfer: str
    tvm_ffi: str
    cuda: str
    seconds: float


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``manifest.json``."""

    schema: int = SCHEMA
    modules: tuple[ModuleEntry, ...] = ()


def default_folder() -> Path:
    """$RAGGEDKV_FLASHINFER, else ~/.cache/raggedkv/flashinfer."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "raggedkv" / "flashinfer"


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; an empty one if it has none.

    Raises:
        VariantError: unreadable, malformed, or of another schema.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return Manifest()
    except (OSError, msgspec.DecodeError) as error:
        raise VariantError(f"{path}: {error}") from error
    if manifest.schema != SCHEMA:
        raise VariantError(f"{path}: schema {manifest.schema}, this version reads {SCHEMA}")
    return manifest


def add_module(folder: Path, library: Path, entry: ModuleEntry) -> None:
    """Store ``library`` as ``entry.file`` and list it, in place of an entry for the same file.

    Raises:
        VariantError: the folder cannot be written.
    """
    try:
        with FileLock(folder / ".lock"):
            _write(folder / entry.file, library.read_bytes())
            others = [old for old in read_manifest(folder).modules if old.file != entry.file]
            manifest = Manifest(modules=tuple(sorted([*others, entry], key=lambda m: m.file)))
            encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            _write(folder / MANIFEST_FILE, encoded + b"\n")
    except OSError as error:
        raise VariantError(f"cannot store {entry.file}: {error}") from error


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether machine code for ``arch`` (8.0, 9.0a) runs on a GPU of that compute capability."""
    major, minor = arch.rstrip("af").split(".")
    if int(major) != capability[0]:
        return False
    return int(minor) == capability[1] or (arch[-1].isdigit() and int(minor) < capability[1])


def find_module(folder: Path, spec: ModuleSpec, capability: tuple[int, int] | None) -> ModuleEntry:
    """The entry of a prebuilt module that fits; ``capability`` None takes any architecture.

    Raises:
        VariantError: why none does.
    """
    named = [entry for entry in read_manifest(folder).modules if entry.name == spec.name]
    if not named:
        raise VariantError(f"no prebuilt {spec.name} in {folder}")
    same = [entry for entry in named if entry.digest == spec.digest]
    if not same:
        raise VariantError(f"{spec.name} in {folder} was built from other sources")
    installed = _series(version_of("apache-tvm-ffi"))
    linked = [entry for entry in same if _series(entry.tvm_ffi) == installed]
    if not linked:
        raise VariantError(f"{spec.name} in {folder} needs tvm-ffi {same[0].tvm_ffi}")
    for entry in linked:
        if capability is None or any(runs_on(arch, capability) for arch in entry.archs):
            return entry
    built = ", ".join(sorted({arch for entry in linked for arch in entry.archs}))
    raise VariantError(f"{spec.name} in {folder} is for {built}, the GPU is {capability}")


def version_of(distribution: str) -> str:
    """Version of an installed distribution, "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _series(version: str) -> list[str]:
    return version.split(".")[:2]


def load_prebuilt(folder: Path, spec: ModuleSpec, capability: tuple[int, int] | None):
    """Load a prebuilt module after checking its hash.

    Raises:
        VariantError: none fits, or it is damaged, or the loader refuses it.
    """
    entry = find_module(folder, spec, capability)
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise VariantError(f"{path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise VariantError(f"{path} is damaged: its hash differs from the manifest's")
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(path))
    except Exception as error:  # the loader raises what it likes
        raise VariantError(f"cannot load {path}: {error}") from error


def capability_of(device: str | torch.device) -> tuple[int, int] | None:
    """(major, minor) of a CUDA device, None for another."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None

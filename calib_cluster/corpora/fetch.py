"""Texts from distribution packages: the installed ones, else fetched once into a cache folder.

Packages lie in ``$RAGGEDKV_CACHE/corpora/KIND/NAME`` (default ``~/.cache/raggedkv/corpora/…``):
``tree/`` is what was in the package, ``SOURCE.json`` its version and hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from filelock import FileLock

from calib_cluster.errors import CalibrationError

SOURCE_FILE = "SOURCE.json"
TREE = "tree"
FETCH_SECONDS = 300
APT_OPTIONS = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``SOURCE.json``: which package file the tree beside it came from."""

    package: str
    version: str
    sha256: str  # of the package file


class PackageTree(msgspec.Struct, frozen=True):
    """A package's files: ``root`` plays the part of / for Debian, of the package for npm."""

    root: Path
    package: str
    version: str

    @property
    def label(self) -> str:
        return f"{self.package} {self.version}"


class DebianPackage(msgspec.Struct, frozen=True):
    """A Debian package; ``needs`` is a path in it without which it is of no use to us.

    A minimal image may have the package "installed" with its documentation left out.
    """

    name: str
    needs: str
    kind = "debian"

    @property
    def install_hint(self) -> str:
        return f"install it with: apt-get install {self.name}"

    def installed(self) -> PackageTree | None:
        """The files of the installed package, or None."""
        if not shutil.which("dpkg-query") or not (Path("/") / self.needs).exists():
            return None
        query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Version}", self.name]
        found = subprocess.run(query, capture_output=True, text=True)
        status, _, version = found.stdout.partition("\t")
        if found.returncode or not status.startswith("ii"):
            return None
        return PackageTree(Path("/"), self.name, version)

    def tools(self) -> tuple[str, ...]:
        return ("apt-get", "dpkg-deb")

    def download(self, folder: Path) -> tuple[Path, str]:
        """Package file and version, downloaded into ``folder``.

        When the machine's package lists are missing or out of date, fresh ones are read into
        ``folder``; the machine's own stay as they are, so this needs no root.
        """
        apt = ["apt-get", *APT_OPTIONS]
        try:
            _run(self, [*apt, "download", self.name], folder)
        except CalibrationError:
            apt += _private_lists(folder)
            _run(self, [*apt, "update"], folder)
            _run(self, [*apt, "download", self.name], folder)
        file = _only_file(self, folder, "*.deb")
        return file, _run(self, ["dpkg-deb", "-f", str(file), "Version"], folder).strip()

    def unpack(self, file: Path, tree: Path) -> None:
        _run(self, ["dpkg-deb", "-x", str(file), str(tree)], tree.parent)


class NpmPackage(msgspec.Struct, frozen=True):
    """An npm package at a fixed version; ``needs`` is a path in it that we read."""

    name: str
    version: str
    needs: str
    kind = "npm"

    @property
    def install_hint(self) -> str:
        return "npm fetches it: install Node.js (apt-get install npm)"

    def installed(self) -> PackageTree | None:
        return None

    def tools(self) -> tuple[str, ...]:
        return ("npm",)

    def download(self, folder: Path) -> tuple[Path, str]:
        """Package file and version, downloaded into ``folder``; npm checks its integrity."""
        _run(self, ["npm", "pack", "--silent", f"{self.name}@{self.version}"], folder)
        return _only_file(self, folder, "*.tgz"), self.version

    def unpack(self, file: Path, tree: Path) -> None:
        with tempfile.TemporaryDirectory(dir=tree.parent) as temporary:
            with tarfile.open(file) as archive:
                archive.extractall(temporary, filter="data")
            (Path(temporary) / "package").rename(tree)


Package = DebianPackage | NpmPackage


def corpora_dir() -> Path:
    """``$RAGGEDKV_CACHE/corpora``, or ``~/.cache/raggedkv/corpora`` when unset or empty."""
    cache = os.environ.get("RAGGEDKV_CACHE") or "~/.cache/raggedkv"
    return Path(cache).expanduser().resolve() / "corpora"


def find(package: Package) -> PackageTree | None:
    """The installed or already fetched package, or None. Raises CalibrationError if damaged."""
    return package.installed() or _cached(package)


def ensure(package: Package) -> PackageTree:
    """The package's files, fetched first when absent.

    Side effects: network (through apt-get or npm), a folder that appears in the cache by one
    rename. Raises CalibrationError, leaving nothing half-written.
    """
    if tree := find(package):
        return tree
    for tool in package.tools():
        if not shutil.which(tool):
            raise CalibrationError(
                f"package {package.name} is not installed and {tool} is not there to fetch it; "
                + package.install_hint
            )
    target = _folder(package)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not _cached(package):  # another process may have been faster
                _fetch(package, target)
    except OSError as error:
        raise CalibrationError(f"cannot write {target}: {error}") from error
    return _cached(package) or _damaged(target)


def _folder(package: Package) -> Path:
    return corpora_dir() / package.kind / package.name.replace("/", "__")


def _cached(package: Package) -> PackageTree | None:
    folder = _folder(package)
    if not folder.is_dir():
        return None
    try:
        source = msgspec.json.decode((folder / SOURCE_FILE).read_bytes(), type=Source)
    except (OSError, msgspec.DecodeError):
        _damaged(folder)
    if not (folder / TREE / package.needs).exists():
        _damaged(folder)
    if isinstance(package, NpmPackage) and source.version != package.version:
        raise CalibrationError(f"{folder} holds {source.version}, not {package.version}: remove it")
    return PackageTree(folder / TREE, source.package, source.version)


def _damaged(folder: Path) -> PackageTree:
    raise CalibrationError(f"{folder} is incomplete: remove it, then it is fetched again")


def _fetch(package: Package, target: Path) -> None:
    """Download and unpack beside ``target``, then rename."""
    prefix = f".{target.name}.tmp-"
    for stale in target.parent.glob(prefix + "*"):  # we hold the lock: nobody uses these
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as temporary:
        work = Path(temporary)
        work.chmod(0o755)  # apt downloads as its own user
        new = work / "new"
        new.mkdir()
        file, version = package.download(work)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        package.unpack(file, new / TREE)
        if not (new / TREE / package.needs).exists():
            raise CalibrationError(f"package {package.name} {version} has no {package.needs}")
        source = Source(package=package.name, version=version, sha256=digest)
        write_durably(new / SOURCE_FILE, msgspec.json.encode(source) + b"\n")
        new.rename(target)


def write_durably(path: Path, data: bytes) -> None:
    """Write through a temporary name in the same folder, fsync, rename. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _private_lists(folder: Path) -> list[str]:
    """Options with which apt-get keeps package lists in ``folder``."""
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def _only_file(package: Package, folder: Path, pattern: str) -> Path:
    files = list(folder.glob(pattern))
    if len(files) != 1:
        raise CalibrationError(f"fetching package {package.name} gave {len(files)} files, not one")
    return files[0]


def _run(package: Package, command: Sequence[str], folder: Path) -> str:
    """Stdout of a packaging tool. Raises CalibrationError with the tool's own last words."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(
            f"cannot fetch package {package.name}: {command[0]} did not end in {FETCH_SECONDS} s"
        ) from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line and not line.startswith("W:")]
        raise CalibrationError(
            f"cannot fetch package {package.name}: {command[0]}: "
            f"{said[-1] if said else f'exit status {done.returncode}'}; {package.install_hint}"
        )
    return done.stdout

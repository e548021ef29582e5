"""Compile the FlashInfer variants ahead of time, or on first use: no GPU is needed for it.

``build_command`` is the command line; ``load_module`` is what the attention classes call. What the
compiler's surroundings may lack is made here: a libcuda to link against (nothing of it is called),
CUDA's home and the architectures for FlashInfer's build files.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from flashinfer_ext.flashinfer_source import DTYPES, HEAD_DIMS, KINDS, ModuleSpec
from flashinfer_ext.flashinfer_store import (
    ModuleEntry,
    VariantError,
    add_module,
    capability_of,
    default_folder,
    load_prebuilt,
    read_manifest,
    version_of,
)

DEFAULT_ARCHS = ("8.0", "9.0a")
DEFAULT_HEAD_DIMS = (64, 128)


def find_cuda_home() -> Path:
    """CUDA's folder, with nvcc, headers and runtime: $CUDA_HOME, else where nvcc on PATH lies, else
    /usr/local/cuda.

    Raises:
        VariantError: there is no nvcc.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc")
    if named:
        candidates = [Path(named)]
    else:
        candidates = [Path(found).resolve().parents[1]] if found else []
        candidates.append(Path("/usr/local/cuda"))
    for home in candidates:
        header = home / "include" / "cuda_runtime.h"  # nvcc on PATH may be a script elsewhere
        if (home / "bin" / "nvcc").is_file() and header.is_file():
            return home
    searched = f"in CUDA_HOME={named}" if named else "on PATH or in /usr/local/cuda"
    raise VariantError(f"no CUDA compiler: nvcc is not {searched}")


def build_module(
    spec: ModuleSpec, archs: Sequence[str], folder: Path, jobs: int = 1
) -> ModuleEntry:
    """Compile one module and store it, whatever is there already.

    Args:
        archs: such as 8.0, 9.0a.
        jobs: compilers at a time; each takes up to 3 GB.

    Raises:
        VariantError: FlashInfer or a compiler is missing, or compiling failed.

    Side effects: writes ``folder``; runs compilers for minutes.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise VariantError("cannot build FlashInfer variants: flashinfer is not installed")
    home = find_cuda_home()
    cuda = _cuda_version(home)
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as work:
            library = _compile(spec, archs, home, Path(work), jobs)
            data = library.read_bytes()
            versions = [version_of("flashinfer-python"), version_of("apache-tvm-ffi"), cuda]
            key = hashlib.sha256("\0".join([spec.digest, *archs, *versions]).encode())
            entry = ModuleEntry(
                spec.name, spec.digest, tuple(archs), f"{spec.name}-{key.hexdigest()[:12]}.so",
                len(data), hashlib.sha256(data).hexdigest(), *versions,
                round(time.monotonic() - began, 1),
            )  # fmt: skip
            add_module(folder, library, entry)
    except OSError as error:
        raise VariantError(f"cannot build {spec.name} in {folder}: {error}") from error
    return entry


def _compile(spec: ModuleSpec, archs: Sequence[str], home: Path, work: Path, jobs: int) -> Path:
    """The shared library of ``spec``, built under ``work``."""
    _link_stub(work)
    flags = f"{os.environ.get('FLASHINFER_EXTRA_LDFLAGS', '')} -L{work}"
    search = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment = {
        **os.environ, "CUDA_HOME": str(home), "FLASHINFER_CUDA_ARCH_LIST": " ".join(archs),
        "FLASHINFER_WORKSPACE_BASE": str(work), "FLASHINFER_EXTRA_LDFLAGS": flags.strip(),
        "MAX_JOBS": str(jobs), "PATH": os.pathsep.join(search),
    }  # fmt: skip
    environment.pop("FLASHINFER_DISABLE_JIT", None)
    command = [sys.executable, "-m", "flashinfer_ext.flashinfer_worker"]
    command += [spec.kind, str(spec.head_dim), spec.dtype]
    package = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=package)
    if done.returncode != 0:
        raise VariantError(f"compiling {spec.name} failed: {_reason(done.stdout + done.stderr)}")
    return Path(done.stdout.splitlines()[-1])


def _link_stub(folder: Path) -> None:
    """A libcuda.so to link against where there is no driver; the real one is found when loading."""
    source = folder / "libcuda.c"
    source.write_text("int raggedkv_link_stub;\n")
    command = [os.environ.get("CC", "cc"), "-shared", "-Wl,-soname,libcuda.so.1"]
    command += ["-o", str(folder / "libcuda.so"), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise VariantError(f"no C compiler: {command[0]} is not on PATH") from error
    if done.returncode != 0:
        raise VariantError(f"the C compiler failed: {_reason(done.stderr)}")


def _reason(output: str) -> str:
    """The line of a compiler's output that says most: its first error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror: |cannot find |undefined ref", line)]
    return (errors[0] if errors else lines[-1] if lines else "no output")[:300]


def _cuda_version(home: Path) -> str:
    """Release of nvcc, such as 13.0."""
    shown = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    release = re.search(r"release ([\d.]+)", shown.stdout)
    if release is None:
        raise VariantError(f"{home / 'bin' / 'nvcc'} does not run: {_reason(shown.stderr)}")
    return release[1]


def load_module(
    spec: ModuleSpec, device: str | torch.device, folder: Path | None = None, build: bool = True
):
    """The compiled module for a GPU: prebuilt if one fits, else compiled now and stored.

    Args:
        folder: ``default_folder()`` if None.
        build: False never compiles.

    Raises:
        VariantError: neither works; the message says why, both ways.
    """
    folder = default_folder() if folder is None else folder
    capability = capability_of(device)
    try:
        return load_prebuilt(folder, spec, capability)
    except VariantError as error:
        if not build or capability is None:
            raise
        missing = error
    try:
        build_module(spec, [f"{capability[0]}.{capability[1]}"], folder, os.cpu_count() or 1)
    except VariantError as error:
        raise VariantError(f"{missing}; {error}") from error
    return load_prebuilt(folder, spec, capability)


def build_command(argv: Sequence[str] | None = None) -> int:
    """``build-flashinfer``: compile modules into a folder. Returns the exit code.

    Modules that are there already, from the same sources and for the same architectures, are kept.
    """
    args = _parser().parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)
    specs = [ModuleSpec(k, d, t) for d in args.head_dims for t in args.dtypes for k in args.kinds]
    folder = Path(args.out).expanduser() if args.out else default_folder()
    try:
        for number, spec in enumerate(specs, 1):
            title = f"[{number}/{len(specs)}] {spec.name} for {' '.join(args.archs)}"
            if not args.force and _is_built(folder, spec, args.archs):
                console.print(f"{title}: kept", markup=False)
                continue
            console.print(f"{title}: compiling (a decode module takes about 1 to 2 minutes, a "
                          "prefill module 5, on one core)", markup=False)  # fmt: skip
            with console.status("compiling"):
                entry = build_module(spec, args.archs, folder, args.jobs)
            console.print(f"{title}: {entry.seconds:.0f} s, {entry.size / 2**20:.1f} MiB, "
                          f"{entry.file}", markup=False)  # fmt: skip
    except VariantError as error:
        print(f"build-flashinfer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build-flashinfer: interrupted; what is built is kept", file=sys.stderr)
        return 130
    return 0


def _is_built(folder: Path, spec: ModuleSpec, archs: Sequence[str]) -> bool:
    """Whether the folder holds that module, undamaged, for these architectures and versions."""
    versions = (version_of("flashinfer-python"), version_of("apache-tvm-ffi"))
    for entry in read_manifest(folder).modules:
        path = folder / entry.file
        if (
            (entry.name, entry.digest) == (spec.name, spec.digest)
            and set(archs) <= set(entry.archs)
            and (entry.flashinfer, entry.tvm_ffi) == versions
            and path.is_file()
            and hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
        ):
            return True
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashinfer_ext build-flashinfer",
        description="Compile the FlashInfer variants; no GPU is needed.",
    )
    parser.add_argument("--out", help=f"folder of the modules (default {default_folder()})")
    parser.add_argument(
        "--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=list(DEFAULT_HEAD_DIMS)
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--archs", nargs="+", type=_arch, default=list(DEFAULT_ARCHS),
                        help="such as 8.0 9.0a 10.0a")  # fmt: skip
    parser.add_argument("--jobs", type=_positive, default=1,
                        help="compilers at a time, up to 3 GB each (default 1)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="compile what is there already too")
    return parser


def _arch(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d[af]?", text) or float(text.rstrip("af")) < 8:
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture from 8.0 on, such as 9.0a")
    return text


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)

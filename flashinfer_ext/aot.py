"""``python -m flashinfer_ext aot``: compile every shipped kernel configuration, without a GPU.

The gate fails on spills, on shared memory or registers above their bounds, and where async copies
or tensor-core instructions are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from flashinfer_ext.aot_figures import Figures
    from flashinfer_ext.aot_launch import Case

ARCHS = (80, 90, 100)
KNOWN = (80, 86, 89, 90, 100)


class AotError(Exception):
    """The gate cannot run; one line says why."""


def add_aot(commands: argparse._SubParsersAction) -> None:
    """Add the command's options."""
    parser = commands.add_parser("aot", help="compile all kernels and check their figures")
    parser.add_argument(
        "--arch", type=int, action="append", choices=KNOWN, metavar="CC",
        help=f"compute capability: {', '.join(map(str, KNOWN))}; repeatable "
        f"(default: {' '.join(map(str, ARCHS))})",
    )  # fmt: skip
    parser.add_argument(
        "--filter", metavar="TEXT", default="",
        help="only cases whose name holds every word of TEXT, as 'decode D128 G4'",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="one case of each tile shape, for the test suite"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=run_aot)


def run_aot(args: argparse.Namespace) -> int:
    """Compile, print the table and the breaches. Returns 1 if there are any, else 0.

    Raises:
        AotError: nothing can be compiled here, or no case is chosen.
    """
    check_compiler()
    from flashinfer_ext.aot_cases import full_cases, quick_cases

    words = args.filter.split()
    cases = [
        case for case in (quick_cases() if args.quick else full_cases())
        if all(word in case.name.split() for word in words)
    ]  # fmt: skip
    if not cases:
        raise AotError(f"no case's name holds every word of {args.filter!r}; try 'decode D128'")
    archs = args.arch or list(ARCHS)
    figures, breaches = measure(cases, archs, _progress)
    print_table(figures)
    if args.json:
        write_json(args.json, figures, breaches)
    for breach in breaches:
        print(f"flashinfer_ext: {breach}", file=sys.stderr)
    counted = f"{len(figures)} kernels for " + ", ".join(f"cuda:{arch}" for arch in archs)
    print(f"{counted}: {len(breaches)} breaches" if breaches else f"{counted}: all within bounds")
    return 1 if breaches else 0


def check_compiler() -> None:
    """Fail early where kernels cannot be compiled.

    Raises:
        AotError: Triton or one of its tools is missing, or the interpreter is on.
    """
    try:
        from triton import knobs
    except ImportError as error:
        raise AotError(f"triton is not installed ({error}): pip install triton") from error
    if knobs.runtime.interpret:
        raise AotError("TRITON_INTERPRET is set: kernels are interpreted, not compiled; unset it")
    for tool in ("ptxas", "cuobjdump", "nvdisasm"):
        try:
            path = getattr(knobs.nvidia, tool).path
        except RuntimeError as error:
            raise AotError(f"triton's {tool} is missing ({error}): reinstall triton") from error
        if not os.access(path, os.X_OK):
            raise AotError(f"{path} cannot be executed: reinstall triton")


def measure(
    cases: Sequence[Case], archs: Sequence[int], report: Callable[[str], None] = lambda line: None
) -> tuple[list[Figures], list[str]]:
    """Figures of every kernel of every case, without repeats, and all breaches.

    A case that the compiler refuses is a breach. ``report`` is told what is being compiled.
    """
    from flashinfer_ext.aot_figures import breaches_of, figures_of
    from flashinfer_ext.aot_launch import compile_case

    figures: list[Figures] = []
    breaches: list[str] = []
    seen: set[tuple[int, bytes]] = set()
    for arch in archs:
        for case in cases:
            report(f"cuda:{arch} {case.name}")
            try:
                made = compile_case(case, arch)
            except Exception as error:  # whatever the compiler raises is a finding
                breaches.append(f"cuda:{arch} {case.name}: {_first_line(error)}")
                continue
            for compiled in made:
                if (arch, compiled.cubin) in seen:
                    continue
                seen.add((arch, compiled.cubin))
                found = figures_of(case, arch, compiled)
                figures.append(found)
                breaches += breaches_of(case, found)
    return figures, breaches


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def print_table(figures: Sequence[Figures]) -> None:
    """One row per kernel; SGLang's are dimmed."""
    from rich.console import Console
    from rich.table import Table

    names = ("CC", "case", "kernel", "warps", "registers", "shared", "spills", "LDGSTS.128",
             "HMMA", "HGMMA", "tcgen05", "CTAs/SM")  # fmt: skip
    table = Table(title="Kernels, compiled ahead of time")
    for name in names:
        left = name in ("case", "kernel")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in figures:
        table.add_row(
            str(row.arch), row.case, row.kernel, str(row.warps), str(row.registers),
            str(row.shared), f"{row.spill_stores}/{row.spill_loads}", str(row.async_copies),
            str(row.hmma), str(row.hgmma), str(row.tcgen05), str(row.ctas),
            style="dim" if row.kernel == "sglang" else None,
        )  # fmt: skip
    console = Console()
    Console(width=console.width if console.is_terminal else 160).print(table)


def write_json(path: Path, figures: Sequence[Figures], breaches: Sequence[str]) -> None:
    """Write both atomically.

    Raises:
        AotError: the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode({"kernels": figures, "breaches": breaches}))
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise AotError(f"cannot write {path}: {error.strerror}") from error


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

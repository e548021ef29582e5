"""Seeded faults of the Triton kernels, each of which the tests must catch.

``python -m tests.flashinfer_ext.mutants [NAME ...]`` applies each mutant to a copy of the package
and runs the kernels' tests there until the first failure. It prints a table and exits with 1 if a
mutant survives, no longer applies, or the tests fail without one. ``--list`` names them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.flashinfer_ext.mutant_list import MUTANTS, ON_DECODE, ON_EXTEND, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("flashinfer_ext", "tests/__init__.py", "tests/conftest.py", "tests/flashinfer_ext")
TIMEOUT = 600  # seconds; a mutant that loops forever counts as caught


@dataclass(frozen=True)
class Verdict:
    """How a run of the tests ended: ``passed``, the first failing test, and seconds."""

    passed: bool
    by: str
    seconds: float


@contextmanager
def package_copy() -> Iterator[Path]:
    """A temporary folder with the package, its tests and their configuration."""
    with tempfile.TemporaryDirectory(prefix="raggedkv-mutants-") as name:
        folder = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for part in COPIED:
            source, target = ROOT / part, folder / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignore)
            else:
                shutil.copy(source, target)
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield folder


def run_tests(folder: Path, tests: Sequence[str]) -> Verdict:
    """Run test files of a copy up to the first failure, on that copy's package."""
    files = [f"tests/flashinfer_ext/{name}" for name in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *files], cwd=folder, env=env, capture_output=True, text=True,
            timeout=TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict(False, f"no end in {TIMEOUT} s", time.monotonic() - began)
    seconds = time.monotonic() - began
    if done.returncode < 0:
        return Verdict(False, f"signal {-done.returncode}", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py\S*)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        return Verdict(False, (done.stderr or done.stdout).strip().splitlines()[-1], seconds)
    return Verdict(done.returncode == 0, failed[1] if failed else "", seconds)


def try_mutant(mutant: Mutant | None) -> Verdict:
    """The tests' verdict on one mutant; None: on the package as it is.

    Raises:
        ValueError: the mutant's text is not in the source.
    """
    with package_copy() as folder:
        if mutant is not None:
            mutant.apply(folder / "flashinfer_ext")
        return run_tests(folder, mutant.tests if mutant else (*ON_DECODE, *ON_EXTEND))


def judge(mutants: Sequence[Mutant], console: Console) -> list[str]:
    """Try the package and each mutant; print a table; return what is wrong, a line each."""
    control = try_mutant(None)
    if not control.passed:
        return [f"the tests fail without a mutant: {control.by}"]
    console.print(f"without a mutant: passed in {control.seconds:.0f} s")
    table, wrong = Table("mutant", "file", "verdict", "by", "s"), []
    for mutant in mutants:
        try:
            verdict = try_mutant(mutant)
        except ValueError as error:
            wrong.append(f"{mutant.name}: {error}")
            table.add_row(mutant.name, mutant.file, "does not apply", "", "")
            continue
        if verdict.passed:
            wrong.append(f"{mutant.name}: survived")
        word = "survived" if verdict.passed else "caught"
        table.add_row(mutant.name, mutant.file, word, verdict.by, f"{verdict.seconds:.0f}")
        console.print(f"{mutant.name}: {word} in {verdict.seconds:.0f} s", highlight=False)
    console.print(table)
    console.print(f"{len(mutants) - len(wrong)} of {len(mutants)} caught")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every mutant was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.flashinfer_ext.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try (default: all)")
    parser.add_argument("--list", action="store_true", help="print their names")
    options = parser.parse_args(argv)
    known = {mutant.name: mutant for mutant in MUTANTS}
    if options.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no mutant {unknown[0]!r}; --list names them")
    wrong = judge([known[n] for n in options.names or known], Console(width=140))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

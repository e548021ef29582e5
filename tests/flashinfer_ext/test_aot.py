"""The ahead-of-time gate: it passes on a subset, and sees what it must refuse.

What compiles runs in a subprocess: this process interprets kernels instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flashinfer_ext import aot
from flashinfer_ext.aot_figures import CHIPS, Figures, breaches_of, count_instructions, occupancy
from flashinfer_ext.aot_launch import Case

ROOT = Path(__file__).parents[2]

SOUND = Figures(
    arch=90, case="x", kernel="extend", warps=4, registers=200, shared=80 << 10, spill_stores=0,
    spill_loads=0, stack=0, async_copies=8, hmma=0, hgmma=8, tcgen05=0, ctas=2,
)  # fmt: skip


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env={**clean, **env}
    )


@pytest.mark.slow  # a minute
def test_the_gate_passes_on_a_subset(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run(
        "-m", "flashinfer_ext", "aot", "--quick", "--arch", "80", "--arch", "90", "--json", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(out.read_text())
    assert written["breaches"] == []
    found = {(k["arch"], k["kernel"]) for k in written["kernels"]}
    kernels = ("decode", "merge", "fill", "extend", "sglang")
    assert found == {(arch, kernel) for arch in (80, 90) for kernel in kernels}
    assert "all within bounds" in done.stdout


BAD = """
import flashinfer_ext.{module} as kernel
kernel.{name}_config = lambda *_: kernel.{config}
from flashinfer_ext.aot import measure
from flashinfer_ext.aot_launch import Case
for line in measure([Case("{name}", 128, 4)], [80])[1]:
    print(line)
"""


@pytest.mark.parametrize(
    ("name", "config", "wanted"),
    [
        ("decode", "DecodeConfig(256, 2, 7)", ["spills: ", "shared memory, a CTA has 166912"]),
        ("extend", "ExtendConfig(64, 32, 4, 1)", ["no 16-byte async copies"]),
    ],
)
def test_bad_tiles_are_breaches(name: str, config: str, wanted: list[str]) -> None:
    done = run("-c", BAD.format(module=f"triton_{name}", name=name, config=config))
    assert done.returncode == 0, done.stderr
    for text in wanted:
        assert f"cuda:80 {name} D128 G4 bf16 page16 ({name} kernel): " in done.stdout
        assert text in done.stdout


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"spill_loads": 1}, "spills: 0 stores, 1 loads"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"shared": (227 << 10) + 1}, "shared memory, a CTA has 232448"),
        ({"registers": 256}, "256 registers, the bound is 255"),
        ({"ctas": 0}, "not one CTA fits"),
        ({"async_copies": 0}, "no 16-byte async copies"),
        ({"hgmma": 0, "hmma": 9}, "HGMMA"),
    ],
)
def test_each_bound_is_checked(change: dict, wanted: str) -> None:
    assert breaches_of(Case("extend"), SOUND) == []
    (breach,) = breaches_of(Case("extend"), msgspec.structs.replace(SOUND, **change))
    assert breach.startswith("cuda:90 x (extend kernel): ") and wanted in breach


def test_what_is_not_demanded() -> None:
    bare = msgspec.structs.replace(SOUND, async_copies=0, hgmma=0)
    assert breaches_of(Case("extend", dtype="fp32"), bare) == []
    assert breaches_of(Case("sglang-decode"), msgspec.structs.replace(bare, kernel="sglang")) == []
    wide = msgspec.structs.replace(SOUND, hgmma=0, hmma=3)
    assert breaches_of(Case("extend", 256), wide) == []
    old = msgspec.structs.replace(wide, arch=80)
    assert breaches_of(Case("extend", 128), old) == []
    assert len(breaches_of(Case("extend", 128), msgspec.structs.replace(old, hmma=0))) == 1


def test_instructions_are_counted_by_opcode() -> None:
    sass = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64] ;
        /*0020*/                   LDGSTS.E [R1], [R2.64] ;
        /*0030*/              @!PT LDGSTS.E.LTC128B [R1], [R2.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*0060*/              @UP0 UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4] ;
        /*0070*/                   STL [R1], R2 ;
        /*0080*/               @P1 LDL.64 R2, [R1] ;
        /*0090*/                   LDG.E.128 R2, [R1.64] ;
    """
    assert count_instructions(sass) == {
        "spill_stores": 1, "spill_loads": 1, "async_copies": 2, "hmma": 1, "hgmma": 1, "tcgen05": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "wanted"),
    [
        (32, 0, 4, 16),  # 2048 threads
        (64, 0, 4, 8),  # 64 * 128 of 65536 registers
        (65, 0, 4, 7),  # dealt in steps of 8 registers a thread
        (255, 0, 4, 2),
        (32, 100 << 10, 4, 2),  # 101 KiB each with what is reserved, of 228
        (32, 227 << 10, 4, 1),
        (32, 228 << 10, 4, 0),
        (16, 0, 1, 32),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, wanted: int) -> None:
    assert occupancy(CHIPS[90], registers, shared, warps) == wanted


def test_the_interpreter_is_refused() -> None:
    done = run("-m", "flashinfer_ext", "aot", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert done.stderr.startswith("flashinfer_ext: TRITON_INTERPRET is set")
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(aot.AotError, match="triton is not installed"):
        aot.check_compiler()


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--arch", "75"], "invalid choice: 75"),
        (["--filter", "decode D65"], "no case's name holds every word of 'decode D65'"),
    ],
)
def test_bad_options_are_one_line(args: list[str], wanted: str) -> None:
    done = run("-m", "flashinfer_ext", "aot", *args)
    assert done.returncode == 2 and wanted in done.stderr and done.stderr.count("\n") == 1

"""What a cubin tells about a kernel, and the bounds it is held to."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter

import msgspec
from triton import knobs

from flashinfer_ext.aot_launch import Case, Compiled

REGISTERS = {"decode": 232, "merge": 136, "fill": 112, "extend": 255}
"""Most registers of a thread: today's figures and a little more."""


class Chip(msgspec.Struct, frozen=True):
    """Limits of an architecture (CUDA C++ programming guide, compute capabilities).

    Fields: bytes of shared memory of a CTA and of a multiprocessor; its threads and CTAs.
    """

    cta_shared: int
    shared: int
    threads: int
    ctas: int


CHIPS = {
    80: Chip(163 << 10, 164 << 10, 2048, 32),
    86: Chip(99 << 10, 100 << 10, 1536, 16),
    89: Chip(99 << 10, 100 << 10, 1536, 24),
    90: Chip(227 << 10, 228 << 10, 2048, 32),
    100: Chip(227 << 10, 228 << 10, 2048, 32),
}


class Figures(msgspec.Struct, frozen=True):
    """One kernel of one case, for one architecture.

    Fields: ``registers`` of a thread; ``shared`` bytes of a CTA, static and dynamic;
    ``spill_stores`` and ``spill_loads`` local-memory instructions (STL, LDL) and ``stack`` bytes;
    ``async_copies`` 16-byte global-to-shared copies (LDGSTS.128); ``hmma``, ``hgmma``, ``tcgen05``
    tensor-core instructions; ``ctas`` that fit a multiprocessor.
    """

    arch: int
    case: str
    kernel: str
    warps: int
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int
    async_copies: int
    hmma: int
    hgmma: int
    tcgen05: int
    ctas: int

    @property
    def tensor_ops(self) -> int:
        """Tensor-core instructions of any kind."""
        return self.hmma + self.hgmma + self.tcgen05


def occupancy(chip: Chip, registers: int, shared: int, warps: int) -> int:
    """CTAs that fit a multiprocessor: 64K registers dealt to its four quarters in units of 256 a
    warp, 1 KiB of shared memory reserved per CTA."""
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 4 * (16384 // max(per_warp, 256)) // warps
    by_shared = chip.shared // (shared + 1024)
    return min(by_registers, by_shared, chip.threads // (32 * warps), chip.ctas)


_OPCODES = {
    "spill_stores": r"STL\b",
    "spill_loads": r"LDL\b",
    "async_copies": r"LDGSTS\S*\.128\b",
    "hmma": r"HMMA\b",
    "hgmma": r"HGMMA\b",
    "tcgen05": r"UTC\w*MMA\b",
}


def count_instructions(sass: str) -> dict[str, int]:
    """Instructions of each kind in a disassembly by nvdisasm."""
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)", sass, re.M)
    counts: Counter[str] = Counter()
    for opcode in opcodes:
        counts.update(name for name, shape in _OPCODES.items() if re.match(shape, opcode))
    return {name: counts[name] for name in _OPCODES}


def figures_of(case: Case, arch: int, compiled: Compiled) -> Figures:
    """Read a cubin with the disassemblers that come with Triton.

    Raises:
        RuntimeError: a disassembler is missing or fails.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    if not found:
        raise RuntimeError(f"cuobjdump printed no resource usage of {compiled.function}")
    registers, stack, _ = (int(number) for number in found.groups())
    kernel = "sglang" if case.kernel == "sglang-decode" else compiled.function.split("_")[1]
    return Figures(
        arch=arch, case=case.name, kernel=kernel, warps=compiled.warps, registers=registers,
        shared=compiled.shared, stack=stack,
        ctas=occupancy(CHIPS[arch], registers, compiled.shared, compiled.warps),
        **count_instructions(sass),
    )  # fmt: skip


def breaches_of(case: Case, figures: Figures) -> list[str]:
    """One line per bound that the kernel breaks; SGLang's are shown, not judged."""
    if figures.kernel == "sglang":
        return []
    found = []
    if figures.spill_stores or figures.spill_loads or figures.stack:
        found.append(
            f"spills: {figures.spill_stores} stores, {figures.spill_loads} loads, "
            f"{figures.stack} bytes of stack"
        )
    limit = CHIPS[figures.arch].cta_shared
    if figures.shared > limit:
        found.append(f"{figures.shared} bytes of shared memory, a CTA has {limit}")
    bound = REGISTERS[figures.kernel]
    if figures.registers > bound:
        found.append(f"{figures.registers} registers, the bound is {bound}")
    if figures.ctas < 1:
        found.append("not one CTA fits a multiprocessor")
    if figures.kernel in ("decode", "extend") and case.dtype != "fp32":
        if not figures.async_copies:
            found.append("no 16-byte async copies (LDGSTS.128)")
        if not figures.tensor_ops:
            found.append("no tensor-core instructions")
        if _wants_hgmma(case, figures) and not figures.hgmma:
            found.append("no warpgroup tensor-core instructions (HGMMA)")
    where = f"cuda:{figures.arch} {figures.case} ({figures.kernel} kernel)"
    return [f"{where}: {what}" for what in found]


def _wants_hgmma(case: Case, figures: Figures) -> bool:
    return figures.arch == 90 and figures.kernel == "extend" and case.head_dim <= 128


def _tool(name: str, *args: str) -> str:
    path = getattr(knobs.nvidia, name).path
    try:
        return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(f"{name} failed: {' '.join(detail.split())}") from error

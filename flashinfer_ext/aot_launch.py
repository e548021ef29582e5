"""Compile the kernels as the launchers would, with no GPU and no tensor data.

The launchers run on ``meta`` tensors under a driver that only names a target; each launch is cut
short after compilation. Signatures, specialisations, constants and tile sizes are thus what a
serving process has, not a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from flashinfer_ext import triton_extend
from flashinfer_ext.contract import (
    ITEMS_PER_PROCESSOR,
    ArenaLayout,
    DecodeBatch,
    ExtendBatch,
    FrozenPrompts,
    LayerHeads,
    PageTable,
)
from flashinfer_ext.triton_decode import TritonDecode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}
"""Of A100, RTX 3090, L40S, H100 and H200, B200: the work list's size derives from it."""

LAYERS, HEADS = 28, 8


@dataclass(frozen=True)
class Case:
    """One launch. ``kernel``: fill, decode (with its merge), extend, or sglang-decode.

    ``layer`` is a number that Triton specialises on (1, or a multiple of 16).
    """

    kernel: str
    head_dim: int = 128
    group: int = 4
    dtype: str = "bf16"
    page: int = 16
    cap: bool = False
    frozen: bool = False
    lse: bool = False
    rows: int = 64
    layer: int = 2

    @property
    def name(self) -> str:
        """What the table shows, as ``decode D128 G4 bf16 page16 frozen``."""
        if self.kernel == "fill":
            return f"fill rows{self.rows * HEADS}" + " frozen" * self.frozen
        words = [self.kernel, f"D{self.head_dim}", f"G{self.group}", self.dtype, f"page{self.page}"]
        words += [word for word in ("cap", "frozen", "lse") if getattr(self, word)]
        words += [f"rows{self.rows}"] * (self.rows != 64) + [f"layer{self.layer}"] * (
            self.layer != 2
        )
        return " ".join(words)


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code: ``function`` is its name, ``shared`` bytes of one CTA."""

    function: str
    cubin: bytes
    shared: int
    warps: int


class _NamedTarget:
    """A Triton driver that knows the target and nothing else."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"aot-{self._target.arch}"  # the key of a kernel's cache: not a real device's

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def compile_only(arch: int) -> Iterator[list[Compiled]]:
    """Within it, launches compile for cuda:``arch`` and end; yields what they made, in order."""
    made: list[Compiled] = []
    run = JITFunction.run

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> object:
        binary = run(kernel, *args, grid=grid, warmup=True, **options)
        meta = binary.metadata
        made.append(Compiled(meta.name, binary.asm["cubin"], meta.shared, meta.num_warps))
        return binary

    # the capability comes from the tensors' device, and these have none
    capable = mock.patch.object(triton_extend, "capability_of", lambda device: arch)
    named = mock.patch.object(driver, "_active", _NamedTarget(arch))
    with mock.patch.object(JITFunction, "run", record), capable, named:
        yield made


def compile_case(case: Case, arch: int) -> list[Compiled]:
    """All kernels of one launch.

    Raises:
        RuntimeError: the compiler refuses it.
    """
    with compile_only(arch) as made:
        try:
            _LAUNCHES[case.kernel](case, arch)
        except OutOfResources as error:
            raise RuntimeError(str(error)) from error
    return made


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _heads() -> LayerHeads:
    return LayerHeads(*(_ints(LAYERS, HEADS) for _ in range(3)))


def _layout(case: Case) -> ArenaLayout:
    return ArenaLayout(1 << 20, case.page, case.head_dim, case.head_dim)


def _empty(case: Case, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[case.dtype], device="meta")


def _decoder(case: Case, arch: int) -> tuple[TritonDecode, DecodeBatch, FrozenPrompts | None]:
    target = ITEMS_PER_PROCESSOR * MULTIPROCESSORS[arch]
    decode = TritonDecode(_layout(case), _heads(), case.group, case.rows, "meta", target)
    batch = DecodeBatch(_ints(case.rows), _ints(case.rows))
    units, long = LAYERS * HEADS, torch.int64
    frozen = FrozenPrompts(
        _ints(256), _ints(256, units), _ints(256, units, dtype=long), _ints(1 << 16)
    )
    return decode, batch, frozen if case.frozen else None


def _launch_fill(case: Case, arch: int) -> None:
    decode, batch, frozen = _decoder(case, arch)
    decode.plan(batch, frozen)


def _launch_decode(case: Case, arch: int) -> None:
    decode, batch, frozen = _decoder(case, arch)
    q = _empty(case, case.rows, HEADS * case.group, case.head_dim)
    lse = torch.empty(q.shape[:2], device="meta") if case.lse else None
    arena = _empty(case, 1 << 20, decode.layout.page_elements)
    table = PageTable(_ints(LAYERS * HEADS, 8192), _ints(256, 131072))
    decode.run(
        q, arena, table, case.layer, batch, torch.empty_like(q), 0.125, 30.0 * case.cap, frozen, lse
    )


def _launch_extend(case: Case, arch: int) -> None:
    tokens, requests, units, long = 4096, 6, LAYERS * HEADS, torch.int64
    layout = _layout(case)
    batch = ExtendBatch(
        _ints(requests + 1), _ints(requests), _ints(units, requests, dtype=long),
        _ints(units, requests, dtype=long), _ints(units, requests), _ints(1 << 16),
        _ints(1 << 20), 1024,
    )  # fmt: skip
    q = _empty(case, tokens, HEADS * case.group, case.head_dim)
    k, v = (_empty(case, tokens, HEADS, case.head_dim) for _ in range(2))
    arena = _empty(case, 1 << 20, layout.page_elements)
    lse = torch.empty(q.shape[:2], device="meta") if case.lse else None
    triton_extend.extend(
        q, k, v, arena, layout, _heads(), case.layer, batch, torch.empty_like(q), 0.125,
        30.0 * case.cap, lse,
    )  # fmt: skip


def _launch_sglang(case: Case, arch: int) -> None:
    """SGLang's first decode stage as its Triton backend launches it: 8 splits, pages of 1."""
    from sglang.kernels.ops.attention import decode_attention as theirs

    q = _empty(case, case.rows, HEADS * case.group, case.head_dim)
    k, v = (_empty(case, 1 << 20, HEADS, case.head_dim) for _ in range(2))
    partial = torch.empty(*q.shape[:2], 8, case.head_dim, device="meta")
    launch = theirs._decode_att_m_fwd if case.group == 1 else theirs._decode_grouped_att_m_fwd
    launch(
        q, k, v, partial, torch.empty(partial.shape[:3], device="meta"), _ints(case.rows + 1),
        _ints(1 << 20, dtype=torch.int64), _ints(case.rows), 8, 0.125, 30.0 * case.cap,
    )  # fmt: skip


_LAUNCHES: dict[str, Callable[[Case, int], None]] = {
    "fill": _launch_fill,
    "decode": _launch_decode,
    "extend": _launch_extend,
    "sglang-decode": _launch_sglang,
}

"""The configurations that ship: what the gate compiles."""

from __future__ import annotations

from flashinfer_ext.aot_launch import Case

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 3, 4, 7, 8, 16)


def full_cases() -> list[Case]:
    """Every tile shape, each switch that changes code, and every GQA group at D 128; the work list
    up to 512 requests of 8 kv heads (beyond, it is right but spills)."""
    cases = [Case("fill", rows=rows, frozen=on) for rows in (1, 8, 64, 256, 512)
             for on in (False, True)]  # fmt: skip
    for dim in HEAD_DIMS:
        groups = GROUPS if dim == 128 else (1, 4, 16)
        for group in groups:
            cases.append(Case("decode", dim, group))
            if group in (1, 4, 8):
                cases.append(Case("sglang-decode", dim, group))
        cases += [Case("decode", dim, g, cap=True, frozen=True, lse=True) for g in (3, 16)]
        cases += [Case("decode", dim, 1, frozen=True)]
        cases += [Case("decode", dim, group) for group in (32, 64)]
        cases += [Case("decode", dim, 4, dtype) for dtype in ("fp16", "fp32")]
        cases += [Case("extend", dim, group) for group in groups]
        cases += [Case("extend", dim, 3, cap=True, lse=True)]
        cases += [Case("extend", dim, 4, dtype) for dtype in ("fp16", "fp32")]
    return cases + _variants()


def _variants() -> list[Case]:
    """Of one shape: pages, single switches, and numbers that Triton specialises on."""
    cases = [Case(kernel, page=page) for kernel in ("decode", "extend") for page in (8, 32)]
    cases += [Case("decode", frozen=True)]
    cases += [Case("decode", cap=True), Case("extend", cap=True)]
    cases += [Case("decode", 64, 64, "fp32")]
    cases += [Case("decode", layer=layer) for layer in (1, 16)]
    return [*cases, Case("decode", rows=1), Case("extend", layer=0)]


def quick_cases() -> list[Case]:
    """One case of each tile shape in 16 bit, with what costs registers: for the test suite."""
    cases = [Case("fill", frozen=True), Case("sglang-decode")]
    for dim in HEAD_DIMS:
        cases += [Case("decode", dim, 3, cap=True, frozen=True, lse=True)]
        cases += [Case("extend", dim, 3, cap=True, lse=True)]
    return cases

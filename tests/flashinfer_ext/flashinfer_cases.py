"""Planned runners on random cases, shared by the tests on stand-ins and on a GPU.

A slot that no row reads is NaN if FlashInfer must not touch it (its page is not listed, or it lies
behind the row's end), and garbage in the thousands if it is only masked.
"""

from __future__ import annotations

import torch

from flashinfer_ext import decode_reference, extend_reference
from flashinfer_ext.flashinfer_decode import FlashInferDecode
from flashinfer_ext.flashinfer_extend import FlashInferExtend
from tests.flashinfer_ext.cases import FULL, Case, ExtendCase

WINDOWS = (1, 7, 16, 17, 40, 64, FULL)
LENGTHS = (1, 15, 16, 17, 31, 33, 64, 65, 100, 130)
SCALE = 0.125
TIGHT, LOOSE = 1e-5, 2e-2
"""Tolerances: float32, and half precision with its partial results."""


def fill_masked(case: Case | ExtendCase, listed) -> None:
    """Replace NaN by garbage in the slots that a listed page has before its row's end."""
    size = (case.layout.num_pages, case.layout.page_size)
    touched = torch.zeros(size, dtype=torch.bool, device=case.arena.device)
    for indptr, pages, last in listed:
        for row in range(len(indptr) - 1):
            mine = pages[indptr[row] : indptr[row + 1]].long()
            if len(mine):
                touched[mine[:-1]] = True
                touched[mine[-1], : last[row]] = True
    masked = touched & case.layout.keys(case.arena).isnan().any(-1)
    for store in (case.layout.keys(case.arena), case.layout.values(case.arena)):
        store[masked] = 3e3 * torch.randn_like(store[masked])


def planned_decode(case: Case, module=None, page_capacity: int | None = None) -> FlashInferDecode:
    """A runner planned for the case, whose arena is ready to be read."""
    runner = FlashInferDecode(
        case.layout, case.heads, case.q.shape[1] // case.heads.shape[1], case.batch.rows + 1,
        case.arena.device, case.arena.dtype, page_capacity, module,
    )  # fmt: skip
    runner.plan(case.batch, case.table, case.frozen)
    rows = runner._rows
    listed = [
        (rows.indptr[layer], runner._plans[layer].pages, rows.last_page_len[layer])
        for layer in range(case.heads.shape[0])
    ]
    fill_masked(case, listed)
    return runner


def check_decode(case: Case, runner, logit_cap: float = 0.0, within: float = TIGHT) -> None:
    """Every layer's output and LSE equal the reference's."""
    for layer in range(case.heads.shape[0]):
        want, want_lse = decode_reference.decode(
            case.q, case.arena, case.layout, case.table, case.heads, layer, case.batch, SCALE,
            logit_cap, case.frozen,
        )  # fmt: skip
        out, lse = torch.full_like(want, 7.0), torch.full_like(want_lse, 7.0)
        runner.run(
            case.q, case.arena, case.table, layer, case.batch, out, SCALE, logit_cap, case.frozen,
            lse,
        )  # fmt: skip
        torch.testing.assert_close(out, want, atol=within, rtol=within)
        torch.testing.assert_close(lse, want_lse, atol=within, rtol=within)


def planned_extend(case: ExtendCase, module=None) -> FlashInferExtend:
    """A runner planned for the case, whose arena is ready to be read."""
    group = case.q.shape[1] // case.k.shape[1]
    runner = FlashInferExtend(
        case.layout, case.heads, group, case.arena.device, case.arena.dtype, module
    )
    runner.plan(case.batch)
    last = torch.full((len(runner._rows.begins),), case.layout.page_size)
    fill_masked(case, [(p.indptr, p.places, last) for p in runner._history if p is not None])
    return runner


def check_extend(case: ExtendCase, runner, logit_cap: float = 0.0, within: float = TIGHT) -> None:
    """Every layer's output and LSE equal the reference's."""
    for layer in range(case.heads.shape[0]):
        want, want_lse = extend_reference.extend(
            case.q, case.k, case.v, case.arena, case.layout, case.heads, layer, case.batch, SCALE,
            logit_cap,
        )  # fmt: skip
        out, lse = torch.full_like(want, 7.0), torch.full_like(want_lse, 7.0)
        runner.run(
            case.q, case.k, case.v, case.arena, layer, case.batch, out, SCALE, logit_cap, lse
        )
        torch.testing.assert_close(out, want, atol=within, rtol=within)
        torch.testing.assert_close(lse, want_lse, atol=within, rtol=within)

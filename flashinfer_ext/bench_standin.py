"""FlashInfer's modules as the dry run has them: in torch, for several kv heads at once.

``flashinfer_reference`` holds those for one kv head a row; here are dense batches, so that the
dense contenders' argument lists are walked through without a GPU.
"""

from __future__ import annotations

import torch

from flashinfer_ext.flashinfer_reference import DecodeModule, PrefillModule


def _row(cache: torch.Tensor, indptr, pages, last, row: int) -> torch.Tensor:
    """[n, H, D] of one request, from a cache [NP, P, H, D]."""
    mine = pages[int(indptr[row]) : int(indptr[row + 1])].long()
    return cache[mine].flatten(0, 1)[: (len(mine) - 1) * cache.shape[1] + int(last[row])]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, Hq, D] at the end of k, v [n, H, D]. Returns [T, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.float(), k) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~seen.tril(len(k) - len(q)), float("-inf"))
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), v)


class DenseDecode(DecodeModule):
    """Decode rows of one kv head as the base class, of more densely."""

    def run(self, floats, ints, plan_info_vec, q, keys, values, indptr, pages, last, o, lse,
            layout, window_left, pdl, hole_at, hole_end, sm_scale, logit_cap):  # fmt: skip
        """Writes ``o``; see the base class."""
        if keys.shape[2] == 1:
            super().run(floats, ints, plan_info_vec, q, keys, values, indptr, pages, last, o, lse,
                        layout, window_left, pdl, hole_at, hole_end, sm_scale,
                        logit_cap)  # fmt: skip
            return
        if plan_info_vec != [tuple(indptr.tolist()), *q.shape[:2], keys.shape[1]]:
            raise ValueError("run with other rows than planned")
        for row in range(len(q)):
            k, v = (_row(cache, indptr, pages, last, row) for cache in (keys, values))
            o[row] = _causal(q[row][None], k, v, sm_scale)[0].to(o.dtype)


class DensePrefill(PrefillModule):
    """Prefill of one kv head a row as the base class, of more densely and causally."""

    def paged_run(self, floats, ints, plan_info_vec, q, keys, values, q_indptr, indptr, pages,
                  last, o, lse, mode, *rest):  # fmt: skip
        """Writes ``o``; see the base class."""
        if keys.shape[2] == 1:
            super().paged_run(floats, ints, plan_info_vec, q, keys, values, q_indptr, indptr, pages,
                              last, o, lse, mode, *rest)  # fmt: skip
            return
        if plan_info_vec[:2] != [q_indptr.tolist(), indptr.tolist()] or mode != 1:
            raise ValueError("run with other rows or masks than planned")
        for row in range(len(q_indptr) - 1):
            mine = slice(int(q_indptr[row]), int(q_indptr[row + 1]))
            k, v = (_row(cache, indptr, pages, last, row) for cache in (keys, values))
            o[mine] = _causal(q[mine], k, v, rest[-3]).to(o.dtype)

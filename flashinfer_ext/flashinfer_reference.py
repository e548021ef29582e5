"""FlashInfer's two modules in plain torch, call for call: what the compiled variants compute.

The classes take the arguments of the compiled modules, in their order and under their names, so
that the row layout is proved against the contract's references without a GPU. As in the kernels,
every slot of a listed page before the row's end enters the arithmetic, masked ones with probability
0 (a NaN there reaches the output), and LSEs are in base 2.
"""

from __future__ import annotations

import math

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row. q [T, G, D], k [S, D], v [S, Dv], mask bool [T, S].

    Returns (out float32 [T, G, Dv], base-2 lse [T, G]); 0 and -inf where nothing is read.
    """
    scores = torch.einsum("tgd,sd->tgs", q.float(), k.float()) * sm_scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    out = weights @ v.float()
    return out.masked_fill((lse == float("-inf"))[..., None], 0), lse / math.log(2)


def _row_slots(cache, indptr, indices, last_page_len, row: int) -> torch.Tensor:
    """All slots of a row up to its end, [S, D], from a cache [NP, P, 1, D]."""
    first, end = int(indptr[row]), int(indptr[row + 1])
    slots = cache[indices[first:end].long()].flatten(0, 1).squeeze(1)
    return slots[: max(0, end - first - 1) * cache.shape[1] + int(last_page_len[row])]


class DecodeModule:
    """Stand-in for the compiled decode module."""

    def plan(
        self, float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer,
        indptr, batch_size, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, window_left,
        logits_soft_cap, head_dim_qk, head_dim_vo, empty_q_data, empty_kv_data,
    ):  # fmt: skip
        """What must come back to ``run``: here what was planned, checked there."""
        return [tuple(indptr.tolist()), batch_size, num_qo_heads, page_size]

    def run(
        self, float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache,
        paged_v_cache, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse,
        kv_layout_code, window_left, enable_pdl, hole_at, hole_end, sm_scale, logit_cap,
    ):  # fmt: skip
        """Writes ``o`` [N, G, D] and ``maybe_lse`` [N, G]."""
        planned = [tuple(paged_kv_indptr.tolist()), *q.shape[:2], paged_k_cache.shape[1]]
        if planned != plan_info_vec:
            raise ValueError("run with other rows than planned")
        paging = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        for row in range(len(q)):
            k = _row_slots(paged_k_cache, *paging, row)
            v = _row_slots(paged_v_cache, *paging, row)
            slot = torch.arange(len(k), device=q.device)
            mask = (slot < hole_at[row]) | (slot >= hole_end[row])
            out, lse = attend(q[row][None], k, v, mask[None], sm_scale, logit_cap)
            o[row] = out[0].to(o.dtype)
            if maybe_lse is not None:
                maybe_lse[row] = lse[0]


class PrefillModule:
    """Stand-in for the compiled prefill module."""

    def plan(
        self, float_workspace_buffer, int_workspace_buffer, page_locked_int_workspace_buffer,
        qo_indptr, kv_indptr, kv_len_arr, total_num_rows, batch_size, num_qo_heads, num_kv_heads,
        page_size, enable_cuda_graph, head_dim_qk, head_dim_vo, causal, window_left,
        fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len,
    ):  # fmt: skip
        """What must come back to a run: here what was planned, checked there."""
        return [qo_indptr.tolist(), kv_indptr.tolist(), bool(disable_split_kv)]

    def paged_run(
        self, float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache,
        paged_v_cache, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o,
        maybe_lse, mask_mode_code, layout, window_left, enable_pdl, begins, windows, sinks,
        position_starts, positions, sm_scale, logit_cap, part,
    ):  # fmt: skip
        """Writes ``o`` [N, G, Dv] and ``maybe_lse`` [N, G] for every query."""
        paging = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)

        def keys(row: int):
            return (
                _row_slots(paged_k_cache, *paging, row), _row_slots(paged_v_cache, *paging, row)
            )  # fmt: skip

        extras = (begins, windows, sinks, position_starts, positions, sm_scale, logit_cap, part)
        self._run(plan_info_vec, q, qo_indptr, paged_kv_indptr, o, maybe_lse, mask_mode_code,
                  keys, extras)  # fmt: skip

    def ragged_run(
        self, float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, k, v, qo_indptr,
        kv_indptr, o, maybe_lse, mask_mode_code, layout, window_left, enable_pdl, begins, windows,
        sinks, position_starts, positions, sm_scale, logit_cap, part,
    ):  # fmt: skip
        """As ``paged_run`` on contiguous keys [S, 1, D] and values [S, 1, Dv]."""

        def keys(row: int):
            rows = slice(int(kv_indptr[row]), int(kv_indptr[row + 1]))
            return k[rows, 0], v[rows, 0]

        extras = (begins, windows, sinks, position_starts, positions, sm_scale, logit_cap, part)
        self._run(plan_info_vec, q, qo_indptr, kv_indptr, o, maybe_lse, mask_mode_code,
                  keys, extras)  # fmt: skip

    def _run(self, planned, q, qo_indptr, kv_indptr, o, maybe_lse, mode, keys, extras) -> None:
        *rows, sm_scale, logit_cap, part = extras
        if planned[:2] != [qo_indptr.tolist(), kv_indptr.tolist()]:
            raise ValueError("run with other rows than planned")
        # Only whole rows may have a window of their own (see PREFILL_VARIANT); only the causal mode
        # leaves masks out, on tiles inside both the window and the diagonal.
        if (part == 1) != planned[2] or (part == 1) != (mode == 1):
            raise ValueError(f"part {part} planned or masked as another part")
        for row in range(len(qo_indptr) - 1):
            mine = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            k, v = keys(row)
            mask = _extend_mask(row, mine.stop - mine.start, len(k), rows, part, q.device)
            out, lse = attend(q[mine], k, v, mask, sm_scale, logit_cap)
            o[mine], maybe_lse[mine] = out.to(o.dtype), lse


def _extend_mask(row: int, queries: int, keys: int, rows, part: int, device) -> torch.Tensor:
    """bool [queries, keys]; ``LogitsMask`` of the prefill variant, and the causal mode's."""
    begins, windows, sinks, position_starts, positions = rows
    query = torch.arange(queries, device=device)[:, None]
    slot = torch.arange(keys, device=device)[None, :]
    window = int(windows[row])
    if part == 1:
        return (query - slot < window) & (slot <= query)
    if part == 2:
        return query - slot >= window
    begin, first = int(begins[row]), int(position_starts[row])
    position = positions[first : first + keys][None, :]
    near = (position > begin + query - window) | (position < int(sinks[row]))
    return (position >= 0) & (position < begin) & near

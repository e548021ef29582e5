"""Dense attention to compare with: equally many bytes, every kv head of a request the same length.

FlashInfer's dense kernels are its own templates in our compiled modules: the variant's masks are
told to hide nothing, and the plan is FlashInfer's, for all kv heads of a request at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashinfer_ext.bench_checks import Prepared, attention, worst_error
from flashinfer_ext.bench_data import DecodeData, ExtendData, Storage
from flashinfer_ext.flashinfer_workspace import Workspace

NHD, CAUSAL, NO_WINDOW, WHOLE_CHUNK = 0, 1, -1, 1
FLOAT_BYTES, PLAN_BYTES = 256 << 20, 16 << 20
SMALL_BYTES = 1 << 16  # where there is no GPU to plan for


@dataclass(frozen=True)
class DensePages:
    """Requests of ``lengths`` tokens in pages of all H kv heads, dealt at random.

    Fields: ``cache`` [NP, 2, P, H, D]; ``lengths`` int64 [R] and ``indptr`` int32 [R + 1] on the
    CPU; ``pages`` int32 [N], ``last`` int32 [R] slots of the last page, on the device.
    """

    cache: torch.Tensor
    lengths: torch.Tensor
    indptr: torch.Tensor
    pages: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, storage: Storage, lengths: torch.Tensor, page: int, heads: int,
           head_dim: int) -> DensePages:  # fmt: skip
        """A view of the storage."""
        deep = -(-lengths // page)
        total = int(deep.sum())
        indptr = torch.cat([deep.new_zeros(1), deep.cumsum(0)]).int()
        device = storage.device
        return cls(
            storage.view(total, 2, page, heads, head_dim), lengths, indptr,
            torch.randperm(total, device=device).int(),
            ((lengths - 1) % page + 1).int().to(device),
        )  # fmt: skip

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as FlashInfer takes them, [NP, P, H, D]."""
        return self.cache[:, 0], self.cache[:, 1]

    def row(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(K [n, H, D], V [n, H, D]) of one request."""
        mine = self.pages[int(self.indptr[request]) : int(self.indptr[request + 1])].long()
        length = int(self.lengths[request])
        k, v = (self.cache[mine, part].flatten(0, 1)[:length] for part in (0, 1))
        return k, v


def dense_lengths(data: DecodeData) -> torch.Tensor:
    """int64 [R]: what every kv head would hold if all had equally much (rounded up)."""
    return -(-data.reads.sum(1) // data.reads.shape[1])


def _dense(data: DecodeData) -> DensePages:
    count = len(data.case.head_windows)
    return DensePages.of(
        data.storage, dense_lengths(data), data.layout.page_size, count, data.layout.head_dim
    )


def _bytes(data: DecodeData, dense: DensePages, id_bytes: int) -> int:
    count, dim = len(data.case.head_windows), data.layout.head_dim
    tokens = int(dense.lengths.sum()) * count
    return tokens * 2 * dim * data.itemsize + id_bytes + data.query_bytes()


def _check_rows(data: DecodeData, dense: DensePages, rows: list[int]) -> float:
    group, errors = data.case.group, []
    for r in rows:
        k, v = dense.row(r)
        want = attention(data.q[r].unflatten(0, (-1, group)), k, v, data.scale)
        errors.append(worst_error(data.out[r], want.flatten(0, 1)))
    return max(errors)


def _workspace(device: torch.device) -> Workspace:
    if device.type != "cuda":
        return Workspace(SMALL_BYTES, SMALL_BYTES, device)
    return Workspace(FLOAT_BYTES, PLAN_BYTES, device)


def flashinfer_decode(data: DecodeData, module) -> Prepared:
    """FlashInfer's dense paged decode, CUDA-core template."""
    dense, device = _dense(data), data.q.device
    work = _workspace(device)
    ints, pinned = work.pair(0)
    heads, dim, page = len(data.case.head_windows), data.layout.head_dim, data.layout.page_size
    empty, rows = torch.empty(0, dtype=data.q.dtype), len(dense.lengths)

    def plan():
        return module.plan(
            work.floats, ints, pinned, dense.indptr, rows, heads * data.case.group, heads, page,
            False, NO_WINDOW, 0.0, dim, dim, empty, empty,
        )  # fmt: skip

    planned, indptr = plan(), dense.indptr.to(device)
    hole = torch.zeros(rows, dtype=torch.int32, device=device)
    keys, values = dense.caches()

    def run() -> None:
        module.run(
            work.floats, ints, planned, data.q, keys, values, indptr, dense.pages, dense.last,
            data.out, None, NHD, NO_WINDOW, False, hole, hole, data.scale, 0.0,
        )  # fmt: skip

    return Prepared(run, lambda rows: _check_rows(data, dense, rows),
                    _bytes(data, dense, 4 * len(dense.pages)), plan=plan)  # fmt: skip


@dataclass(frozen=True)
class _Queries:
    """A paged run of the prefill template: T queries of each request at its keys' end."""

    q: torch.Tensor
    out: torch.Tensor
    each: int
    group: int
    scale: float


def _paged(module, dense: DensePages, queries: _Queries) -> tuple:
    """(plan, run) of FlashInfer's prefill template over dense pages, causal."""
    device, rows = queries.q.device, len(dense.lengths)
    page, heads, dim = dense.cache.shape[2:]
    work = _workspace(device)
    ints, pinned = work.pair(0)
    q_indptr = (torch.arange(rows + 1) * queries.each).int()
    lse = torch.empty(queries.q.shape[:2], device=device)

    def plan():
        return module.plan(
            work.floats, ints, pinned, q_indptr, dense.indptr, dense.lengths.int(),
            len(queries.q), rows, heads * queries.group, heads, page, False, dim, dim, True,
            NO_WINDOW, -1, False, 0, 0,
        )  # fmt: skip

    planned, on_device = plan(), (q_indptr.to(device), dense.indptr.to(device))
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    unlimited = torch.full_like(zeros, 2**31 - 1)
    keys, values = dense.caches()

    def run() -> None:
        module.paged_run(
            work.floats, ints, planned, queries.q, keys, values, *on_device, dense.pages,
            dense.last, queries.out, lse, CAUSAL, NHD, NO_WINDOW, False, zeros, unlimited, zeros,
            zeros.long(), zeros, queries.scale, 0.0, WHOLE_CHUNK,
        )  # fmt: skip

    return plan, run


def flashinfer_tensor_cores(data: DecodeData, module) -> Prepared:
    """FlashInfer's dense paged decode on tensor cores: its prefill template with one query."""
    dense = _dense(data)
    plan, run = _paged(module, dense, _Queries(data.q, data.out, 1, data.case.group, data.scale))
    return Prepared(run, lambda rows: _check_rows(data, dense, rows),
                    _bytes(data, dense, 4 * len(dense.pages)), plan=plan)  # fmt: skip


def sdpa_decode(data: DecodeData) -> Prepared:
    """Torch's attention over contiguous keys, one (mean) length for all requests."""
    rows, count, dim = data.case.requests, len(data.case.head_windows), data.layout.head_dim
    lengths = dense_lengths(data)
    length = max(1, int(lengths.sum()) // rows)
    k, v = data.storage.view(2, rows, count, length, dim)
    q, gqa = data.q.unsqueeze(2), data.case.group > 1
    # not the kernel that repeats all keys for every query head first
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
               SDPBackend.EFFICIENT_ATTENTION]  # fmt: skip
    if q.device.type != "cuda":
        kernels.append(SDPBackend.MATH)

    def run() -> None:
        with sdpa_kernel(kernels):
            data.out.copy_(
                scaled_dot_product_attention(q, k, v, scale=data.scale, enable_gqa=gqa).squeeze(2)
            )

    def check(chosen: list[int]) -> float:
        errors = []
        for r in chosen:
            grouped = data.q[r].unflatten(0, (count, -1))
            want = attention(grouped, k[r].transpose(0, 1), v[r].transpose(0, 1), data.scale)
            errors.append(worst_error(data.out[r], want.flatten(0, 1)))
        return max(errors)

    moved = 2 * rows * count * length * dim * data.itemsize + data.query_bytes()
    return Prepared(run, check, moved)


def _extend_check(data: ExtendData, k: torch.Tensor, v: torch.Tensor, request: int) -> float:
    """Causal attention of one request; k, v [history + chunk, H, D]."""
    history, chunk = data.case.lengths
    rows = slice(request * chunk, (request + 1) * chunk)
    count, errors = k.shape[1], []
    seen = torch.ones(chunk, history + chunk, dtype=torch.bool, device=k.device).tril(history)
    for h in range(count):
        mine = slice(h * data.case.group, (h + 1) * data.case.group)
        scores = data.q[rows, mine].float().transpose(0, 1) @ k[:, h].float().T * data.scale
        want = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, h].float()
        errors.append(worst_error(data.out[rows, mine], want.transpose(0, 1)))
    return max(errors)


def flashinfer_extend(data: ExtendData, module) -> Prepared:
    """FlashInfer's dense paged prefill (FA2): nothing hidden but by the diagonal."""
    history, chunk = data.case.lengths
    case = data.case
    lengths = torch.full((case.requests,), history + chunk)
    dense = DensePages.of(data.storage, lengths, data.layout.page_size,
                          len(case.head_windows), case.head_dim)  # fmt: skip
    plan, run = _paged(module, dense, _Queries(data.q, data.out, chunk, case.group, data.scale))
    return Prepared(
        run, lambda rows: max(_extend_check(data, *dense.row(r), r) for r in rows), plan=plan,
        flops=data.flops((2**31 - 1,) * len(case.head_windows)),
    )  # fmt: skip


def sdpa_extend(data: ExtendData) -> Prepared:
    """Torch's flash attention over contiguous keys, repeated for each query head: dense, causal."""
    from torch.nn.attention.bias import causal_lower_right

    case, (history, chunk) = data.case, data.case.lengths
    count, total = len(case.head_windows), history + chunk
    k, v = data.storage.view(2, case.requests, count, total, case.head_dim)
    q = data.q.view(case.requests, chunk, -1, case.head_dim).transpose(1, 2)
    each_k, each_v = (x.repeat_interleave(case.group, 1) for x in (k, v))
    out = data.out.view(q.shape[0], chunk, -1, case.head_dim).transpose(1, 2)
    bias = causal_lower_right(chunk, total)

    def run() -> None:
        out.copy_(scaled_dot_product_attention(q, each_k, each_v, attn_mask=bias, scale=data.scale))

    def check(rows: list[int]) -> float:
        return max(_extend_check(data, k[r].transpose(0, 1), v[r].transpose(0, 1), r) for r in rows)

    return Prepared(run, check, flops=data.flops((2**31 - 1,) * count))

"""SGLang's Triton decode kernel on a dense batch, as its backend launches it.

It is imported from an installed SGLang, else from copies of its sources that ``gpu_bundle`` laid
down; neither is needed for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from flashinfer_ext.bench_checks import Prepared, Unavailable, attention, worst_error
from flashinfer_ext.bench_data import DecodeData
from flashinfer_ext.bench_dense import dense_lengths

PACKAGE = "sglang.kernels.ops.attention"
MOST_SPLITS = 8  # its default


def kernels() -> tuple[ModuleType, ModuleType]:
    """(decode kernels, metadata kernels) of SGLang.

    Raises:
        Unavailable: SGLang is not here, or does not load.
    """
    if find_spec("sglang") is None:
        raise Unavailable("sglang is not installed")
    try:
        return import_module(f"{PACKAGE}.decode_attention"), import_module(f"{PACKAGE}.metadata")
    except Exception as error:  # its import looks at the machine, and raises what it likes
        raise Unavailable(f"sglang's decode kernel does not load: {error}") from error


@dataclass(frozen=True)
class _Tokens:
    """Keys and values [N, H, D] of single tokens; ``indices`` int64, dealt in runs of a page."""

    keys: torch.Tensor
    values: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor


def _tokens(data: DecodeData, lengths: torch.Tensor) -> _Tokens:
    page, device = data.layout.page_size, data.q.device
    deep = -(-lengths // page)
    order = torch.randperm(int(deep.sum()), device=device)
    slots = (order[:, None] * page + torch.arange(page, device=device)).flatten()
    first = (deep.cumsum(0) - deep) * page
    own = torch.arange(len(slots)) - torch.repeat_interleave(first, deep * page)
    held = own < torch.repeat_interleave(lengths, deep * page)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    shape = (2, len(slots), len(data.case.head_windows), data.layout.head_dim)
    keys, values = data.storage.view(*shape)
    return _Tokens(keys, values, indptr, slots[held.to(device)])


def sglang_decode(data: DecodeData) -> Prepared:
    """Its two stages over lengths of equal bytes; the split count comes from its own kernel.

    Raises:
        Unavailable: see ``kernels``.
    """
    decode, metadata = kernels()
    lengths, device = dense_lengths(data), data.q.device
    tokens = _tokens(data, lengths)
    rows, q_heads, dim = data.q.shape
    heads = len(data.case.head_windows)
    splits = torch.ones(rows, dtype=torch.int32, device=device)
    lens, indptr = lengths.int().to(device), tokens.indptr.to(device)
    cores = 1
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count

    def plan() -> None:
        metadata.get_num_kv_splits_triton[(1,)](
            splits, lens, rows, 1, q_heads, heads, MOST_SPLITS, cores,
            MAX_NUM_SEQ=max(4, 1 << (rows - 1).bit_length()),
        )  # fmt: skip

    plan()
    partial = torch.empty(rows, q_heads, MOST_SPLITS, dim, device=device)
    lse = torch.empty(rows, q_heads, MOST_SPLITS, device=device)

    def run() -> None:
        decode.decode_attention_fwd(
            data.q, tokens.keys, tokens.values, data.out, indptr, tokens.indices, partial, lse,
            splits, MOST_SPLITS, data.scale, 1.0, 1.0,
        )  # fmt: skip

    def check(chosen: list[int]) -> float:
        errors = []
        for r in chosen:
            mine = tokens.indices[int(tokens.indptr[r]) : int(tokens.indptr[r + 1])]
            grouped = data.q[r].unflatten(0, (heads, -1))
            want = attention(grouped, tokens.keys[mine], tokens.values[mine], data.scale)
            errors.append(worst_error(data.out[r], want.flatten(0, 1)))
        return max(errors)

    count = int(lengths.sum())
    moved = count * heads * 2 * dim * data.itemsize + 8 * count + data.query_bytes()
    moved += 2 * int(splits.sum()) * q_heads * (dim + 1) * 4
    return Prepared(run, check, moved, plan=plan)

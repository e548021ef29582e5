"""The decode work list: long rows cut into even items, on the device, with a fixed grid.

A row is one (request, kv head) of one layer. With rows of very different lengths, as windows make
them, one program per row would wait for the longest. So a layer's tokens are cut into chunks of
one size, chosen so that there are at most ``rows + target`` chunks: as many programs are launched,
whatever the lengths, and the surplus returns at once. Long items come first: what starts last
decides when the launch ends. That needs no look at the lengths from the host, so a captured CUDA
graph stays right when they change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashinfer_ext.contract import CHUNK_STEP, DecodeBatch, FrozenPrompts, LayerHeads
from flashinfer_ext.triton_tiles import UNLIMITED


@dataclass(frozen=True)
class WorkList:
    """What each program of a decode launch does; one row of every array per layer.

    Fields, int32: ``item_rows`` [L, N] row r * H + h of the batch, -1 for none; ``item_parts``
    [L, N] which chunk of the row; ``row_firsts`` [L, rows] place of a row's first partial result,
    the others follow; ``row_parts`` [L, rows] its number of items, at least 1; ``chunks`` [L]
    tokens of an item; ``row_lengths`` [L, rows] tokens that the row reads.
    """

    item_rows: torch.Tensor
    item_parts: torch.Tensor
    row_firsts: torch.Tensor
    row_parts: torch.Tensor
    row_lengths: torch.Tensor
    chunks: torch.Tensor
    target: int

    @classmethod
    def allocate(cls, layers: int, rows: int, target: int, device: str | torch.device) -> WorkList:
        """Buffers for ``rows`` rows a layer and ``target`` extra items (a few times the
        GPU's multiprocessors). Raises ValueError: no extra item."""
        if target < 1:
            raise ValueError(f"{target} items beyond one per row: at least 1 is needed")

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        items = rows + target
        return cls(
            ints(layers, items), ints(layers, items), ints(layers, rows), ints(layers, rows),
            ints(layers, rows), ints(layers), target,
        )  # fmt: skip

    def items(self, rows: int) -> int:
        """Programs of a decode launch over ``rows`` rows."""
        return rows + self.target

    def fill(
        self, batch: DecodeBatch, heads: LayerHeads, frozen: FrozenPrompts | None = None
    ) -> None:
        """Write the list of every layer for this batch, in stream order, without a sync.

        Preconditions: ``batch.rows`` times the layers' kv heads is at most the buffers' rows.

        Side effect: overwrites all arrays.
        """
        layers, count = heads.shape
        rows = batch.rows * count
        if rows > self.row_parts.shape[1]:
            raise ValueError(f"{rows} rows, the buffers hold {self.row_parts.shape[1]}")
        none = self.chunks
        _fill_kernel[(layers,)](
            batch.requests, batch.lengths, heads.units, heads.windows, heads.sinks,
            frozen.prompts if frozen else none, frozen.counts if frozen else none,
            frozen.counts.shape[1] if frozen else 0,
            self.item_rows, self.item_parts, self.row_firsts, self.row_parts, self.row_lengths,
            self.chunks, rows, self.items(rows), self.item_rows.shape[1],
            self.row_parts.shape[1], self.target,
            HEADS=count, FROZEN=frozen is not None, STEP=CHUNK_STEP,
            BLOCK=triton.next_power_of_2(rows), ITEM_BLOCK=256,
            num_warps=min(32, max(4, triton.next_power_of_2(rows) // 256)),
        )  # fmt: skip


@triton.jit
def span_of(length, window, sinks, prompt, kept):
    """(frozen, gap_at, gap, rest) of ``contract.read_range``, elementwise."""
    is_frozen = prompt > 0
    first = tl.maximum(length - window, 0)
    gap_at = tl.where(is_frozen, 0, tl.minimum(sinks, first))
    gap = tl.where(is_frozen, prompt, first - gap_at)
    rest = tl.maximum(length - tl.where(is_frozen, prompt, first), 0)
    return tl.where(is_frozen, kept, 0), gap_at, gap, rest


# Sizes that change between steps: else Triton would compile a kernel for each kind of number.
@triton.jit(do_not_specialize=["num_units", "rows", "items", "item_stride", "row_stride", "target"])
def _fill_kernel(
    requests, lengths, units, windows, sinks, prompts, counts, num_units,
    item_rows, item_parts, row_firsts, row_parts, row_lengths, chunks,
    rows, items, item_stride, row_stride, target,
    HEADS: tl.constexpr, FROZEN: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, ITEM_BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    valid = row < rows
    request_row, head = row // HEADS, layer * HEADS + row % HEADS
    length = tl.load(lengths + request_row, mask=valid, other=0)
    window = tl.load(windows + head, mask=valid, other=1)
    sink = tl.load(sinks + head, mask=valid, other=0)
    prompt = tl.zeros([BLOCK], tl.int32)
    kept = tl.zeros([BLOCK], tl.int32)
    if FROZEN:
        full = valid & (window == UNLIMITED) & (length > 0)
        request = tl.load(requests + request_row, mask=full, other=0)
        unit = tl.load(units + head, mask=full, other=0)
        prompt = tl.load(prompts + request, mask=full, other=0)
        kept = tl.load(counts + request.to(tl.int64) * num_units + unit, mask=full, other=0)
    frozen, gap_at, _, rest = span_of(length, window, sink, prompt, kept)
    reads = tl.where(valid & (length > 0), frozen + gap_at + rest, 0)

    total = tl.sum(reads.to(tl.int64), 0)
    chunk = ((total + target * STEP - 1) // (target * STEP) * STEP).to(tl.int32)
    chunk = tl.maximum(chunk, STEP)
    parts = tl.where(valid, tl.maximum((reads + chunk - 1) // chunk, 1), 0)
    firsts = tl.cumsum(parts, 0) - parts
    last = reads - (parts - 1) * chunk
    long = tl.where(2 * last >= chunk, parts, parts - 1)
    long = tl.where(valid, long, 0)
    long_places = tl.cumsum(long, 0) - long
    short_places = tl.sum(long, 0) + tl.cumsum(parts - long, 0) - (parts - long)
    tl.store(chunks + layer, chunk)
    tl.store(row_firsts + layer * row_stride + row, firsts, mask=valid)
    tl.store(row_parts + layer * row_stride + row, parts, mask=valid)
    tl.store(row_lengths + layer * row_stride + row, reads, mask=valid)

    used = tl.sum(parts, 0)
    for start in range(0, items, ITEM_BLOCK):  # items nobody fills below do nothing
        item = start + tl.arange(0, ITEM_BLOCK)
        tl.store(item_rows + layer * item_stride + item, -1, mask=(item >= used) & (item < items))
    most = tl.max(parts, 0)
    for part in range(0, most):
        mine = part < parts
        place = layer * item_stride + tl.where(part < long, long_places + part, short_places)
        tl.store(item_rows + place, row, mask=mine)
        tl.store(item_parts + place, part, mask=mine)

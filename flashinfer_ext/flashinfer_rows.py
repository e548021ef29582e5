"""The contract as FlashInfer's arguments: each (request, kv head) is a row with one kv head.

A decode row lists its lead pages (sinks, or a frozen prompt's compact pages), then the pages of its
tail (window, or appended tokens). Its slots are numbered through all listed pages; whatever is not
read lies in one hole ``[hole_at, hole_end)`` where the lead ends and the tail begins, mid-page or
not, or behind the row's end. Lengths are worked out on the host, where FlashInfer plans anyway;
page ids are gathered on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flashinfer_ext.contract import (
    DecodeBatch,
    ExtendBatch,
    FrozenPrompts,
    LayerHeads,
    PageTable,
)

UNLIMITED = 2**31 - 1
"""A window without bounds."""


def on_host(bundle):
    """A copy of a contract record with its tensors on the CPU. Synchronises if they were not."""
    values = {field.name: getattr(bundle, field.name) for field in fields(bundle)}
    moved = {name: x.cpu() if torch.is_tensor(x) else x for name, x in values.items()}
    return type(bundle)(**moved)


@dataclass(frozen=True)
class DecodeRows:
    """Every layer's decode rows, N = R * H of them in order r * H + h. All int32, one device.

    Fields: ``indptr`` [L, N + 1] into the layer's page list; ``last_page_len`` [L, N] slots of the
    last page; ``hole_at``, ``hole_end`` [L, N] masked slots; ``lead_pages`` [L, N]; ``tail_page``
    [L, N] logical page of the first tail page; ``compact`` [L, N] 1 where the lead is compact.

    A padded row lists one slot of the write sink, masked: FlashInfer's planner counts a row without
    pages as none while it cuts, and as one when it fills its tables.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor
    hole_at: torch.Tensor
    hole_end: torch.Tensor
    lead_pages: torch.Tensor
    tail_page: torch.Tensor
    compact: torch.Tensor

    def pages(self, layer: int) -> int:
        """Length of a layer's page list. Call it on host rows."""
        return int(self.indptr[layer, -1])

    def pack(self) -> torch.Tensor:
        """All fields as one int32 [7, L, N + 1], to be copied at once; see ``unpack``."""
        packed = self.indptr.new_zeros(len(fields(self)), *self.indptr.shape)
        for index, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            packed[index, :, : value.shape[1]] = value
        return packed

    @classmethod
    def unpack(cls, packed: torch.Tensor, rows: int) -> DecodeRows:
        """Views into a packed copy with at least ``rows`` + 1 columns."""
        names = [field.name for field in fields(cls)]
        widths = {name: rows + (name == "indptr") for name in names}
        return cls(**{name: packed[i, :, : widths[name]] for i, name in enumerate(names)})


def decode_rows(
    page_size: int, heads: LayerHeads, batch: DecodeBatch, frozen: FrozenPrompts | None = None
) -> DecodeRows:
    """Rows of a batch, from host tensors, vectorised.

    Preconditions: a frozen request has a token after its prompt (decode has stored the new one).
    """
    lengths = batch.lengths.long()[None, :, None]
    windows, sinks = heads.windows.long()[:, None, :], heads.sinks.long()[:, None, :]
    first = (lengths - windows).clamp(min=0)
    lead, start = torch.minimum(sinks, first), first
    compact = torch.zeros_like(first, dtype=torch.bool)
    if frozen is not None:
        requests = torch.where(batch.lengths > 0, batch.requests, 0).long()
        prompts = frozen.prompts.long()[requests][None, :, None]
        kept = frozen.counts.long()[requests][:, heads.units.long()].transpose(0, 1)
        compact = (prompts > 0) & (windows == UNLIMITED) & (lengths > 0)
        lead, start = torch.where(compact, kept, lead), torch.where(compact, prompts, start)
    lead_pages = (lead + page_size - 1) // page_size
    # Sinks that end in the window's first page share it with the window; compact pages never do.
    joined = ~compact & (start // page_size < lead_pages)
    tail_page = torch.where(joined, lead_pages, start // page_size)
    hole_end = torch.where(joined, start, (lead_pages - tail_page) * page_size + start)
    last = lengths - 1
    counts = lead_pages + (last // page_size - tail_page + 1).clamp(min=0)
    padded = (lengths == 0).expand_as(counts)
    counts = torch.where(padded, 1, counts).flatten(1)
    indptr = torch.cat([counts.new_zeros(len(counts), 1), counts.cumsum(1)], 1)
    last_page_len = torch.where(padded, 1, last % page_size + 1)
    values = (
        last_page_len, torch.where(padded, 0, lead), torch.where(padded, 1, hole_end),
        lead_pages, tail_page, compact,
    )  # fmt: skip
    return DecodeRows(indptr.int(), *(value.flatten(1).int() for value in values))


def decode_pages(
    rows: DecodeRows,
    layer: int,
    total: int,
    page_size: int,
    table: PageTable,
    heads: LayerHeads,
    batch: DecodeBatch,
    frozen: FrozenPrompts | None = None,
) -> torch.Tensor:
    """The page list of one layer, int32 [total]. No sync: everything lies on one device.

    Args:
        rows: on that device; ``frozen`` as given to ``decode_rows``.
        total: ``pages(layer)`` of the host's rows.
    """
    indptr = rows.indptr[layer].long()
    device, count = indptr.device, heads.shape[1]
    numbers = torch.arange(len(indptr) - 1, device=device)
    row = torch.repeat_interleave(numbers, indptr.diff(), output_size=total)
    index = torch.arange(total, device=device) - indptr[row]
    lengths = batch.lengths.long()[row // count]
    real = lengths > 0
    request = torch.where(real, batch.requests.long()[row // count], 0)
    unit = heads.units[layer].long()[row % count]
    beyond = index - rows.lead_pages[layer].long()[row]
    in_lead, compact = beyond < 0, rows.compact[layer].bool()[row]
    logical = torch.where(in_lead, index, rows.tail_page[layer].long()[row] + beyond)
    # The last position of a page that exists: of a frozen prompt's last page only what follows the
    # prompt is sure to be mapped. A compact page has no position, any valid one will do.
    position = torch.minimum(logical * page_size + page_size - 1, lengths - 1)
    position = torch.where(in_lead & compact, lengths - 1, position).clamp(min=0)
    slot = torch.where(real, table.slots[request, position].long(), 0)
    pages = table.pages[unit, slot // page_size]
    if frozen is not None:
        place = torch.where(in_lead & compact, frozen.starts[request, unit] + index, 0)
        pages = torch.where(in_lead & compact, frozen.pages[place], pages)
    return torch.where(real, pages, 0).int()


@dataclass(frozen=True)
class ExtendRows:
    """Every layer's extend rows, N = H * R of them in order h * R + r, for T fresh tokens.

    Queries, fresh keys and values are head-major: token t of head h is row ``h * T + t``.
    Fields: ``q_indptr`` int32 [N + 1] (also of the fresh keys); ``indptr`` int32 [L, N + 1] into
    the layer's history pages; ``begins`` int32 [N]; ``windows``, ``sinks`` int32 [L, N];
    ``page_starts``, ``position_starts`` int64 [L, N] as in ``ExtendBatch``; ``sink_indptr`` int32
    [L, N + 1] into the fresh sinks: of each row its first tokens of the chunk that are sinks, if
    some query of the chunk is too far from them to read them through its window.
    """

    q_indptr: torch.Tensor
    indptr: torch.Tensor
    begins: torch.Tensor
    windows: torch.Tensor
    sinks: torch.Tensor
    page_starts: torch.Tensor
    position_starts: torch.Tensor
    sink_indptr: torch.Tensor


def extend_rows(page_size: int, heads: LayerHeads, batch: ExtendBatch) -> ExtendRows:
    """Rows of a batch, from host tensors, vectorised."""
    layers, count = heads.shape
    offsets, begins = batch.offsets.long(), batch.begins.long()
    lengths, total = offsets.diff(), int(offsets[-1])
    starts = torch.arange(count)[:, None] * total + offsets[None, :-1]
    q_indptr = torch.cat([starts.flatten(), torch.tensor([count * total])])
    units = heads.units.long()
    pages = batch.counts.long()[units] // page_size
    shape = (layers, count, batch.requests)
    windows = heads.windows.long()[:, :, None].expand(shape)
    sinks = heads.sinks.long()[:, :, None].expand(shape)
    fresh = torch.minimum((sinks - begins).clamp(min=0), lengths.expand(shape))
    fresh = torch.where(windows < lengths, fresh, 0)
    return ExtendRows(
        q_indptr.int(), _indptr(pages), begins.repeat(count).int(),
        windows.flatten(1).int(), sinks.flatten(1).int(),
        batch.page_starts[units].flatten(1), batch.position_starts[units].flatten(1),
        _indptr(fresh),
    )  # fmt: skip


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    """int32 [L, N + 1] of counts [L, H, R]."""
    sums = counts.flatten(1).cumsum(1)
    return torch.cat([sums.new_zeros(len(sums), 1), sums], 1).int()


def flat_places(starts: torch.Tensor, indptr: torch.Tensor, total: int) -> torch.Tensor:
    """Places of all rows' elements in a flat list, int64 [total]: row i's are ``starts[i]``
    onwards, ``indptr[i + 1] - indptr[i]`` of them. No sync."""
    indptr = indptr.long()
    rows = torch.arange(len(starts), device=starts.device)
    row = torch.repeat_interleave(rows, indptr.diff(), output_size=total)
    return starts.long()[row] + torch.arange(total, device=starts.device) - indptr[row]

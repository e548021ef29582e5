"""Batches to measure on: scattered pages, lengths at random, everything built on the device.

One block of memory holds the keys and values of all contenders of a case in turn, each with a view
of its own: so they read equally many bytes, and a case takes no more memory than one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_ext.bench_cases import BenchCase
from flashinfer_ext.contract import ArenaLayout, DecodeBatch, ExtendBatch, LayerHeads, PageTable

BLOCK = 1 << 26
MEMORY_SHARE = 0.6
"""Of a GPU's free memory, what keys and values may take."""


class Storage:
    """Random numbers of one dtype, as many as the largest case so far has needed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, elements: int) -> None:
        """Make room; call it before any ``view`` of a case."""
        if elements <= len(self._flat):
            return
        self._flat = self._flat[:0].clone()  # frees the old block before the new one is made
        self._flat = torch.empty(elements, dtype=self.dtype, device=self.device)
        for start in range(0, elements, BLOCK):
            self._flat[start : start + BLOCK].normal_()

    def view(self, *shape: int) -> torch.Tensor:
        """The first elements, in that shape."""
        count = 1
        for size in shape:
            count *= size
        return self._flat[:count].view(shape)

    def limit(self) -> int:
        """Elements that fit, beside what else is in memory."""
        if self.device.type != "cuda":
            return 1 << 24
        free, _ = torch.cuda.mem_get_info(self.device)
        held = self._flat.numel() * self.dtype.itemsize
        return int(MEMORY_SHARE * (free + held)) // self.dtype.itemsize


def draw_lengths(case: BenchCase, most_tokens: int, seed: int = 0) -> torch.Tensor:
    """int64 [R] on the CPU, the case's lengths; shorter ones if the sum were above
    ``most_tokens``."""
    gen = torch.Generator().manual_seed(seed)
    least, most = case.lengths
    lengths = torch.randint(least, most + 1, (case.requests,), generator=gen)
    if int(lengths.sum()) > most_tokens:
        lengths = (lengths * (most_tokens / int(lengths.sum()))).long().clamp(min=1)
    return lengths


def read_tokens(lengths: torch.Tensor, case: BenchCase) -> torch.Tensor:
    """int64 [R, H]: tokens that each (request, kv head) reads in decode."""
    windows = torch.tensor(case.head_windows)[None]
    first = (lengths[:, None] - windows).clamp(min=0)
    return lengths[:, None] - first + first.clamp(max=case.sinks)


def _units(case: BenchCase, device: torch.device, layers: int) -> LayerHeads:
    count = len(case.head_windows)
    grid = torch.arange(layers * count, dtype=torch.int32).view(layers, count)
    windows = torch.tensor(case.head_windows, dtype=torch.int32).expand(layers, -1).contiguous()
    return LayerHeads(*(x.to(device) for x in (grid, windows, torch.full_like(grid, case.sinks))))


@dataclass(frozen=True)
class DecodeData:
    """A decode batch in the package's layout. ``reads`` int64 [R, H] on the CPU."""

    case: BenchCase
    layout: ArenaLayout
    heads: LayerHeads
    table: PageTable
    batch: DecodeBatch
    lengths: torch.Tensor
    reads: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    storage: Storage

    @property
    def arena(self) -> torch.Tensor:
        """[NP, P * 2D]."""
        return self.storage.view(self.layout.num_pages, self.layout.page_elements)

    @property
    def scale(self) -> float:
        """Applied to q.k."""
        return self.layout.head_dim**-0.5

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.q.element_size()

    def kv_bytes(self) -> int:
        """Keys and values that the batch reads."""
        return int(self.reads.sum()) * 2 * self.layout.head_dim * self.itemsize

    def query_bytes(self) -> int:
        """Queries read and outputs written."""
        return 2 * self.q.numel() * self.itemsize

    def page_bytes(self, page: int) -> int:
        """Page ids of 4 bytes, one for each page of ``page`` tokens that a row reads."""
        return 4 * int((-(-self.reads // page)).sum())


def decode_data(case: BenchCase, storage: Storage, page: int = 16, layers: int = 1,
                map_all: bool = False) -> DecodeData:  # fmt: skip
    """Build a batch of ``layers`` equal layers, in pages dealt at random.

    Args:
        map_all: windowed heads keep all their pages, so that lengths may change.
    """
    device, count = storage.device, len(case.head_windows)
    token = 2 * case.head_dim
    fitting = storage.limit() // (token * count * layers) - case.requests * page
    lengths = draw_lengths(case, fitting)
    reads = read_tokens(lengths, case)
    heads = _units(case, device, layers)
    pages, total = _page_table(lengths, heads, page, map_all, device)
    dense = int((reads.sum(1) / count).ceil().sum() + case.requests * page) * token * count
    storage.reserve(max(total * page * token, dense + page * token * count))
    lens = lengths.to(device)
    deep = (lens + page - 1) // page
    firsts = 1 + deep.cumsum(0) - deep
    slots = firsts[:, None] * page + torch.arange(int(lengths.max()), device=device)
    q = torch.randn(case.requests, count * case.group, case.head_dim, device=device)
    q = q.to(storage.dtype)
    batch = DecodeBatch(torch.arange(case.requests, device=device).int(), lens.int())
    layout = ArenaLayout(total, page, case.head_dim, case.head_dim)
    return DecodeData(
        case, layout, heads, PageTable(pages, slots.int()), batch, lengths, reads, q,
        torch.empty_like(q), storage,
    )  # fmt: skip


def _page_table(lengths: torch.Tensor, heads: LayerHeads, page: int, map_all: bool,
                device: torch.device) -> tuple[torch.Tensor, int]:  # fmt: skip
    """(pages int32 [U, G] with the sink page where nothing is resident, arena pages in all).

    Requests follow each other in G, after one logical page that nobody owns.
    """
    lens = lengths.to(device)
    deep = (lens + page - 1) // page
    owner = torch.repeat_interleave(torch.arange(len(lens), device=device), deep)
    index = torch.arange(len(owner), device=device) - (deep.cumsum(0) - deep)[owner]
    begin, length = index * page, lens[owner]
    windows, sinks = heads.windows.flatten().long(), heads.sinks.flatten().long()
    first = (length[None] - windows[:, None]).clamp(min=0)
    resident = (begin[None] + page > first) | (begin[None] < sinks[:, None])
    if map_all:
        resident = torch.ones_like(resident)
    total = int(resident.sum()) + 1
    order = torch.randperm(total - 1, device=device) + 1
    pages = torch.zeros(len(windows), 1 + len(owner), dtype=torch.int32, device=device)
    pages[:, 1:][resident] = order.int()
    return pages, total


@dataclass(frozen=True)
class ExtendData:
    """An extend batch in the package's layout; every request has the same history and chunk."""

    case: BenchCase
    layout: ArenaLayout
    heads: LayerHeads
    batch: ExtendBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    storage: Storage

    @property
    def arena(self) -> torch.Tensor:
        """[NP, P * 2D]."""
        return self.storage.view(self.layout.num_pages, self.layout.page_elements)

    @property
    def scale(self) -> float:
        """Applied to q.k."""
        return self.layout.head_dim**-0.5

    def flops(self, windows: tuple[int, ...] | None = None) -> int:
        """Multiplications and additions of both products; ``windows`` in place of the case's."""
        history, chunk = self.case.lengths
        query = torch.arange(history, history + chunk)[:, None] + 1
        window = torch.tensor(windows or self.case.head_windows)[None]
        first = (query - window).clamp(min=0)
        pairs = int((query - first + first.clamp(max=self.case.sinks)).sum())
        return 4 * self.layout.head_dim * self.case.group * self.case.requests * pairs


def extend_data(case: BenchCase, storage: Storage, page: int = 16) -> ExtendData:
    """Build chunks over resident history, of which windowed heads hold what they can still read."""
    device, count = storage.device, len(case.head_windows)
    history, chunk = case.lengths
    begin = torch.arange(-(-history // page)) * page
    lists = []
    for window in case.head_windows:
        oldest = max(0, history - window + 1)
        lists.append(begin[(begin + page > oldest) | (begin < case.sinks)] // page)
    sizes = torch.tensor([len(x) for x in lists])[:, None].expand(-1, case.requests)
    total = int(sizes.sum()) + 1
    token, tokens = 2 * case.head_dim, case.requests * chunk
    dense = case.requests * (-(-(history + chunk) // page) + 1) * page * count
    storage.reserve(max(total * page, dense) * token)
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
    logical = torch.cat([x.repeat(case.requests) for x in lists]) if total > 1 else begin[:0]
    positions = (logical[:, None] * page + torch.arange(page)).flatten()
    positions = torch.where(positions < history, positions, -1)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, case.head_dim, device=device).to(storage.dtype)

    batch = ExtendBatch(
        (torch.arange(case.requests + 1) * chunk).int().to(device),
        torch.full((case.requests,), history, dtype=torch.int32, device=device),
        starts.to(device), (starts * page).to(device), (sizes * page).int().to(device),
        _nonempty(1 + torch.randperm(total - 1)).int().to(device),
        _nonempty(positions).int().to(device), chunk,
    )  # fmt: skip
    q = randn(count * case.group)
    layout = ArenaLayout(total, page, case.head_dim, case.head_dim)
    return ExtendData(case, layout, _units(case, device, 1), batch, q, randn(count), randn(count),
                      torch.empty_like(q), storage)  # fmt: skip


def _nonempty(values: torch.Tensor) -> torch.Tensor:
    """At least one element, so that its address is one."""
    return values if len(values) else values.new_zeros(1)

"""Paged attention through plans against dense masked attention on the whole history."""

from __future__ import annotations

import math

import pytest
import torch

from engine_patches.ledger import PageLedger
from engine_patches.plan import Planner
from engine_patches.residents import Residents
from flashinfer_ext import reference
from flashinfer_ext.contract import ArenaLayout, HeadWindow
from kvpolicy.windows import FULL, Level

PAGE = 16
DIM, V_DIM = 8, 12
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def dense(q, k, v, queries, window, sinks, scale, cap) -> torch.Tensor:
    """Attention one query head and one query at a time: q [T, G, D], k [S, D], v [S, Dv]."""
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for i, query in enumerate(queries):
        keys = [t for t in range(query + 1) if t < sinks or t > query - window]
        for g in range(q.shape[1]):
            scores = (k[keys].double() @ q[i, g].double()) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            weights = torch.exp(scores - scores.max())
            out[i, g] = (weights / weights.sum()) @ v[keys].double()
    return out.to(q.dtype)


def randoms(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Head:
    """The keys and values of one kv head for one request, scattered over random pages."""

    def __init__(self, seed: int, length: int, layout: ArenaLayout, arena: torch.Tensor, used: set):
        self.k, self.v = randoms(seed, length, DIM), randoms(seed + 1, length, layout.v_head_dim)
        free = [p for p in range(1, layout.num_pages) if p not in used]
        order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed + 2))
        self.pages = [free[i] for i in order[: -(-length // PAGE)].tolist()]
        used.update(self.pages)
        for t in range(length):
            layout.keys(arena)[self.pages[t // PAGE], t % PAGE] = self.k[t]
            layout.values(arena)[self.pages[t // PAGE], t % PAGE] = self.v[t]


WINDOWS = [(1, 0), (5, 4), (16, 0), (17, 16), (24, 17), (40, 4), (FULL, 0)]


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_decode(window, sinks, groups, cap):
    layout = ArenaLayout(64, PAGE, DIM, V_DIM)
    arena = torch.full((64, layout.page_elements), math.nan)
    lengths, heads, used = [1, 16, 17, 70, 95], 2, set()
    stored = [
        [Head(100 * r + 10 * h, n, layout, arena, used) for r, n in enumerate(lengths)]
        for h in range(heads)
    ]
    read = [
        sorted({t // PAGE for t in range(n) if t < sinks or t > n - 1 - window}) for n in lengths
    ]
    width = max(len(x) for x in read) + 1
    pages = torch.zeros(heads, len(lengths), width, dtype=torch.int32)
    positions = torch.full((len(lengths), width * PAGE), -1)
    for r, index in enumerate(read):
        for i, page in enumerate(index):
            positions[r, i * PAGE : (i + 1) * PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
            for h in range(heads):
                pages[h, r, i] = stored[h][r].pages[page]
    q = randoms(7, len(lengths), heads, groups, DIM)
    queries = torch.tensor(lengths) - 1
    out = reference.decode(
        q,
        layout.keys(arena),
        layout.values(arena),
        pages,
        positions,
        queries,
        HeadWindow(window, sinks),
        0.3,
        cap,
    )
    assert out.shape == (len(lengths), heads, groups, V_DIM)
    for r, n in enumerate(lengths):
        for h in range(heads):
            head = stored[h][r]
            wanted = dense(q[r : r + 1, h], head.k, head.v, [n - 1], window, sinks, 0.3, cap)
            torch.testing.assert_close(out[r : r + 1, h], wanted, **TOLERANCE)


@pytest.mark.parametrize("block", [7, 256])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_extend(window, sinks, groups, cap, block, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_BLOCK", block)
    heads = 2
    for start, length in [(0, 1), (0, 33), (16, 20), (41, 30), (70, 3)]:
        total = start + length
        k, v = randoms(start, heads, total, DIM), randoms(start + 1, heads, total, V_DIM)
        end = -(-start // PAGE) * PAGE
        first = max(0, start - window + 1) // PAGE
        kept = [t for t in range(end) if t // PAGE >= first or t // PAGE < -(-sinks // PAGE)]
        old_k = torch.full((heads, end, DIM), math.nan)
        old_v = torch.full((heads, end, V_DIM), math.nan)
        old_k[:, :start], old_v[:, :start] = k[:, :start], v[:, :start]
        q = randoms(start + 2, length, heads, groups, DIM)
        out = reference.extend(
            q,
            old_k[:, kept],
            old_v[:, kept],
            torch.tensor(kept, dtype=torch.int64),
            k[:, start:].transpose(0, 1),
            v[:, start:].transpose(0, 1),
            start,
            HeadWindow(window, sinks),
            0.3,
            cap,
        )
        assert out.shape == (length, heads, groups, V_DIM)
        for h in range(heads):
            queries = range(start, total)
            wanted = dense(q[:, h], k[h], v[h], queries, window, sinks, 0.3, cap)
            torch.testing.assert_close(out[:, h], wanted, **TOLERANCE)


# -- plans and reference together: a tiny engine of one layer ----------------------------------


class OneLayer:
    """Stores and attends as plans say; freed pages become NaN."""

    def __init__(self, levels: tuple[Level, ...], pages: int) -> None:
        self.layout = ArenaLayout(pages, PAGE, DIM, V_DIM)
        self.arena = torch.full((pages, self.layout.page_elements), math.nan)
        self.keys, self.values = self.layout.keys(self.arena), self.layout.values(self.arena)
        self.ledger = PageLedger(levels, pages, 64, on_free=self._poison)
        self.residents = Residents(self.ledger, PAGE, cache=False, reclaim=lambda _: None)
        self.planner = Planner(self.residents)
        self.levels = levels
        self.next_page = 1

    def _poison(self, pages: torch.Tensor) -> None:
        self.arena[pages] = math.nan

    def pages_for(self, resident, length: int) -> list[int]:
        count = -(-length // PAGE) - len(resident.pages)
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    def store(self, plan, k, v) -> None:
        for level, write in zip(self.levels, plan.writes, strict=True):
            fresh = write.tokens[:, None], torch.tensor(level.units)
            self.keys[write.pages.long(), write.slots] = k[fresh].transpose(0, 1)
            self.values[write.pages.long(), write.slots] = v[fresh].transpose(0, 1)

    def prefill(self, batch, q, k, v) -> torch.Tensor:
        """``batch``: (resident, new length); q, k, v of all its new tokens in order."""
        grown = [(r, self.pages_for(r, length), length) for r, length in batch]
        starts = [r.length for r, _ in batch]
        self.residents.prepare([(r, len(new), length) for r, new, length in grown])
        history = []
        for resident, new, length in grown:
            history.append(self.planner.history(resident))
            self.residents.extend(resident, new, length)
        tokens = [[0] * (length + 1) for _, length in batch]
        plan = self.planner.extend([r for r, _ in batch], starts, history, tokens)
        out, begin = q.new_empty(*q.shape[:-1], V_DIM), 0
        for past, start, length in zip(plan.history, plan.starts, plan.lengths, strict=True):
            rows = slice(begin, begin + length)
            begin += length
            for level, read in zip(self.levels, past, strict=True):
                units, pages = list(level.units), read.pages.long()
                out[rows, units] = reference.extend(
                    q[rows][:, units],
                    self.keys[pages].flatten(1, 2),
                    self.values[pages].flatten(1, 2),
                    read.positions,
                    k[rows][:, units],
                    v[rows][:, units],
                    start,
                    HeadWindow(level.window, level.sinks),
                    0.3,
                )
        self.store(plan, k, v)
        return out

    def decode(self, batch, q, k, v) -> torch.Tensor:
        self.ledger.lift_fence()
        for resident in batch:
            new = self.pages_for(resident, resident.length + 1)
            self.residents.decode(resident, new[0] if new else None)
        plan = self.planner.decode(batch)
        self.store(plan, k, v)
        out = q.new_empty(*q.shape[:-1], V_DIM)
        for level, read in zip(self.levels, plan.reads, strict=True):
            units = list(level.units)
            out[:, units] = reference.decode(
                q[:, units],
                self.keys,
                self.values,
                read.pages,
                read.positions,
                plan.query_positions,
                HeadWindow(level.window, level.sinks),
                0.3,
            )
        return out


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sinks", [0, 4, 16, 17])
@pytest.mark.parametrize("chunk", [9, 16, 50])
def test_two_requests_over_chunks_and_decode(chunk, sinks, groups):
    levels = (
        Level(0, 5, sinks, (2,)),
        Level(1, 24, sinks, (0, 3)),
        Level(2, FULL, 0, (1,)),
    )
    heads, prompts, answers = 4, [75, 50], 40
    engine = OneLayer(levels, pages=61)
    q, k, v = (
        [randoms(31 * i + r, n + answers, heads, *tail) for r, n in enumerate(prompts)]
        for i, tail in enumerate([(groups, DIM), (DIM,), (V_DIM,)])
    )
    outputs: list[list[torch.Tensor]] = [[], []]
    residents = [engine.residents.admit([]) for _ in prompts]
    while any(r.length < n for r, n in zip(residents, prompts, strict=True)):
        spans = [
            (i, r.length, min(r.length + chunk, n))
            for i, (r, n) in enumerate(zip(residents, prompts, strict=True))
            if r.length < n
        ]
        fresh = [torch.cat([x[i][a:b] for i, a, b in spans]) for x in (q, k, v)]
        out = engine.prefill([(residents[i], b) for i, _, b in spans], *fresh)
        for part, (i, _, _) in zip(out.split([b - a for _, a, b in spans]), spans, strict=True):
            outputs[i].append(part)
    for _ in range(answers):
        at = [r.length for r in residents]
        fresh = [torch.stack([x[i][t] for i, t in enumerate(at)]) for x in (q, k, v)]
        for i, row in enumerate(engine.decode(residents, *fresh)):
            outputs[i].append(row[None])
    for i, parts in enumerate(outputs):
        out, total = torch.cat(parts), prompts[i] + answers
        for level in levels:
            for unit in level.units:
                wanted = dense(
                    q[i][:, unit], k[i][:, unit], v[i][:, unit], range(total), level.window,
                    level.sinks, 0.3, 0.0,
                )  # fmt: skip
                torch.testing.assert_close(out[:, unit], wanted, **TOLERANCE)
    assert engine.ledger.check_integrity() == []


def test_a_page_of_another_size_is_laid_out_as_the_contract_says():
    layout = ArenaLayout(3, 4, head_dim=2, v_head_dim=3)
    arena = torch.arange(3 * layout.page_elements).view(3, -1)
    assert layout.page_elements == 20
    assert layout.keys(arena)[1].tolist() == [[20, 21], [22, 23], [24, 25], [26, 27]]
    assert layout.values(arena)[2, 0].tolist() == [48, 49, 50]

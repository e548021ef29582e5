"""The backend over plans of frozen requests against dense attention on what Algorithm 1 keeps.

The real freezer, planner and attention backend on a model of two layers; the kept sets come from a
literal transcription of the paper over dense attention. Freed pages are NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from engine_patches import freezing
from engine_patches.backend import RaggedAttentionBackend
from engine_patches.budget import Budget, Wish
from engine_patches.freeze import Freeze, Freezer
from engine_patches.kernels.reference import ReferenceKernel
from engine_patches.kernels.triton import TritonKernel
from engine_patches.ledger import PageLedger
from engine_patches.plan import LevelDecode, Planner
from engine_patches.residents import Resident, Residents
from flashinfer_ext import reference
from flashinfer_ext.contract import ArenaLayout, HeadWindow
from kvpolicy.geometry import geometry_from_config
from kvpolicy.retention import RULES, SOURCES, MixTables, RetentionRule, RetentionTables
from kvpolicy.windows import FULL, Level
from tests.engine_patches.test_refusals import LLAMA
from tests.kvpolicy.retention import literal

PAGE, DIM, V_DIM, HEADS, GROUPS, SCALE = 16, 8, 12, 2, 3, 0.3
LEVELS = (Level(0, 24, 4, (1,)), Level(1, FULL, 0, (0, 2, 3)))
MEMBERS = {0: [(0, [0], [1]), (1, [0], [0])], 1: [(1, [1, 2], [0, 1])]}
UNITS = (np.array([0, 1, 1]), np.array([0, 0, 1]))  # layer and head of the units that freeze
RULE = RetentionRule("odd", observe=13, alpha_scope="layer", pool=3, floor=4, share="head")
MIX = RetentionRule(
    "mix", observe=13, pool=3, gate="off", share="head", mix="table", sinks=2, recent=4, focus=5
)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def randoms(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tables_of(rule: RetentionRule) -> RetentionTables:
    heads = {"num_attention_heads": HEADS * GROUPS, "num_key_value_heads": HEADS}
    geometry = geometry_from_config(LLAMA | heads | {"num_hidden_layers": 2})
    tables = RetentionTables.uniform(geometry, rule, weight=1.3, threshold=1.4)
    return replace(tables, mix=random_mix()) if rule.mixes else tables


def random_mix() -> MixTables:
    """Shares of the three units that freeze differ by 10x; each query head has its own weight."""
    rng = np.random.default_rng(3)
    shares = np.array([[[0.3, 9.0], [3.0, 1.1]]], np.float32)
    quotas = rng.uniform(0.2, 1, size=(*shares.shape, len(SOURCES))).astype(np.float32)
    weights = rng.uniform(0, 1, size=(2, HEADS * GROUPS)).astype(np.float32)
    return MixTables(shares, quotas, weights)


@dataclass
class Text:
    """One request: random activations of its prompt and answer, per layer; budget None: plain."""

    seed: int
    prompt: int
    answer: int
    budget: int | None
    resident: Resident | None = None
    outputs: list = field(default_factory=lambda: [[], []])

    def __post_init__(self) -> None:
        total = self.prompt + self.answer
        shapes = [(HEADS, GROUPS, DIM), (HEADS, DIM), (HEADS, V_DIM)]
        self.qkv = [
            [randoms(self.seed + 7 * layer + i, total, *shape) for i, shape in enumerate(shapes)]
            for layer in range(2)
        ]
        self.nlls = randoms(self.seed + 99, total).abs()

    def kept(self, tables: RetentionTables, cap: float) -> list[list[int]]:
        """What each freezing unit keeps, from dense attention."""
        window = min(tables.rule.observe, self.prompt)
        rows = slice(self.prompt - window, self.prompt)
        mass, norms, own, retrieval = [], [], [], np.zeros(self.prompt)
        for layer, head in zip(*UNITS, strict=True):
            q, k, v = (x[: self.prompt, head : head + 1] for x in self.qkv[layer])
            at, every = range(self.prompt)[rows], range(self.prompt)
            seen = literal.window_mass(q[rows], k.transpose(0, 1), at, every, SCALE, cap)
            mass.append(seen[0])
            norms.append(v[:, 0].double().norm(dim=-1).numpy())
            if tables.rule.mixes:
                last = slice(max(0, self.prompt - tables.rule.focus), self.prompt)
                at = every[last]
                seen = literal.focus_mass(q[last], k.transpose(0, 1), at, every, SCALE, cap)
                own.append(seen[0].mean(0))
                mine = range(head * GROUPS, (head + 1) * GROUPS)
                retrieval += tables.mix.query_weights[layer, mine].astype(float) @ seen[0]
        nlls = self.nlls[max(1, self.prompt - window) : self.prompt].tolist()
        arrays, focus = (np.array(mass), np.array(norms)), (np.array(own), retrieval)
        return literal.retain(*arrays, *UNITS, tables, self.budget, nlls, focus).kept

    def dense(self, layer: int, head: int, cap: float, kept: list[int] | None) -> torch.Tensor:
        """[total, G, Dv]: ``kept`` is what queries after the prompt still see of it; None: all."""
        q, k, v = (x[:, head].double() for x in self.qkv[layer])
        total, windowed = len(q), (layer, head) == (0, 1)
        t = torch.arange(total)
        seen = t[None, :] <= t[:, None]
        if windowed:
            seen &= HeadWindow(24, 4).visible(t[:, None], t[None, :])
        elif kept is not None:
            gone = torch.ones(total, dtype=torch.bool)
            gone[kept], gone[self.prompt :] = False, False
            seen &= ~((t[:, None] >= self.prompt) & gone[None, :])
        scores = torch.einsum("tgd,sd->tgs", q, k) * SCALE
        scores = cap * torch.tanh(scores / cap) if cap else scores
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        return (weights @ v).float()


class TwoLayers:
    """Plans and runs batches through the real backend, as the allocator's hooks do.

    The kernel is the reference, or Triton's in its interpreter, for which the page table stays
    behind while a forward may run and is looked up through a request table.
    """

    def __init__(
        self, rule: RetentionRule, cap: float = 0.0, pages: int = 120, kernel: str = "reference"
    ) -> None:
        layout = ArenaLayout(pages, PAGE, DIM, V_DIM)
        self.arena = torch.full((pages, layout.page_elements), math.nan)
        self.keys, self.values = layout.keys(self.arena), layout.values(self.arena)
        self.ledger = PageLedger(LEVELS, pages, 64, on_free=self._poison)
        self.residents = Residents(self.ledger, PAGE, cache=False, reclaim=lambda _: None)
        self.planner = Planner(self.residents)
        self.tables = tables_of(rule)
        self.freezer = Freezer(self.tables, *UNITS, self.keys, self.values)
        self.served = SimpleNamespace(
            plan=None, freezer=self.freezer, frozen_store=None, kernel=kernel
        )
        self.slots = torch.zeros(9, 160, dtype=torch.int32)
        self.backend = self._backend(layout)
        self.layers = [self._layer(i, cap) for i in range(2)]
        self.cap, self.next_page = cap, 1

    def _poison(self, pages: torch.Tensor) -> None:
        self.arena[pages] = math.nan

    def _backend(self, layout: ArenaLayout) -> RaggedAttentionBackend:
        backend = RaggedAttentionBackend.__new__(RaggedAttentionBackend)
        backend.served = self.served
        pool = SimpleNamespace(
            arena=self.arena, layout=layout, keys=self.keys, values=self.values,
            ledger=self.ledger, heads_of_level=MEMBERS, head_num=HEADS,
        )  # fmt: skip
        if self.served.kernel == "reference":
            backend.kernel = ReferenceKernel(self.served, pool)
        else:
            requests = SimpleNamespace(req_to_token=self.slots)
            backend.kernel = TritonKernel(self.served, pool, requests, {}, GROUPS)
        return backend

    def _batch(self, mode: ForwardMode, spans: list[tuple[Text, int, int]]) -> SimpleNamespace:
        """What SGLang tells a forward; the request table is written as it does."""
        slots = []
        for text, begin, end in spans:
            t = torch.arange(begin, end)
            pages = torch.tensor(text.resident.pages)[t // PAGE]
            slots.append(pages * PAGE + t % PAGE)
            self.slots[text.resident.slot, begin:end] = slots[-1].int()
        if self.served.kernel != "reference":
            self.ledger.fall_behind()
        return SimpleNamespace(
            forward_mode=mode, out_cache_loc=torch.cat(slots),
            seq_lens=torch.tensor([end for _, _, end in spans]),
            req_pool_indices=torch.tensor([text.resident.slot for text, _, _ in spans]),
        )  # fmt: skip

    def _layer(self, index: int, cap: float) -> SimpleNamespace:
        return SimpleNamespace(
            layer_id=index, tp_k_head_num=HEADS, tp_q_head_num=HEADS * GROUPS, qk_head_dim=DIM,
            v_head_dim=V_DIM, scaling=SCALE, logit_cap=cap, sliding_window_size=-1,
            is_cross_attention=False, attn_type=AttentionType.DECODER,
        )  # fmt: skip

    def start(self, text: Text) -> None:
        wish = Wish(None if text.budget is None else Budget(tokens=text.budget))
        text.resident = self.residents.admit([], freeze=self.freezer.plan(text.prompt, wish))
        text.resident.slot = len(self.residents.running) + 2

    def _new_pages(self, resident: Resident, length: int) -> list[int]:
        count = -(-length // PAGE) - len(resident.pages)
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    def _attend(self, forward, batch, spans: list[tuple[Text, int, int]]) -> None:
        for i, layer in enumerate(self.layers):
            q, k, v = (
                torch.cat([text.qkv[i][x][a:b] for text, a, b in spans]).flatten(1)
                for x in range(3)
            )
            out = forward(q, k, v, layer, batch).view(-1, HEADS, GROUPS, V_DIM)
            parts = out.split([b - a for _, a, b in spans])
            for part, (text, _, _) in zip(parts, spans, strict=True):
                text.outputs[i].append(part)

    def prefill(self, batch: list[tuple[Text, int]]) -> None:
        """``batch``: (request, length after its chunk)."""
        spans = [(text, text.resident.length, end) for text, end in batch]
        grown = [
            (text.resident, self._new_pages(text.resident, end), end) for text, _, end in spans
        ]
        self.residents.prepare([(r, len(new), end) for r, new, end in grown])
        history = []
        for resident, new, end in grown:
            history.append(self.planner.history(resident))
            self.residents.extend(resident, new, end)
        tokens = [list(range(text.prompt + text.answer)) for text, _, _ in spans]
        starts = [a for _, a, _ in spans]
        plan = self.planner.extend([r for r, _, _ in grown], starts, history, tokens)
        self.served.plan = plan
        batch = self._batch(ForwardMode.EXTEND, spans)
        self.backend.init_forward_metadata(batch)
        self._attend(self.backend.forward_extend, batch, spans)
        for (text, _, _), chunk in zip(spans, plan.observed, strict=True):
            if chunk is not None and chunk.freeze.measures_loss:
                chunk.freeze.add_loss(text.nlls[chunk.targets])
        self._freeze(plan)

    def _freeze(self, plan) -> None:
        for chunk in plan.observed:
            if chunk is not None and chunk.pages is not None:
                self.freezer.run(chunk)
        for resident in self.residents.running:
            freeze = resident.freeze
            if freeze and not freeze.done and resident.length == freeze.prompt:
                freezing.settle(self.residents, resident)
                if self.served.frozen_store is not None:
                    self.served.frozen_store.add(resident.slot, freeze)
                freezing.trim(self.residents, resident)

    def decode(self, batch: list[Text]) -> None:
        self.ledger.lift_fence()
        spans = [(text, text.resident.length, text.resident.length + 1) for text in batch]
        for text, _, end in spans:
            new = self._new_pages(text.resident, end)
            self.residents.decode(text.resident, new[0] if new else None)
        self.served.plan = self.planner.decode([text.resident for text in batch])
        now = self._batch(ForwardMode.DECODE, spans)
        self.backend.init_forward_metadata(now)
        self._attend(self.backend.forward_decode, now, spans)

    def check(self, text: Text) -> None:
        """All outputs so far are those of dense attention, masked to the kept sets."""
        kept = {}
        if text.budget is not None and text.budget < text.prompt:
            rows = text.kept(self.tables, self.cap)
            found = text.resident.freeze.kept_positions.tolist()
            assert [[p for p in row if p >= 0] for row in found] == rows
            kept = dict(zip(zip(*(x.tolist() for x in UNITS), strict=True), rows, strict=True))
        for layer, parts in enumerate(text.outputs):
            out = torch.cat(parts)
            for head in range(HEADS):
                wanted = text.dense(layer, head, self.cap, kept.get((layer, head)))[: len(out)]
                torch.testing.assert_close(out[:, head], wanted, **TOLERANCE)


def run_chunks(engine: TwoLayers, texts: list[Text], chunk: int, ends: list[int]) -> None:
    """Prefill all requests together up to ``ends``; a chunk stops where its prompt freezes."""
    while any(t.resident.length < end for t, end in zip(texts, ends, strict=True)):
        batch = []
        for text, end in zip(texts, ends, strict=True):
            at = text.resident.length
            stop = text.prompt if at < text.prompt else end
            if at < end:
                batch.append((text, min(at + chunk, stop, end)))
        engine.prefill(batch)


CASES = [(RULE, 3.0), (RULES["head"], 0.0), (RULES["paper"], 0.0), (MIX, 3.0), (MIX, 0.0)]


@pytest.mark.parametrize(
    ("rule", "cap", "chunk", "kernel"),
    [(*case, chunk, "reference") for case in CASES for chunk in (9, 16, 50)]
    + [pytest.param(MIX, 3.0, 25, "triton", marks=pytest.mark.slow)],  # interpreted
)
def test_frozen_and_plain_requests_decode_together(rule, cap, chunk, kernel):
    engine = TwoLayers(rule, cap, kernel=kernel)
    texts = [Text(0, 75, 36, 20), Text(1000, 50, 36, None), Text(2000, 64, 36, 33)]
    texts += [Text(3000, 11, 36, 400), Text(4000, 3, 36, 1)]
    for text in texts:
        engine.start(text)
    assert [text.resident.freeze is not None for text in texts] == [True, False, True, False, True]
    run_chunks(engine, texts, chunk, [text.prompt for text in texts])
    for _ in range(36):
        engine.decode(texts)
    for text in texts:
        engine.check(text)
    assert engine.ledger.check_integrity() == []
    for text in texts:
        engine.residents.release(text.resident)
    assert engine.ledger.pinned == 0


@pytest.mark.parametrize("rule", [RULE, MIX], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("rest", "cap", "kernel"),
    [(1, 0.0, "reference"), (7, 3.0, "reference"), (30, 0.0, "reference"), (17, 3.0, "triton")],
)
def test_a_resumed_answer_is_prefilled_on_the_frozen_prompt(rest, cap, kernel, rule):
    """After a retraction: the prompt freezes again, its answer so far follows in chunks."""
    engine = TwoLayers(rule, cap, kernel=kernel)
    texts = [Text(0, 75, 36, 20), Text(1000, 48, 36, None), Text(2000, 64, 36, 33)]
    for text in texts:
        engine.start(text)
    run_chunks(engine, texts, rest, [text.prompt + 21 for text in texts])
    for _ in range(15):
        engine.decode(texts)
    for text in texts:
        engine.check(text)


def test_units_that_keep_different_counts_give_back_their_own_pages():
    engine = TwoLayers(RULE)
    text = Text(0, 75, 20, 40)
    engine.start(text)
    run_chunks(engine, [text], 50, [75])
    counts = [sum(p >= 0 for p in row) for row in text.resident.freeze.kept_positions.tolist()]
    assert len(set(counts)) > 1
    pages = text.resident.freeze.pages
    assert pages.counts.tolist() == [-(-n // PAGE) for n in counts]
    engine.decode([text])
    engine.check(text)


def test_heads_that_split_the_budget_take_the_pages_of_their_own_share():
    engine = TwoLayers(MIX)
    text = Text(0, 75, 20, 30)
    engine.start(text)
    budgets = text.resident.freeze.unit_budgets.tolist()
    assert budgets == literal.unit_budgets([0.3, 3.0, 1.1], 30, 75, 6) and sum(budgets) == 90
    run_chunks(engine, [text], 73, [75])
    pages = text.resident.freeze.pages
    assert pages.counts.tolist() == [-(-n // PAGE) for n in budgets] and len({*budgets}) == 3
    window, tails = 4, 3  # pages: sinks and window of one head; where the others' answer goes
    assert engine.ledger.pinned == pages.total + window + tails
    kept = text.resident.freeze.kept_positions
    assert (kept >= 0).sum(1).tolist() == budgets
    engine.decode([text])
    engine.check(text)


def test_the_focus_is_of_the_last_queries_and_of_heads_that_freeze():
    """Query heads count by their own weights; the rows of a chunk border add up."""
    engine = TwoLayers(MIX)
    weights = engine.tables.mix.query_weights.copy()
    weights[0, GROUPS:] = 99.0  # of the head with a window
    engine.freezer._query_weights = torch.tensor(weights)
    text = Text(0, 75, 1, 30)
    engine.start(text)
    run_chunks(engine, [text], 73, [73])
    freeze = text.resident.freeze
    assert freeze.focused == 5
    found = freeze.focus.own, freeze.focus.retrieval
    rows, every, wanted = range(70, 73), range(75), np.zeros(75)
    for u, (layer, head) in enumerate(zip(*UNITS, strict=True)):
        q, k, _ = (x[:75, head : head + 1] for x in text.qkv[layer])
        seen = literal.focus_mass(q[70:73], k.transpose(0, 1), rows, every, SCALE)[0]
        np.testing.assert_allclose(found[0][u].numpy(), seen.mean(0), rtol=1e-4, atol=1e-7)
        wanted += weights[layer, head * GROUPS : (head + 1) * GROUPS] @ seen
    np.testing.assert_allclose(found[1].numpy(), wanted, rtol=1e-4, atol=1e-7)
    run_chunks(engine, [text], 73, [75])
    assert freeze.focus is None and freeze.mass is None


def test_whole_reads_are_the_plan_where_nothing_is_frozen():
    plain = LevelDecode(torch.ones(2, 3, 4, dtype=torch.int32), torch.zeros(3, 64).long())
    pages, positions = plain.whole()
    assert pages is plain.pages and positions is plain.positions


def test_whole_reads_against_a_dense_mask():
    """Rows with and without a freeze, of different widths, over NaN everywhere else."""
    ledger = PageLedger((Level(0, FULL, 0, (0, 1)),), 40, 8)
    layout = ArenaLayout(40, PAGE, DIM, V_DIM)
    arena = torch.full((40, layout.page_elements), math.nan)
    keys, values = layout.keys(arena), layout.values(arena)
    own = torch.tensor([[[3, 0], [5, 6], [7, 0]], [[8, 0], [9, 10], [11, 0]]], dtype=torch.int32)
    first = torch.tensor([[64, -1], [0, 16], [32, -1]])
    positions = torch.where(first[..., None] < 0, -1, first[..., None] + torch.arange(PAGE))
    positions[2, 0, :3] = -1  # the prompt ended at 35
    queries = torch.tensor([70, 25, 40])
    frozen, kept = [], {0: [[1, 9, 63], list(range(0, 60, 2))], 2: [[34], [0, 5]]}
    for row, sets in kept.items():
        freeze = Freeze(64 if row == 0 else 35, 30, 5, False)
        freeze.pages = ledger.take(0, np.array([-(-len(s) // PAGE) for s in sets]))
        width = freeze.pages.ids.shape[1] * PAGE
        freeze.pages.ids += (freeze.pages.ids > 0) * 12  # clear of the pages above
        freeze.kept_positions = torch.tensor([s + [-1] * (width - len(s)) for s in sets])
        frozen.append((row, freeze))
    read = LevelDecode(own, positions.flatten(1), tuple(frozen))
    pages, whole = read.whole()
    assert pages.shape == (2, 3, 4) and whole.shape == (2, 3, 4 * PAGE)
    stored = {}
    for head in range(2):
        for row in range(3):
            seen = kept[row][head] if row in kept else []
            begin = {0: 64, 1: 0, 2: 35}[row]
            wanted = seen + list(range(begin, int(queries[row]) + 1))
            k, v = randoms(row, len(wanted), DIM), randoms(9 + row, len(wanted), V_DIM)
            stored[head, row] = k, v
            for i, p in enumerate(wanted):
                (slot,) = (whole[head, row] == p).nonzero()
                page = int(pages[head, row, int(slot) // PAGE])
                keys[page, int(slot) % PAGE], values[page, int(slot) % PAGE] = k[i], v[i]
    q = randoms(77, 3, 2, GROUPS, DIM)
    out = reference.decode(q, keys, values, pages, whole, queries, HeadWindow(FULL, 0), SCALE)
    for (head, row), (k, v) in stored.items():
        weights = (q[row, head] @ k.T * SCALE).softmax(-1)
        torch.testing.assert_close(out[row, head], weights @ v, **TOLERANCE)

"""The loss of a prompt's observed tokens against a plain computation, over any chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import logits_processor
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from engine_patches import loss
from engine_patches.budget import Budget, Wish
from engine_patches.freeze import Freeze, Freezer
from engine_patches.ledger import PageLedger
from engine_patches.plan import DecodePlan, ExtendPlan, Planner
from engine_patches.residents import Residents
from kvpolicy.retention import RetentionRule
from kvpolicy.windows import FULL, Level

VOCAB, PADDED, HIDDEN = 11, 16, 6
METADATA = logits_processor.LogitsMetadata(ForwardMode.EXTEND)


def randoms(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Processor:
    """SGLang's LogitsProcessor as far as losses need it: a padded vocabulary, noted calls."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.calls: list[tuple] = []

    def _get_logits(self, states, lm_head, metadata, *, use_logits_buffer):
        assert metadata is METADATA and use_logits_buffer is False
        self.calls.append(states.shape)
        logits = states @ lm_head.T
        return torch.cat([logits, torch.full((len(logits), PADDED - VOCAB), 50.0)], dim=1)


class Texts:
    """Requests with random states and tokens, planned in chunks by the real planner."""

    def __init__(self, prompts: list[int], observe: int, gate: str, budget: int | None) -> None:
        ledger = PageLedger((Level(0, FULL, 0, (0,)),), 200, 200)
        self.residents = Residents(ledger, 4, cache=False, reclaim=lambda _: None)
        self.planner = Planner(self.residents)
        self.processor, self.head = Processor(), randoms(5, VOCAB, HIDDEN)
        self.prompts, self._page = prompts, 1
        self.tokens = [
            (randoms(50 + i, n) * 99).long().abs() % VOCAB for i, n in enumerate(prompts)
        ]
        self.tokens = [row.tolist() for row in self.tokens]
        self.states = [randoms(i, n, HIDDEN) for i, n in enumerate(prompts)]
        freezer = Freezer.__new__(Freezer)
        freezer.rule = RetentionRule("rule", observe=observe, gate=gate)
        wish = Wish(None if budget is None else Budget(tokens=budget))
        self.freezes = [freezer.plan(n, wish) for n in prompts]
        self.running = [self.residents.admit([], freeze=freeze) for freeze in self.freezes]

    def forward(self, count: int, metadata=METADATA) -> ExtendPlan:
        """The next ``count`` tokens of every prompt that is not complete, in one batch."""
        batch = [i for i, r in enumerate(self.running) if r.length < self.prompts[i]]
        starts = [self.running[i].length for i in batch]
        for i in batch:
            resident = self.running[i]
            end = min(resident.length + count, self.prompts[i])
            new = range(self._page, self._page - (-end // 4) - len(resident.pages))
            self._page += len(new)
            self.residents.prepare([(resident, len(new), end)])
            self.residents.extend(resident, list(new), end)
        grown, tokens = [self.running[i] for i in batch], [self.tokens[i] for i in batch]
        plan = self.planner.extend(grown, starts, [[] for _ in batch], tokens)
        spans = zip(batch, starts, plan.lengths, strict=True)
        states = torch.cat([self.states[i][a : a + n] for i, a, n in spans])
        loss.observe_losses(self.processor, plan, states, self.head, metadata)
        return plan

    def plain(self, i: int, observe: int) -> tuple[float, int]:
        """(sum, count) of -log p of the prompt's last tokens, one at a time."""
        total, first = 0.0, max(1, self.prompts[i] - observe)
        for t in range(first, self.prompts[i]):
            logits = (self.head.double() @ self.states[i][t - 1].double()).tolist()
            top = max(logits)
            norm = sum(torch.exp(torch.tensor(x - top)).item() for x in logits)
            total -= logits[self.tokens[i][t]] - top - torch.log(torch.tensor(norm)).item()
        return total, self.prompts[i] - first


@pytest.mark.parametrize("observe", [1, 5, 64])
@pytest.mark.parametrize("count", [1, 4, 7, 99])
def test_losses_of_any_chunks_are_the_plain_sum(count, observe):
    texts = Texts([23, 9, 40, 2], observe, "table", budget=1)
    for _ in range(-(-40 // count)):
        texts.forward(count)
    for i, freeze in enumerate(texts.freezes):
        total, number = texts.plain(i, observe)
        assert freeze.nll_count == number
        assert float(freeze.nll_sum) == pytest.approx(total, rel=1e-5)
    assert sum(rows for rows, _ in texts.processor.calls) == sum(f.nll_count for f in texts.freezes)


@pytest.mark.parametrize(("gate", "budget"), [("off", 1), ("table", None), ("table", 23)])
def test_nothing_is_computed_where_nobody_asks(gate, budget):
    texts = Texts([23, 9], 5, gate, budget)
    texts.forward(99)
    assert texts.processor.calls == []
    assert all(freeze is None or freeze.nll_sum is None for freeze in texts.freezes)


def test_a_decode_batch_and_a_batch_without_a_plan_are_left_alone():
    processor = Processor()
    plan = DecodePlan(torch.zeros(1).long(), [], [])
    loss.observe_losses(processor, plan, torch.zeros(1, HIDDEN), None, METADATA)
    assert processor.calls == []


def test_a_forward_batch_is_turned_into_metadata_once(monkeypatch):
    batch = SimpleNamespace()
    made = []

    def from_forward_batch(found):
        made.append(found)
        return METADATA

    monkeypatch.setattr(logits_processor.LogitsMetadata, "from_forward_batch", from_forward_batch)
    texts = Texts([23, 9], 5, "table", 1)
    texts.forward(99, metadata=batch)
    assert made == [batch] and len(texts.processor.calls) == 2


def test_losses_add_up_and_are_counted():
    freeze = Freeze(9, 3, 4, True)
    freeze.add_loss(torch.tensor([1.0, 2.5]))
    freeze.add_loss(torch.tensor([0.5]))
    assert (float(freeze.nll_sum), freeze.nll_count) == (4.0, 3)

"""Freezing one prompt: what is observed on the way, the selection, the copy into compact pages.

CompilerKV section 4: at the end of prefill every unit with unlimited history keeps the tokens that
``kvpolicy.retention`` chooses; from then on decoding reads those and what it appends. Heads with a
window take no part. Everything here is enqueued on the device; only ``Freeze.trim_counts`` and
``FreezeReport.copy`` wait for it, and those run when the results are on the host anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from engine_patches.budget import Wish
from engine_patches.ledger import SINK_PAGE, PrivatePages
from kvpolicy.retention import (
    DeviceTables,
    Focus,
    RetentionTables,
    focus_mass,
    retain,
    window_mass,
)

UNIT_BLOCK = 8
"""Units whose pages are gathered at once when values are measured and kept tokens copied."""

PLANS = 4096
"""Prompt lengths and budgets whose split among the units is remembered: a waiting request is
planned anew at every look at the queue."""


@dataclass(eq=False)
class Freeze:
    """One request's freeze, planned at admission and done by the forward that ends its prompt.

    Fields: ``prompt`` T; ``budget`` B < T; ``window`` W, the observed queries;
    ``measures_loss`` whether the gate asks for the observed tokens' loss; ``unit_budgets`` int64
    [units], what each unit may keep, None: B each; ``focused`` how many of the last queries the
    rule's ``focus`` sums over, 0 without one; ``mass`` f32 [units, T] the observed attention so
    far, ``focus`` likewise; ``nll_sum`` f32 [] and ``nll_count`` over the observed tokens;
    ``pages`` compact pages, from the allocation of the last chunk on; ``kept_positions`` int64
    [units, pages * P], -1 in empty slots; ``listed`` page ids that a ``FrozenStore`` keeps of it;
    ``done`` once the freezing forward was launched.
    """

    prompt: int
    budget: int
    window: int
    measures_loss: bool
    unit_budgets: np.ndarray | None = None
    focused: int = 0
    mass: torch.Tensor | None = None
    focus: Focus | None = None
    nll_sum: torch.Tensor | None = None
    nll_count: int = 0
    pages: PrivatePages | None = None
    kept_positions: torch.Tensor | None = None
    report: FreezeReport | None = None
    listed: int = 0
    done: bool = False
    _counts: torch.Tensor | None = field(default=None, repr=False)
    _ready: Any = field(default=None, repr=False)

    @property
    def first_observed(self) -> int:
        """First position whose query is observed."""
        return self.prompt - self.window

    @property
    def hit_limit(self) -> int:
        """Longest prefix hit, in tokens, that leaves every observed token to be computed."""
        return max(0, self.first_observed - 1)

    def page_counts(self, units: int, page_size: int) -> np.ndarray:
        """Compact pages that each of so many units may fill: int64 [units]."""
        kept = self.unit_budgets
        if kept is None:
            kept = np.full(units, self.budget, dtype=np.int64)
        return -(-kept // page_size)

    def begin(self, units: int, device: torch.device) -> None:
        """Allocate the accumulators. Idempotent."""
        if self.mass is not None:
            return
        self.mass = torch.zeros(units, self.prompt, device=device)
        if self.focused:
            own, retrieval = torch.zeros_like(self.mass), torch.zeros_like(self.mass[0])
            self.focus = Focus(own, retrieval)

    def add_loss(self, losses: torch.Tensor) -> None:
        """Add the losses [n], in nats, of n observed tokens."""
        self.nll_sum = losses.sum() if self.nll_sum is None else self.nll_sum + losses.sum()
        self.nll_count += len(losses)

    def finish(self, counts: torch.Tensor) -> None:
        """Note the kept counts [units] and let go of the accumulators."""
        self._counts = counts.to("cpu", non_blocking=True)
        if counts.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()
        self.mass = self.focus = self.nll_sum = None

    def trim_counts(self) -> np.ndarray | None:
        """Kept tokens [units], once; None until the device has told them, or if told before."""
        if self._counts is None or (self._ready is not None and not self._ready.query()):
            return None
        counts, self._counts = self._counts.numpy(), None
        return counts


@dataclass(frozen=True)
class ObservedChunk:
    """What one prefill chunk of one request adds to its freeze.

    Fields: ``begin`` row of the chunk's first observed query (its length if none); ``losses`` rows
    [a, b) of the chunk whose next token is observed, with ``targets`` int64 [b - a]; ``pages``
    int32 [units, n] of the whole prompt if this chunk ends it, else None.
    """

    freeze: Freeze
    begin: int
    losses: tuple[int, int]
    targets: torch.Tensor
    pages: torch.Tensor | None


class FreezeReport:
    """What became of one prompt, for ``meta_info``. ``copy`` reads the device; SGLang calls it."""

    def __init__(self, prompt: int, budget: int | None = None, reason: str | None = None) -> None:
        self.prompt, self.budget, self.reason = prompt, budget, reason
        self.counts: torch.Tensor | None = None
        self.layers: np.ndarray | None = None
        self.bins: tuple[torch.Tensor, torch.Tensor] | None = None
        self.risks: tuple[torch.Tensor, torch.Tensor] | None = None
        self.lists_positions = False
        self.positions: torch.Tensor | None = None

    def copy(self) -> dict[str, Any]:
        """Plain JSON values; waits for the device."""
        plain = {"prompt_tokens": self.prompt, "budget": self.budget, "frozen": False}
        if self.reason is not None:
            return {**plain, "reason": self.reason}
        counts = self.counts.cpu().numpy()
        per_layer = np.array([counts[self.layers == x].mean() for x in np.unique(self.layers)])
        plain |= {
            "frozen": True,
            "kept_tokens_per_layer": _spread(per_layer),
            "kept_tokens_per_head": _spread(counts),
            "risk_bin": None,
        }
        if self.bins is not None:
            plain["risk_bin"] = [int(b) for b in self.bins]
            plain["entropy"], plain["perplexity"] = (float(r) for r in self.risks)
        if self.positions is not None:
            rows = self.positions.tolist()
            plain["positions"] = [[p for p in row if p >= 0] for row in rows]
        return plain


def _spread(counts: np.ndarray) -> dict[str, float]:
    return {name: float(getattr(counts, name)()) for name in ("min", "mean", "max")}


class Freezer:
    """Carries the tables on the device and runs the freeze of a forward.

    Args:
        tables: retention tables of the policy.
        layers, heads: int64 [units], attention layer index and kv head of each freezing unit.
        keys, values: arena views [NP, P, D], [NP, P, Dv].
    """

    def __init__(
        self,
        tables: RetentionTables,
        layers: np.ndarray,
        heads: np.ndarray,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        self.rule = tables.rule
        self.layers, self.keys, self.values = layers, keys, values
        self._layers = torch.from_numpy(layers).to(keys.device)
        self._heads = torch.from_numpy(heads).to(keys.device)
        self._tables = DeviceTables.of(tables, self._layers, self._heads, keys.device)
        self._split = lru_cache(PLANS)(self._tables.unit_budgets)
        if self.rule.mixes:
            self._query_weights = torch.tensor(tables.mix.query_weights, device=keys.device)

    def unit_budgets(self, budget: int, prompt: int) -> np.ndarray | None:
        """Tokens each unit keeps of a prompt: int64 [units]; None: the budget each."""
        return self._split(budget, prompt) if self.rule.mixes else None

    def plan(self, prompt: int, wish: Wish) -> Freeze | None:
        """The freeze of a prompt of ``prompt`` tokens; None if it is left alone."""
        if wish.budget is None or wish.budget.of(prompt) >= prompt:
            return None
        report = FreezeReport(prompt, wish.budget.of(prompt))
        report.lists_positions = wish.positions
        window = min(self.rule.observe, prompt)
        return Freeze(
            prompt,
            report.budget,
            window,
            measures_loss=self.rule.gate == "table",
            unit_budgets=self.unit_budgets(report.budget, prompt),
            focused=min(self.rule.focus, window) if self.rule.mixes else 0,
            report=report,
        )

    def observe(
        self,
        freeze: Freeze,
        rows: torch.Tensor,
        q: torch.Tensor,
        history_k: torch.Tensor,
        chunk_k: torch.Tensor,
        start: int,
        begin: int,
        scale: float,
        logit_cap: float,
    ) -> None:
        """Add the attention of a chunk's observed queries in one layer.

        Args:
            rows: int64 [H], the layer's units.
            q: [T, H, G, D] of the chunk, whose observed queries start at row ``begin``.
            history_k: [H, S, D], slots of the pages from position 0 on, S >= ``start``.
            chunk_k: [T, H, D]; ``start`` is the position of its first token.

        Side effect: adds to ``freeze.mass`` and ``freeze.focus``.
        """
        freeze.begin(len(self._layers), q.device)
        keys = torch.cat([history_k[:, :start], chunk_k.transpose(0, 1)], dim=1)
        end = keys.shape[1]
        positions = torch.arange(end, device=q.device)

        def attention(measure, first: int) -> torch.Tensor:
            queries = positions[start + first :]
            return measure(q[first:], keys, queries, positions, scale, logit_cap)

        freeze.mass[rows, :end] += attention(window_mass, begin)
        first = max(0, freeze.prompt - freeze.focused - start)
        if first < len(q):
            found = attention(focus_mass, first)
            weights = self._weights_of(rows, q.shape[2])
            freeze.focus.own[rows, :end] += found.mean(1)
            freeze.focus.retrieval[:end] += (weights[..., None] * found).sum((0, 1))

    def run(self, chunk: ObservedChunk) -> None:
        """Choose and copy what a finished prompt keeps (Algorithm 1, equations 4 to 8).

        Preconditions: every layer observed the whole window; the prompt's pages are written.
        Side effects: fills the compact pages and ``kept_positions``.
        """
        freeze = chunk.freeze
        observed = min(freeze.window, freeze.prompt - 1) if freeze.measures_loss else 0
        if freeze.mass is None or freeze.nll_count != observed:
            raise RuntimeError(
                f"{freeze.nll_count} of {observed} observed tokens reached the end of a prompt"
            )
        found = retain(
            freeze.mass,
            None if self.rule.mixes else self._value_norms(chunk.pages, freeze.prompt),
            self._layers,
            self._heads,
            self._tables,
            freeze.budget,
            torch.zeros((), device=freeze.mass.device)
            if freeze.nll_sum is None
            else freeze.nll_sum,
            max(1, freeze.nll_count),
            freeze.focus,
        )
        kept = found.kept.positions
        self._copy(chunk.pages, freeze, kept)
        report = freeze.report
        report.counts, report.layers = found.kept.counts, self.layers
        if freeze.measures_loss:
            report.bins = (found.entropy_bin, found.perplexity_bin)
            report.risks = (found.entropy, found.perplexity)
        if report.lists_positions:
            report.positions = kept
        freeze.finish(found.kept.counts)

    # -- internals -----------------------------------------------------------------------------

    def _weights_of(self, rows: torch.Tensor, group: int) -> torch.Tensor:
        """f32 [H, G]: retrieval weights of the query heads that units ``rows`` of a layer serve."""
        first = self._heads[rows] * group
        columns = first[:, None] + torch.arange(group, device=rows.device)
        return self._query_weights[self._layers[rows][:, None], columns]

    def _value_norms(self, pages: torch.Tensor, prompt: int) -> torch.Tensor:
        """f32 [units, T]: length of every value vector."""
        blocks = []
        for block in pages.long().split(UNIT_BLOCK):
            values = self.values[block].flatten(1, 2)[:, :prompt]
            blocks.append(torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32))
        return torch.cat(blocks)

    def _copy(self, pages: torch.Tensor, freeze: Freeze, kept: torch.Tensor) -> None:
        """Copy the tokens at ``kept`` [units, n] (-1: none) into the first slots, in order."""
        size = self.keys.shape[1]
        slot = torch.arange(kept.shape[1], device=kept.device)
        used = kept >= 0
        source = kept.clamp(min=0)
        source_pages = pages.long().gather(1, source // size)
        target_pages = freeze.pages.ids.long()[:, slot // size].where(used, SINK_PAGE)
        for store in (self.keys, self.values):
            for a in range(0, len(kept), UNIT_BLOCK):
                block = slice(a, a + UNIT_BLOCK)
                tokens = store[source_pages[block], source[block] % size]
                store[target_pages[block], (slot % size).expand_as(target_pages[block])] = tokens
        freeze.kept_positions[:, : kept.shape[1]] = kept

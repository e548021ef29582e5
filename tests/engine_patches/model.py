"""A brute-force model of what an engine does around ``Residents``, for property tests.

``Engine`` stands for SGLang's scheduler: a queue, one chunked prefill at a time, decode batches,
retraction, a prefix tree that swaps a request's pages for its own, and, with ``overlap``, results
that are known only after the next forward started. ``Contents`` stands for the arena: it remembers,
slot by slot, which token of which unit was written last, so every read can be compared with the one
token it must see. Pages freed are poisoned at once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from engine_patches.admission import RaggedPrefillAdder
from engine_patches.prefix import longest_valid_hit
from kvpolicy.residency import held_pages, peak_pages
from tests.engine_patches.model_memory import (
    Allocator,
    Contents,
    Request,
    Setup,
    Tree,
    visible_keys,
    window_pages,
)


class Adder(RaggedPrefillAdder):
    """The real arithmetic of admission."""

    def __init__(self, engine: Engine) -> None:
        self.token_to_kv_pool_allocator = engine.allocator
        self.residents = engine.allocator.residents
        for req in engine.running:
            left = req.max_new - len(req.output_ids)
            req.raggedkv.target = req.raggedkv.length + max(1, int(left * engine.setup.ahead))


class Engine:
    """Runs requests as SGLang's scheduler would, and compares with brute force after every step."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.size, self.levels = setup, setup.page_size, setup.levels
        self.contents = Contents(setup)
        self.tree = Tree(setup, self.contents)
        self.allocator = Allocator(setup, self.tree, self.contents.poison)
        self.tree.allocator = self.allocator
        self.ledger, self.residents = self.allocator.ledger, self.allocator.residents
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.starting: list[Request] = []  # admitted to the batch being built
        self.said: list[list[int]] = [[0] * 40]
        self.events: Counter[str] = Counter()
        self._results: list[tuple[Request, int, Callable[[], None]]] = []
        self._rids = itertools.count()

    # -- what a client does --------------------------------------------------------------------

    def ask(self, source: int, cut: int, tail: int, letter: int, max_new: int) -> None:
        """Queue a prompt: the start of an earlier conversation, then ``tail`` new tokens."""
        base = self.said[source % len(self.said)]
        tokens = [*base[:cut], *[letter] * tail] or [letter]
        while self._too_big(len(tokens) + max_new):
            if len(tokens) == max_new == 1:
                return
            tokens, max_new = tokens[: -(-len(tokens) // 2)], -(-max_new // 2)
        req = Request(next(self._rids), tokens, len(tokens), max_new, letter)
        self.said.append(req.tokens)
        self.waiting.append(req)

    def crowd(self, count: int, cut: int, tail: int, max_new: int) -> None:
        """Queue several short prompts with long answers, which part ways early."""
        for i in range(count):
            self.ask(0, cut, tail + i % 3, i % 3, max_new - i)

    def abort(self, index: int, checkpoint: bool) -> None:
        """End a request early; ``checkpoint`` leaves what it computed in the prefix tree."""
        self.process_results()
        alive = [*self.running, *([self.chunked] if self.chunked else []), *self.waiting]
        if not alive:
            return
        req = alive[index % len(alive)]
        req.over = checkpoint
        if req in self.waiting:
            self.waiting.remove(req)
        else:
            self.release(req, req.computed, checkpoint)
            self.events["finish" if checkpoint else "abort"] += 1

    # -- batches -------------------------------------------------------------------------------

    def prefill(self, budget: int) -> bool:
        """One prefill batch of up to ``budget`` tokens. Returns whether there was one."""
        batch: list[tuple[Request, int]] = []
        adder = Adder(self)
        if self.chunked:
            batch.append((self.chunked, self._stash(self.chunked, budget)))
            budget -= batch[0][1]
        while self.waiting and budget > 0 and self._admit(adder, self.waiting[0]):
            req = self.waiting.pop(0)
            self.starting.append(req)
            count = min(budget, len(req.tokens) - req.computed)
            batch.append((req, count))
            budget -= count
        if not batch:
            return False
        results, self._results = self._results, []
        self._forward_extend(batch)
        self.process(results)
        self.chunked, self.starting = None, []
        for req, _ in batch:
            if req.computed < len(req.tokens):
                self.chunked = req
            else:
                self.running.append(req)
                self._sample(req)
                if self.setup.cache:
                    self._later(req, self._checkpoint)
        if not self.setup.overlap:
            self.process_results()
        return True

    def decode(self) -> bool:
        """One decode batch; retracts until it fits. Returns whether there was one."""
        if self.chunked or not self.running:
            return False
        while not self._decode_fits():
            self._retract()
        batch = list(self.running)
        results, self._results = self._results, []
        self._forward_decode(batch)
        self.process(results)
        for req in batch:
            if req.raggedkv is not None:
                self._sample(req)
        if not self.setup.overlap:
            self.process_results()
        return True

    def step(self, budget: int) -> bool:
        """One batch, prefill first."""
        return self.prefill(budget) or self.decode()

    def process_results(self) -> None:
        """What the scheduler does once the last forward's tokens are known."""
        results, self._results = self._results, []
        self.process(results)

    def process(self, results: list) -> None:
        for req, life, act in results:
            if req.life == life and req.raggedkv is not None:
                act()

    def release(self, req: Request, owned: int, checkpoint: bool) -> None:
        """End a request's stay, in the order of SGLang's ``release_kv_cache`` and our hook."""
        with self.residents.drops_deferred():
            if checkpoint and self.setup.cache:
                self._checkpoint(req, owned)
            self.tree._free(req.row[len(req.lock) :])
            self.tree.lock(req, [])
            self.allocator.finish(req)
        req.row, req.hit, req.computed = [], [], 0
        req.life += 1
        if req in self.running:
            self.running.remove(req)
        if req is self.chunked:
            self.chunked = None

    # -- internals -----------------------------------------------------------------------------

    def _too_big(self, length: int) -> bool:
        setup = self.setup
        peak = peak_pages(self.levels, length, 0, self.size)
        return peak > setup.capacity or -(-length // self.size) + 1 > setup.logical

    def _stash(self, req: Request, budget: int) -> int:
        if self.setup.cache:
            self._checkpoint(req, req.computed)
        return min(budget, len(req.tokens) - req.computed)

    def _checkpoint(self, req: Request, length: int) -> None:
        with self.residents.drops_deferred():
            before = list(req.row)
            self.tree.insert(req, length)
            self.events["dedup"] += before != req.row
            row = [req.row[t // self.size] * self.size for t in range(len(req.lock) * self.size)]
            self.allocator.follow_tree(req, torch.tensor(row, dtype=torch.int64))

    def _admit(self, adder: Adder, req: Request) -> bool:
        path = self.tree.match(req.tokens[:-1]) if self.setup.cache else []
        valid = 0
        if path:
            valid = longest_valid_hit(self.ledger, [n.page for n in path], self.size)
            self.allocator.note_hit(req, len(path), valid)
        self.tree.lock(req, path[:valid])
        req.hit, req.computed = [n.page for n in path[:valid]], valid * self.size
        if adder.shortage(req) > 0 or not self._fits_logically(req):
            self.tree.lock(req, [])
            req.hit, req.computed = [], 0
            self.events["wait"] += 1
            return False
        req.lost = [self._first_live(k, req) for k in range(len(self.levels))]
        adder._start(req)
        req.row, req.updated = list(req.hit), req.computed
        self.events["hit"] += valid > 0
        self.events["branch"] += valid < len(path)
        return True

    def _first_live(self, k: int, req: Request) -> int:
        """First window page that a hit brings along: its slack only as far as it is live."""
        level, length = self.levels[k], req.computed
        read = {t // self.size for t in range(length) if level.is_full or t > length - level.window}
        first = min(read, default=len(req.hit))
        while (
            first - 1 in window_pages(level, length, self.size)
            and self.ledger.live[k, req.hit[first - 1]]
        ):
            first -= 1
        return first

    def _fits_logically(self, req: Request) -> bool:
        alive = [req, *self.holders()]
        need = sum(-(-(r.prompt + r.max_new) // self.size) + 1 - len(r.row or r.hit) for r in alive)
        spare = sum(not n.locks for n in self.tree.nodes())
        return need <= len(self.allocator.free_pages) + spare

    def holders(self) -> list[Request]:
        """Requests that hold pages."""
        return [*self.running, *([self.chunked] if self.chunked else []), *self.starting]

    def _decode_fits(self) -> bool:
        crossing = sum(r.computed % self.size == 0 for r in self.running)
        return self.allocator.check_decode_capacity(
            num_tokens=crossing * self.size, tree_cache=self.tree, requests=self.running
        )

    def _retract(self) -> None:
        assert len(self.running) > 1, "the last request does not fit, though it was admitted"
        req = self.running[-1]
        self.release(req, req.computed, checkpoint=False)
        if len(req.output_ids) < req.max_new:  # else its last token was already sampled
            self.waiting.append(req)
        self.events["retract"] += 1

    def _sample(self, req: Request) -> None:
        req.tokens.append(req.letter)
        if len(req.output_ids) >= req.max_new:
            self._later(req, self._finish)

    def _finish(self, req: Request, owned: int) -> None:
        req.over = True
        self.events["done"] += 1
        self.release(req, owned, checkpoint=True)

    def _later(self, req: Request, act: Callable[[Request, int], None]) -> None:
        """Do ``act(request, tokens now stored)`` once this forward's results are known."""
        self._results.append((req, req.life, partial(act, req, req.computed)))

    # -- forwards ------------------------------------------------------------------------------

    def _grow(self, req: Request, count: int) -> list[int]:
        """Logical slots of the next ``count`` tokens."""
        missing = -(-(req.computed + count) // self.size) - len(req.row)
        req.row.extend(self.allocator.take(missing))
        span = range(req.computed, req.computed + count)
        return [req.row[t // self.size] * self.size + t % self.size for t in span]

    def _ids(self, req: Request) -> np.ndarray:
        return np.array(self.contents.identities(req))

    def _forward_extend(self, batch: list[tuple[Request, int]]) -> None:
        reqs, counts = zip(*batch, strict=True)
        slots = [s for req, count in batch for s in self._grow(req, count)]
        starts = [req.computed for req in reqs]
        plan = self.allocator.extend_batch(
            SimpleNamespace(
                reqs=reqs, prefix_lens=starts, extend_lens=counts, tree_cache=self.tree
            ),
            torch.tensor(slots, dtype=torch.int64),
        )
        if self.setup.hostile:
            self.ledger.evict(self.ledger.capacity)
        ids = [self._ids(req) for req in reqs]
        fresh = np.concatenate([x[s : s + n] for x, s, n in zip(ids, starts, counts, strict=True)])
        for unit, k, row in self.contents.units:
            for r, start in enumerate(starts):
                past = plan.history[r][k]
                wanted = visible_keys(self.levels[k], start, itself=False)
                pages, positions = past.pages[row].numpy(), past.positions.numpy()
                self.contents.check_read(unit, pages, positions, ids[r], wanted)
            self.contents.write(unit, row, plan.writes[k], fresh)
        for req, count in batch:
            req.computed += count
            req.updated = req.computed

    def _forward_decode(self, batch: list[Request]) -> None:
        crossing = [req for req in batch if req.computed % self.size == 0]
        slots = [self._grow(req, 1)[0] for req in batch]
        plan = self.allocator.decode_batch(
            SimpleNamespace(reqs=batch, tree_cache=self.tree),
            torch.tensor(slots, dtype=torch.int64),
        )
        assert plan.query_positions.tolist() == [req.computed for req in batch]
        ids = [self._ids(req) for req in batch]
        fresh = np.array([x[req.computed] for x, req in zip(ids, batch, strict=True)])
        for unit, k, row in self.contents.units:
            self.contents.write(unit, row, plan.writes[k], fresh)
            reads = plan.reads[k]
            for r, req in enumerate(batch):
                wanted = visible_keys(self.levels[k], req.computed, itself=True)
                pages, positions = reads.pages[row, r].numpy(), reads.positions[r].numpy()
                self.contents.check_read(unit, pages, positions, ids[r], wanted)
        for req in batch:
            req.computed += 1
        for req in crossing:
            req.updated = req.computed

    # -- what must hold between any two steps --------------------------------------------------

    def check(self) -> None:
        """Compare all ownership, and all bytes that anybody may still read, with brute force."""
        assert self.ledger.check_integrity() == []
        alive = self.holders()
        assert self.residents.running == {req.raggedkv for req in alive}
        holds = np.zeros_like(self.ledger.hold)
        for req in alive:
            assert req.raggedkv.pages == req.row
            for k in range(len(self.levels)):
                holds[k, [req.row[i] for i in self._must_hold(k, req)]] += 1
        assert np.array_equal(holds, self.ledger.hold), "holds differ from a recount"
        pinned = ((holds > 0).sum(axis=1) * self.ledger.units).sum()
        assert self.ledger.pinned == pinned, "pinned differs from a recount"
        assert not self.ledger.live[:, self.allocator.free_pages.numpy()].any()
        self._check_requests(alive)
        self._check_tree()

    def _must_hold(self, k: int, req: Request) -> list[int]:
        """Page indices the request holds, by the design's formula."""
        level, length = self.levels[k], req.updated
        pages = window_pages(level, length, self.size)
        assert len(pages) == held_pages(level, length, self.size)
        return [i for i in pages if i >= req.lost[k] or i * self.size < level.sinks]

    def _check_requests(self, alive: list[Request]) -> None:
        """The next query of every request finds every token it will read."""
        table = self.ledger.table.numpy()
        bounds = {k: self.ledger.rows(k).start for k in range(len(self.levels))}
        for req in alive:
            ids, pages = self._ids(req), np.array(req.row, dtype=np.int64)
            positions = np.arange(len(req.row) * self.size)
            for unit, k, row in self.contents.units:
                wanted = visible_keys(self.levels[k], req.computed, itself=False)
                mapped = table[bounds[k] + row, pages]
                self.contents.check_read(unit, mapped, positions, ids, wanted)

    def _check_tree(self) -> None:
        """A cached page that is live holds exactly the tokens of its path."""
        nodes = list(self.tree.nodes())
        if not nodes:
            return
        pages = np.array([n.page for n in nodes])
        assert len(np.unique(pages)) == len(pages), "one logical page twice in the tree"
        ids = np.array([n.ids for n in nodes])
        table = self.ledger.table.numpy()
        for unit, k, row in self.contents.units:
            live = self.ledger.live[k, pages]
            found = self.contents.slots[table[self.ledger.rows(k).start + row, pages[live]]]
            wrong = (found != self.contents.mark(ids[live], unit)).any(axis=1)
            assert not wrong.any(), f"unit {unit}: cached pages {pages[live][wrong]} are stale"

    def finish(self, batches: int | None) -> None:
        """End all requests, then empty the cache: nothing may be left.

        Args:
            batches: how many batches may still run before what is left is aborted; None: as many
                as it takes, so a request that never gets its turn is found.
        """
        for _ in range(5000 if batches is None else batches):
            if not self.step(37) and not self._results:
                break
            if not self.holders():
                self.process_results()
        self.process_results()
        assert batches is not None or not (self.waiting or self.holders()), "requests got stuck"
        while self.waiting or self.holders():
            self.abort(0, checkpoint=bool(len(self.running) % 2))
        self.check()
        assert self.ledger.pinned == 0
        self.tree.evict(SimpleNamespace(num_tokens=self.allocator.size))
        self.ledger.lift_fence()
        assert len(self.allocator.free_pages) == self.setup.logical
        assert self.ledger.free == self.ledger.capacity
        assert self.ledger.check_integrity() == []

"""A brute-force model of what an engine does around ``Residents``, for property tests.

``Engine`` stands for SGLang's scheduler: a queue, one chunked prefill at a time, decode batches,
retraction, a prefix tree that swaps a request's pages for its own, and, with ``overlap``, results
that are known only after the next forward started. ``Contents`` stands for the arena: it remembers,
slot by slot, which token of which unit was written last, so every read can be compared with the one
token it must see. Pages freed are poisoned at once.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np

from engine_patches.admission import RaggedPrefillAdder
from engine_patches.plan import ExtendPlan
from engine_patches.prefix import longest_valid_hit
from tests.engine_patches import model_freezing as freezing
from tests.engine_patches.model_checks import Checks
from tests.engine_patches.model_memory import (
    Allocator,
    Contents,
    Node,
    Request,
    Setup,
    Tree,
    slots_of,
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
        self.freezer = freezing.ModelFreezer(setup, self.contents) if setup.freezes else None
        served = freezing.serving_of(setup, self.freezer)
        self.allocator = Allocator(setup, self.tree, self.contents.poison, served)
        self.tree.allocator = self.allocator
        self.ledger, self.residents = self.allocator.ledger, self.allocator.residents
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.starting: list[Request] = []  # admitted to the batch being built
        self.said: list[list[int]] = [[0] * 40]
        self.events: Counter[str] = Counter()
        self._lose_forward = False
        self.check = Checks(self)
        self._results: list[tuple[Request, int, Callable[[], None]]] = []
        self._rids = itertools.count()

    # -- what a client does --------------------------------------------------------------------

    def ask(
        self,
        source: int,
        cut: int,
        tail: int,
        letter: int,
        max_new: int,
        custom: dict | None = None,
    ) -> None:
        """Queue a prompt: the start of an earlier conversation, then ``tail`` new tokens.

        ``custom`` may ask for another budget than the server's.
        """
        base = self.said[source % len(self.said)]
        tokens = [*base[:cut], *[letter] * tail] or [letter]
        while self._too_big(len(tokens), max_new, custom):
            if len(tokens) == max_new == 1:
                return
            tokens, max_new = tokens[: -(-len(tokens) // 2)], -(-max_new // 2)
        req = Request(next(self._rids), tokens, len(tokens), max_new, letter, custom=custom)
        req.keep = freezing.budget_of(self.setup, custom, req.prompt)
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

    def lose_forward(self, budget: int) -> None:
        """A prefill batch is allocated, but its forward never happens: all of it is given up."""
        self._lose_forward = True
        self.prefill(budget)
        self._lose_forward = False

    def prefill(self, budget: int) -> bool:
        """One prefill batch of up to ``budget`` tokens. Returns whether there was one."""
        batch: list[tuple[Request, int]] = []
        adder = Adder(self)
        if self.chunked:
            self._stash(self.chunked)
            batch.append((self.chunked, self._share(adder, self.chunked, budget)))
            budget -= batch[0][1]
        while self.waiting and budget > 0:
            cut = any(req.computed + count < len(req.tokens) for req, count in batch)
            count = self._admit(adder, self.waiting[0], budget, cut)
            if not count:
                break
            self.starting.append(self.waiting.pop(0))
            batch.append((self.starting[-1], count))
            budget -= count
        if not batch:
            return False
        results, self._results = self._results, []
        if self._lose_forward:
            self._give_up(batch, results)
            return True
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
        self.allocator.free_group_begin()
        for req, life, act in results:
            if req.life == life and req.raggedkv is not None:
                act()
        self.allocator.free_group_end()

    def release(self, req: Request, owned: int, checkpoint: bool) -> None:
        """End a request's stay, in the order of SGLang's ``release_kv_cache`` and our hook."""
        with self.allocator.ending(req):
            if checkpoint and self.setup.cache:
                self._checkpoint(req, owned)
            start = len(req.lock)
            slots = slots_of(req.row[start:], self.size)
            self.allocator.free_segments([(slots, start * self.size)])
            self.tree.lock(req, [])
        req.row, req.hit, req.computed, req.prefix_len = [], [], 0, 0
        req.kept, req.observed, req.losses, req.states = None, [], [], []
        req.life += 1
        if req in self.running:
            self.running.remove(req)
        if req is self.chunked:
            self.chunked = None

    # -- internals -----------------------------------------------------------------------------

    def _too_big(self, prompt: int, max_new: int, custom: dict | None) -> bool:
        setup, length = self.setup, prompt + max_new
        keep = freezing.budget_of(setup, custom, prompt)
        peak = freezing.most_pages(setup, prompt, length, keep)
        return peak > setup.capacity or -(-length // self.size) + 1 > setup.logical

    def _stash(self, req: Request) -> None:
        if self.setup.cache:
            self._checkpoint(req, req.computed)

    def _share(self, adder: Adder, req: Request, budget: int) -> int:
        """Tokens of the request's next chunk."""
        left = adder._left_of_prompt(req, req.computed)
        whole = len(req.tokens) - req.computed
        return min(budget, whole if left is None else left)

    def _give_up(self, batch: list[tuple[Request, int]], results: list) -> None:
        self._allocate_extend(batch)
        self.process(results)
        for req, _ in batch:
            assert req.raggedkv is not None
            self.release(req, req.computed, checkpoint=False)
            self.events["lost"] += req.kept is None and req.keep is not None
        self.chunked, self.starting = None, []

    def _checkpoint(self, req: Request, length: int) -> None:
        if req.keep is not None:
            length = min(length, req.prompt)  # as the patch of ``checkpoint_into_tree`` has it
        if self.setup.grid is not None:
            length = max((at for at in req.states if at <= length), default=0)
            req.states = []
            if length <= len(req.lock) * self.size:
                return
        with self.residents.drops_deferred():
            before = list(req.row)
            self.tree.insert(req, length)
            if self.setup.grid is not None:
                req.lock[-1].state = True
            self.events["dedup"] += before != req.row
            row = slots_of(req.row[: len(req.lock)], self.size)
            self.allocator.follow_tree(req, row)

    def _admit(self, adder: Adder, req: Request, budget: int, cut: bool) -> int:
        """Tokens of the request's first chunk; 0 if it cannot start now.

        ``cut`` says that the batch already holds a request whose prompt does not end in it.
        """
        path = self.tree.match(req.tokens[:-1]) if self.setup.cache else []
        count = len(path) * self.size
        slots = slots_of([n.page for n in path], self.size)
        pages = self.allocator.tree_pages(req, array("q", req.tokens[:count]), lambda: slots)
        assert pages == [n.page for n in path], "the host takes other pages for the path's"
        limit = self.allocator.hit_limit(req)
        path = path if limit is None else path[: limit // self.size]
        valid = self._valid(req, path)
        self.tree.lock(req, path[:valid])
        req.hit, req.computed = [n.page for n in path[:valid]], valid * self.size
        req.prefix_len = req.computed
        count = self._share(adder, req, budget)
        two_cut = cut and count < len(req.tokens) - req.computed
        if two_cut or adder.shortage(req) > 0 or not self._fits_logically(req):
            self.tree.lock(req, [])
            req.hit, req.computed, req.prefix_len = [], 0, 0
            self.events["wait"] += 1
            return 0
        req.lost = [self._first_live(k, req) for k in range(len(self.levels))]
        adder._start(req)
        req.row, req.updated = list(req.hit), req.computed
        self.events["hit"] += valid > 0
        self.events["branch"] += valid < len(path)
        return count

    def _valid(self, req: Request, path: list[Node]) -> int:
        """Pages of the path that a hit may use: windows are live, and a state was kept there."""
        whole = len(path)
        path = self._to_state(path)
        branch = None
        if self.setup.grid is not None:
            last = whole * self.size // self.setup.grid.prefill * self.setup.grid.prefill
            branch = last if last > len(path) * self.size else None
        found = SimpleNamespace(
            device_prefix_len=len(path) * self.size, mamba_branching_seqlen=branch
        )
        req.mamba_branching_seqlen = branch
        while path:
            valid = longest_valid_hit(self.ledger, [n.page for n in path], self.size)
            if valid == len(path):
                break
            path = self._to_state(path[:valid])
        self.allocator.note_hit(req, found, len(path) * self.size)
        self.events["state lost"] += 0 < len(path) * self.size < found.device_prefix_len
        return len(path)

    def _to_state(self, path: list[Node]) -> list[Node]:
        """The path up to the last page after which a state was kept, where states are needed."""
        if self.setup.grid is None:
            return path
        return path[: max((i + 1 for i, node in enumerate(path) if node.state), default=0)]

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

    def _grow(self, batch: list[tuple[Request, int]]) -> None:
        """Logical pages of each request's next tokens, of one allocation, dealt in order."""
        missing = [-(-(req.computed + n) // self.size) - len(req.row) for req, n in batch]
        pages = iter(self.allocator.take(sum(missing)))
        for (req, _), count in zip(batch, missing, strict=True):
            req.row.extend(islice(pages, count))

    def _ids(self, req: Request) -> np.ndarray:
        return np.array(self.contents.identities(req))

    def _allocate_extend(self, batch: list[tuple[Request, int]]) -> ExtendPlan:
        reqs, counts = zip(*batch, strict=True)
        self._grow(batch)
        starts = [req.computed for req in reqs]
        plan = self.allocator.extend_batch(
            SimpleNamespace(reqs=reqs, prefix_lens=starts, extend_lens=counts, tree_cache=self.tree)
        )
        if self.setup.hostile:
            self.ledger.evict(self.ledger.capacity)
        return plan

    def _forward_extend(self, batch: list[tuple[Request, int]]) -> None:
        plan = self._allocate_extend(batch)
        ids = [self._ids(req) for req, _ in batch]
        spans = [(req.computed, req.computed + count) for req, count in batch]
        fresh = np.concatenate([x[a:b] for x, (a, b) in zip(ids, spans, strict=True)])
        for unit, k, row in self.contents.units:
            for r, (req, _) in enumerate(batch):
                self._check_history(unit, k, row, req, plan.history[r][k])
            self.contents.write(unit, row, plan.writes[k], fresh)
        for (req, count), chunk in zip(batch, plan.observed, strict=True):
            freezing.check_observed(self.setup, req, chunk, req.computed, count)
        self.allocator.after_forward(plan)
        for req, count in batch:
            self._keep_state(req, req.computed, count)
            req.computed += count
            req.updated = req.computed
            if req.keep is not None and req.computed == req.prompt:
                self._note_freeze(req)

    def _keep_state(self, req: Request, start: int, count: int) -> None:
        """A chunk leaves one state: at a branch point that lies in it, else at its last step."""
        if self.setup.grid is None or count < self.setup.grid.prefill:
            return
        step, branch = self.setup.grid.prefill, req.mamba_branching_seqlen or 0
        reached = list(range(start + step, start + count + 1, step))
        inside = branch in reached and branch < start + count
        req.states = [branch if inside else reached[-1]]

    def _check_history(self, unit: int, k: int, row: int, req: Request, past) -> None:
        pages, positions = past.pages[row].numpy(), past.positions.numpy()
        if self.levels[k].is_full and req.kept is not None:
            assert past.frozen is req.raggedkv.freeze
            pages = np.append(past.frozen.pages.ids[row].numpy(), pages)
            positions = np.append(past.frozen.kept_positions[row].numpy(), positions)
            freezing.check_frozen_read(self.contents, unit, req, pages, positions, req.computed)
            return
        assert past.frozen is None
        wanted = visible_keys(self.levels[k], req.computed, itself=False)
        self.contents.check_read(unit, pages, positions, self._ids(req), wanted)

    def _note_freeze(self, req: Request) -> None:
        rows = self.freezer.kept.pop(req.raggedkv.freeze)
        (full,) = [level for level in self.levels if level.is_full]
        req.kept = dict(zip(full.units, rows, strict=True))
        self.events["frozen"] += 1
        self.events["frozen again"] += len(req.tokens) > req.prompt
        self.events["frozen on a hit"] += bool(req.hit)

    def _forward_decode(self, batch: list[Request]) -> None:
        crossing = [req for req in batch if req.computed % self.size == 0]
        self._grow([(req, 1) for req in batch])
        plan = self.allocator.decode_batch(SimpleNamespace(reqs=batch, tree_cache=self.tree))
        assert plan.query_positions.tolist() == [req.computed for req in batch]
        ids = [self._ids(req) for req in batch]
        fresh = np.array([x[req.computed] for x, req in zip(ids, batch, strict=True)])
        reads = [read.whole() for read in plan.reads]
        for unit, k, row in self.contents.units:
            self.contents.write(unit, row, plan.writes[k], fresh)
            pages, positions = reads[k]
            mine = positions if positions.dim() == 2 else positions[row]
            for r, req in enumerate(batch):
                read = pages[row, r].numpy(), mine[r].numpy()
                if self.levels[k].is_full and req.kept is not None:
                    end = req.computed + 1
                    freezing.check_frozen_read(self.contents, unit, req, *read, end)
                    continue
                wanted = visible_keys(self.levels[k], req.computed, itself=True)
                self.contents.check_read(unit, *read, ids[r], wanted)
        for req in batch:
            req.computed += 1
            if self.setup.grid is not None and req.computed % self.setup.grid.decode == 0:
                req.states = [*req.states, req.computed][-2:]
        for req in crossing:
            req.updated = req.computed

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

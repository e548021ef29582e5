"""What must hold in the brute-force model (``model.py``) between any two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpolicy.residency import held_pages
from tests.engine_patches import model_freezing as freezing
from tests.engine_patches.model_memory import Request, visible_keys, window_pages

if TYPE_CHECKING:
    from tests.engine_patches.model import Engine


class Checks:
    """Recounts an engine's owners, and compares every byte that anybody may still read."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.size, self.levels = engine, engine.size, engine.levels
        self.ledger, self.contents = engine.ledger, engine.contents

    def __call__(self) -> None:
        """Compare all ownership, and all bytes that anybody may still read, with brute force."""
        assert self.ledger.check_integrity() == []
        alive = self.engine.holders()
        assert self.engine.residents.running == {req.raggedkv for req in alive}
        holds = np.zeros_like(self.ledger.hold)
        for req in alive:
            assert req.raggedkv.pages == req.row
            for k in range(len(self.levels)):
                holds[k, [req.row[i] for i in self._must_hold(k, req)]] += 1
        assert np.array_equal(holds, self.ledger.hold), "holds differ from a recount"
        pinned = ((holds > 0).sum(axis=1) * self.ledger.units).sum()
        pinned += sum(freezing.compact_pages(self.engine.setup, req) for req in alive)
        assert self.ledger.pinned == pinned, "pinned differs from a recount"
        allocator = self.engine.allocator
        free = allocator.free_pages.numpy()
        assert not self.ledger.live[:, free].any()
        assert np.array_equal(allocator.host.free.pages, free), "the host's free list is another"
        self._check_requests(alive)
        self._check_tree()

    def _must_hold(self, k: int, req: Request) -> list[int]:
        """Page indices the request holds, by the design's formula."""
        level, length = self.levels[k], req.updated
        pages = window_pages(level, length, self.size)
        assert len(pages) == held_pages(level, length, self.size)
        if level.is_full and req.kept is not None:
            return [i for i in pages if i >= req.prompt // self.size]
        return [i for i in pages if i >= req.lost[k] or i * self.size < level.sinks]

    def _check_requests(self, alive: list[Request]) -> None:
        """The next query of every request finds every token it will read."""
        table = self.ledger.table.numpy()
        bounds = {k: self.ledger.rows(k).start for k in range(len(self.levels))}
        for req in alive:
            ids, pages = np.array(self.contents.identities(req)), np.array(req.row, dtype=np.int64)
            positions = np.arange(len(req.row) * self.size)
            for unit, k, row in self.contents.units:
                mapped = table[bounds[k] + row, pages]
                if self.levels[k].is_full and req.kept is not None:
                    tail = mapped[req.prompt // self.size :]
                    read = freezing.frozen_slots(req, row, tail, self.size)
                    freezing.check_frozen_read(self.contents, unit, req, *read, req.computed)
                    continue
                wanted = visible_keys(self.levels[k], req.computed, itself=False)
                self.contents.check_read(unit, mapped, positions, ids, wanted)

    def _check_tree(self) -> None:
        """A cached page that is live holds exactly the tokens of its path."""
        nodes = list(self.engine.tree.nodes())
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

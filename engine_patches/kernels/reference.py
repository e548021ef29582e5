"""The torch reference: right on any device, fast on none. Plans every step on the host."""

from __future__ import annotations

import torch

from engine_patches.kernels.base import Kernel
from engine_patches.plan import DecodePlan, ExtendPlan, LevelHistory, LevelWrite
from flashinfer_ext import reference


class ReferenceKernel(Kernel):
    """Reads and writes what the batch's plan says; a batch without a plan touches no page."""

    def begin(self, batch, plan) -> None:
        self._plan = plan
        self._reads = [read.whole() for read in plan.reads] if isinstance(plan, DecodePlan) else []

    def extend(self, layer, q, k, v, out, batch) -> None:
        plan = self._plan
        if plan is None:
            lengths = batch.extend_seq_lens_cpu
            self._attend_chunks(layer, q, k, v, out, [0] * len(lengths), list(lengths), None)
        else:
            self._attend_chunks(layer, q, k, v, out, plan.starts, plan.lengths, plan)
            self._store(layer, k, v, plan.writes)

    def decode(self, layer, q, k, v, out, batch) -> None:
        plan = self._plan
        if plan is None:  # a warm-up token sees only itself
            out[:] = v[:, :, None].to(out.dtype)
            return
        self._store(layer, k, v, plan.writes)
        for level, rows, heads in self.levels[layer.layer_id]:
            pages, positions = self._reads[level]
            out[:, heads] = reference.decode(
                q[:, heads],
                self.pool.keys,
                self.pool.values,
                pages[rows],
                positions if positions.dim() == 2 else positions[rows],
                plan.query_positions,
                self.window(level, layer),
                layer.scaling,
                layer.logit_cap,
            )

    # -- internals -----------------------------------------------------------------------------

    def _attend_chunks(self, layer, q, k, v, out, starts, lengths, plan: ExtendPlan | None) -> None:
        begin = 0
        for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = slice(begin, begin + length)
            begin += length
            for level, units, heads in self.levels[layer.layer_id]:
                fresh = (q[rows][:, heads], k[rows][:, heads], v[rows][:, heads])
                past = None if plan is None else plan.history[r][level]
                if past is not None and past.frozen is not None:
                    out[rows, heads] = self._attend_frozen(layer, level, units, fresh, past, start)
                    continue
                old = self.history(past, units)
                out[rows, heads] = self._attend(layer, level, fresh, old, start)
                self.observe(layer, level, units, fresh[0], fresh[1], old[0], start, plan, r)

    def _attend(self, layer, level: int, fresh, old, start: int) -> torch.Tensor:
        """[T, H, G, Dv] of a chunk ``fresh`` = (q, k, v) after ``old`` = (k, v, positions)."""
        q, k, v = fresh
        window = self.window(level, layer)
        return reference.extend(q, *old, k, v, start, window, layer.scaling, layer.logit_cap)

    def _attend_frozen(self, layer, level: int, units, fresh, past: LevelHistory, start: int):
        """As ``_attend`` where each unit has kept other tokens (a frozen request resumed)."""
        out = []
        for h in range(len(units)):
            unit = units[h : h + 1]
            k, v, positions = self.history(past, unit)
            pages = past.frozen.pages.ids[unit].long()
            kept = past.frozen.kept_positions[unit[0]]
            old = (
                torch.cat([self.pool.keys[pages].flatten(1, 2), k], dim=1),
                torch.cat([self.pool.values[pages].flatten(1, 2), v], dim=1),
                torch.cat([kept, positions]),
            )
            mine = tuple(x[:, h : h + 1] for x in fresh)
            out.append(self._attend(layer, level, mine, old, start))
        return torch.cat(out, dim=1)

    def _store(self, layer, k, v, writes: list[LevelWrite]) -> None:
        keys, values = self.pool.keys, self.pool.values
        for level, rows, heads in self.levels[layer.layer_id]:
            write = writes[level]
            pages = write.pages[rows].long()
            fresh = write.tokens[:, None], heads
            keys[pages, write.slots] = k[fresh].transpose(0, 1).to(keys.dtype)
            values[pages, write.slots] = v[fresh].transpose(0, 1).to(values.dtype)

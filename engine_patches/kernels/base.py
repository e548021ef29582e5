"""What every kernel shares: the served pool, its levels, and watching prompts before a freeze."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from engine_patches import serving
from engine_patches.plan import DecodePlan, ExtendPlan, LevelHistory
from engine_patches.pool import RaggedKVPool
from flashinfer_ext.contract import HeadWindow

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Kernel(ABC):
    """Attention of one server over its pool.

    Attributes: ``levels`` layer id -> [(level, units within the level, kv heads)], the last two
    int64 tensors on the device.
    """

    def __init__(self, served: serving.Serving, pool: RaggedKVPool) -> None:
        self.served, self.pool = served, pool
        device = pool.arena.device
        self.levels = {
            layer: [
                (k, torch.tensor(rows, device=device), torch.tensor(heads, device=device))
                for k, rows, heads in members
            ]
            for layer, members in pool.heads_of_level.items()
        }

    @abstractmethod
    def begin(self, batch: ForwardBatch, plan: ExtendPlan | DecodePlan | None) -> None:
        """Take a batch; ``plan`` is None for warm-ups and where a graph is captured."""

    @abstractmethod
    def extend(self, layer: RadixAttention, q, k, v, out, batch: ForwardBatch) -> None:
        """Attend a prefill batch: q [T, H, G, D], k [T, H, D], v [T, H, Dv] into out
        [T, H, G, Dv]; then store what stays resident."""

    @abstractmethod
    def decode(self, layer: RadixAttention, q, k, v, out, batch: ForwardBatch) -> None:
        """Store one new token per request, then attend: shapes as ``extend``."""

    # -- shared pieces -------------------------------------------------------------------------

    def window(self, level: int, layer: RadixAttention) -> HeadWindow:
        """What a query reads: the policy's window within the layer's own sliding window."""
        policy = self.pool.ledger.levels[level]
        native = layer.sliding_window_size
        if native is None or native < 0:
            return HeadWindow(policy.window, policy.sinks)
        return HeadWindow(min(policy.window, native + 1), policy.sinks)

    def history(self, past: LevelHistory | None, units: torch.Tensor):
        """(keys [H, S, D], values [H, S, Dv], positions [S]) that a chunk reads from pages."""
        keys, values = self.pool.keys, self.pool.values
        if past is None:
            none = torch.empty(0, dtype=torch.int64, device=keys.device)
            return (
                keys[none].new_empty(len(units), 0, keys.shape[-1]),
                values[none].new_empty(len(units), 0, values.shape[-1]),
                none,
            )
        pages = past.pages[units].long()
        return keys[pages].flatten(1, 2), values[pages].flatten(1, 2), past.positions

    def observe(self, layer, level: int, units, q, k, old_keys, start, plan, request) -> None:
        """Add what the chunk's last queries attend to, where the request will be frozen.

        Args:
            q: [T, H, G, D] and k [T, H, D] of the request's chunk and the level's heads.
            old_keys: [H, S, D] as ``history`` gives them.
        """
        chunk = plan.observed[request] if plan is not None else None
        if chunk is None or not self.pool.ledger.levels[level].is_full or chunk.begin >= len(q):
            return
        self.served.freezer.observe(
            chunk.freeze, units, q, old_keys, k, start, chunk.begin, layer.scaling,
            layer.logit_cap,
        )  # fmt: skip

"""Attention backend ``raggedkv``: torch reference over the arena, on the CPU or any GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from engine_patches import serving
from engine_patches.backend_name import BACKEND
from engine_patches.errors import Refusal, exit_refused
from engine_patches.plan import DecodePlan, ExtendPlan, LevelHistory, LevelWrite
from engine_patches.pool import RaggedKVPool
from flashinfer_ext import reference
from flashinfer_ext.contract import HeadWindow

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class RaggedAttentionBackend(AttentionBackend):
    """Reads and writes what the batch's plan says; a batch without a plan touches no page.

    Raises:
        RuntimeError: the runner's pool is not a ``RaggedKVPool``.

    Side effect: refuses to start if the model's layers attend otherwise than their config says.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, RaggedKVPool):
            raise RuntimeError(
                f"--attention-backend {BACKEND} needs --kv-policy (pool: {type(pool)})"
            )
        self.served = serving.require()
        self.pool = pool
        _check_native_windows(model_runner.model, self.served)
        self.forward_metadata: ExtendPlan | DecodePlan | None = None
        device = pool.arena.device
        self._freezer = self.served.freezer
        self._levels = {
            layer: [
                (k, torch.tensor(rows, device=device), torch.tensor(heads, device=device))
                for k, rows, heads in members
            ]
            for layer, members in pool.heads_of_level.items()
        }

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Take the plan that allocation made for this batch; warm-up batches have none."""
        self.forward_metadata = plan = self.served.plan
        self._reads = [read.whole() for read in plan.reads] if isinstance(plan, DecodePlan) else []

    # -- SGLang's entry points -----------------------------------------------------------------

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attention of a prefill batch: q [T, Hq * D], k [T, H * D], v [T, H * Dv] -> [T, Hq * Dv].

        Side effect: stores the tokens that stay resident, after every row of the layer has read.
        """
        _check_layer(layer, k, save_kv_cache, kwargs)
        q, k, v = _by_head(layer, q, k, v)
        plan = self.forward_metadata
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        if plan is None:
            lengths = forward_batch.extend_seq_lens_cpu
            self._attend_chunks(layer, q, k, v, out, [0] * len(lengths), list(lengths), None)
        else:
            self._attend_chunks(layer, q, k, v, out, plan.starts, plan.lengths, plan)
            self._store(layer, k, v, plan.writes)
        return out.flatten(1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attention of a decode batch: as ``forward_extend`` with one token per request.

        Side effect: stores the new tokens first, then reads.
        """
        _check_layer(layer, k, save_kv_cache, kwargs)
        q, k, v = _by_head(layer, q, k, v)
        plan = self.forward_metadata
        if plan is None:  # a warm-up token sees only itself
            return v.repeat_interleave(q.shape[2], dim=1).flatten(1).to(q.dtype)
        self._store(layer, k, v, plan.writes)
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        for level, rows, heads in self._levels[layer.layer_id]:
            pages, positions = self._reads[level]
            out[:, heads] = reference.decode(
                q[:, heads],
                self.pool.keys,
                self.pool.values,
                pages[rows],
                positions if positions.dim() == 2 else positions[rows],
                plan.query_positions,
                self._window(level, layer),
                layer.scaling,
                layer.logit_cap,
            )
        return out.flatten(1)

    # -- internals -----------------------------------------------------------------------------

    def _window(self, level: int, layer: RadixAttention) -> HeadWindow:
        """What a query reads: the policy's window within the layer's own sliding window."""
        policy = self.pool.ledger.levels[level]
        native = layer.sliding_window_size
        if native is None or native < 0:
            return HeadWindow(policy.window, policy.sinks)
        return HeadWindow(min(policy.window, native + 1), policy.sinks)

    def _attend_chunks(self, layer, q, k, v, out, starts, lengths, plan: ExtendPlan | None) -> None:
        begin = 0
        for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = slice(begin, begin + length)
            begin += length
            for level, units, heads in self._levels[layer.layer_id]:
                fresh = (q[rows][:, heads], k[rows][:, heads], v[rows][:, heads])
                past = None if plan is None else plan.history[r][level]
                if past is not None and past.frozen is not None:
                    out[rows, heads] = self._attend_frozen(layer, level, units, fresh, past, start)
                    continue
                old = self._history(past, units)
                out[rows, heads] = self._attend(layer, level, fresh, old, start)
                self._observe(layer, level, units, fresh, old, start, plan, r)

    def _attend(self, layer, level: int, fresh, old, start: int) -> torch.Tensor:
        """[T, H, G, Dv] of a chunk ``fresh`` = (q, k, v) after ``old`` = (k, v, positions)."""
        q, k, v = fresh
        window = self._window(level, layer)
        return reference.extend(q, *old, k, v, start, window, layer.scaling, layer.logit_cap)

    def _attend_frozen(self, layer, level: int, units, fresh, past: LevelHistory, start: int):
        """As ``_attend`` where each unit has kept other tokens (a frozen request resumed)."""
        out = []
        for h in range(len(units)):
            unit = units[h : h + 1]
            k, v, positions = self._history(past, unit)
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

    def _observe(self, layer, level, units, fresh, old, start, plan, request) -> None:
        """Add what the chunk's last queries attend to, where the request will be frozen."""
        chunk = plan.observed[request] if plan is not None else None
        if chunk is None or not self.pool.ledger.levels[level].is_full:
            return
        q, k, _ = fresh
        if chunk.begin < len(q):
            self._freezer.observe(
                chunk.freeze, units, q, old[0], k, start, chunk.begin, layer.scaling,
                layer.logit_cap,
            )  # fmt: skip

    def _history(self, past: LevelHistory | None, units: torch.Tensor):
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

    def _store(self, layer: RadixAttention, k, v, writes: list[LevelWrite]) -> None:
        keys, values = self.pool.keys, self.pool.values
        for level, rows, heads in self._levels[layer.layer_id]:
            write = writes[level]
            pages = write.pages[rows].long()
            fresh = write.tokens[:, None], heads
            keys[pages, write.slots] = k[fresh].transpose(0, 1).to(keys.dtype)
            values[pages, write.slots] = v[fresh].transpose(0, 1).to(values.dtype)


def _by_head(layer: RadixAttention, q, k, v):
    """q [T, H, G, D], k [T, H, D], v [T, H, Dv]."""
    heads = layer.tp_k_head_num
    q = q.reshape(-1, heads, layer.tp_q_head_num // heads, layer.qk_head_dim)
    return q, k.reshape(-1, heads, layer.qk_head_dim), v.reshape(-1, heads, layer.v_head_dim)


def _check_layer(layer: RadixAttention, k, save_kv_cache: bool, extras: dict) -> None:
    if k is None or not save_kv_cache:
        raise RuntimeError(f"layer {layer.layer_id} reuses another layer's KV: not supported")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise RuntimeError(f"layer {layer.layer_id} is no causal decoder attention: not supported")
    wanted = [name for name, value in extras.items() if value is not None]
    if wanted:
        raise RuntimeError(f"layer {layer.layer_id} passes {wanted} to attention: not supported")


def _check_native_windows(model: torch.nn.Module, served: serving.Serving) -> None:
    """Refuse a model whose layers slide otherwise in SGLang than their config says.

    Side effect: ends the process if a layer's sliding window is not the policy's native one: its
    cache would be cut where SGLang attends, or kept where it does not.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    native = {layer.layer_id: layer.native_window for layer in served.geometry.attention_layers}
    for module in model.modules():
        if not isinstance(module, RadixAttention):
            continue
        size = module.sliding_window_size
        window = size + 1 if size is not None and size >= 0 else 0
        if window != native.get(module.layer_id):
            exit_refused(
                Refusal(
                    f"layer {module.layer_id} attends to {window or 'all'} tokens in SGLang, its "
                    f"config.json says {native.get(module.layer_id) or 'all'}; not supported"
                )
            )

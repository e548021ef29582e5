"""The KV pool SGLang builds: one arena of per-head pages instead of a buffer per layer."""

from __future__ import annotations

import os

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, MHATokenToKVPool

from engine_patches import serving
from engine_patches.errors import Refusal, exit_refused
from engine_patches.ledger import PageLedger
from flashinfer_ext.contract import ArenaLayout


class RaggedKVPool(MHATokenToKVPool):
    """Physical storage of every (attention layer, kv head), drawn from one arena.

    SGLang's ``size`` is the number of *logical* tokens; bytes come from the serving request.
    Attributes: ``arena`` [NP, P * (D + Dv)]; ``keys``, ``values`` views [NP, P, D], [NP, P, Dv];
    ``ledger`` who owns which page.
    """

    def _create_buffers(self) -> None:
        try:
            self._build(serving.require())
        except Refusal as error:
            exit_refused(error)

    def _build(self, served: serving.Serving) -> None:
        self._check_matches(served)
        self.layout = ArenaLayout(
            num_pages=self._num_pages(served),
            page_size=self.page_size,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )
        with self.memory_saver_adapter.region("kv_cache"):
            self.arena = self.layout.allocate(self.store_dtype, self.device)
        self.keys, self.values = self.layout.keys(self.arena), self.layout.values(self.arena)
        self.poison = os.environ.get(serving.POISON_VARIABLE) == "1"
        self.ledger = PageLedger(
            served.levels,
            self.layout.num_pages,
            self.size // self.page_size + 1,
            self.device,
            on_free=self._poison if self.poison else None,
        )
        self.heads_of_level = _heads_of_level(served)
        served.pool = self

    def _check_matches(self, served: serving.Serving) -> None:
        layers = served.geometry.attention_layers
        heads, dims = {x.num_kv_heads for x in layers}, {(x.head_dim, x.v_head_dim) for x in layers}
        expected = ({self.head_num}, {(self.head_dim, self.v_head_dim)})
        if (heads, dims) != expected or self.layer_num != len(layers):
            raise Refusal(
                f"SGLang built {self.layer_num} layers of {self.head_num} kv heads x "
                f"{self.head_dim}/{self.v_head_dim}, the model's config says {len(layers)} of "
                f"{sorted(heads)} x {sorted(dims)}; such models are not supported yet"
            )

    def _num_pages(self, served: serving.Serving) -> int:
        page = self.page_size * (self.head_dim + self.v_head_dim) * self.store_dtype.itemsize
        return (served.arena_bytes or 0) // page

    def _poison(self, ids: torch.Tensor) -> None:
        self.arena[ids] = float("nan")

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(bytes of keys, bytes of values) of the whole arena."""
        return (
            self.keys.numel() * self.arena.element_size(),
            self.values.numel() * self.arena.element_size(),
        )

    # A caller that would go around the attention backend must fail, not read or write the wrong
    # place (fused rope + KV writers, KV transfer, cache copies).

    def _refuse(self, *_args, **_kwargs):
        raise RuntimeError(
            "RaggedKV keeps no per-layer KV buffer: this code path bypasses its attention backend"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _refuse
    get_contiguous_buf_infos = get_cpu_copy = load_cpu_copy = move_kv_cache = _refuse


def leaf_pool(pool: KVCache) -> KVCache:
    """The pool that holds keys and values: of a model with recurrent layers, the one inside."""
    return pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool


def _heads_of_level(served: serving.Serving) -> dict[int, list[tuple[int, list[int], list[int]]]]:
    """layer id -> [(level, rows within the level, kv heads)] for the levels of that layer."""
    layers: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for level in served.levels:
        members: dict[int, tuple[list[int], list[int]]] = {}
        for row, unit in enumerate(level.units):
            layer, head = served.geometry.head_of(unit)
            rows, heads = members.setdefault(layer, ([], []))
            rows.append(row)
            heads.append(head)
        for layer, (rows, heads) in members.items():
            layers.setdefault(layer, []).append((level.index, rows, heads))
    return layers

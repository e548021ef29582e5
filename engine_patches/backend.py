"""Attention backend ``raggedkv``: SGLang's entry points over the kernel that was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType

from engine_patches import serving
from engine_patches.backend_name import BACKEND
from engine_patches.errors import Refusal, exit_refused
from engine_patches.kernels.base import Kernel
from engine_patches.kernels.choice import REFERENCE, TRITON, check_model, reads_table
from engine_patches.pool import RaggedKVPool, leaf_pool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


class RaggedAttentionBackend(AttentionBackend):
    """Reads and writes what the batch's plan says; a batch without a plan touches no page of
    anybody's.

    Raises:
        RuntimeError: the runner's pool is not a ``RaggedKVPool``.

    Side effect: refuses to start if the model's layers attend otherwise than their config says.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.token_to_kv_pool = model_runner.token_to_kv_pool  # read by the backend of a hybrid
        self.req_to_token_pool = model_runner.req_to_token_pool
        pool = leaf_pool(self.token_to_kv_pool)
        if not isinstance(pool, RaggedKVPool):
            raise RuntimeError(
                f"--attention-backend {BACKEND} needs --kv-policy (pool: {type(pool)})"
            )
        self.served = serving.require()
        self.pool = pool
        group = _check_attention(model_runner.model, self.served)
        self.kernel = _kernel(self.served, pool, model_runner, group)

    def support_triton(self) -> bool:
        return False

    # -- SGLang's entry points -----------------------------------------------------------------

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Take the plan that allocation made for this batch; warm-ups and captures have none."""
        self.kernel.begin(forward_batch, self.served.plan)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for decode batches that are padded to ``max_bs`` requests."""
        if max_bs > self.kernel.rows:
            self.kernel.resize(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """A padded request has one token, in the write sink: the padding row names logical page 0,
        which no unit maps."""
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Decode reads the page table all through the replay; all else waits for the forward."""
        if fm.is_decode() and reads_table(self.served.kernel):
            return SharedReadEnds.POST_REPLAY
        return SharedReadEnds.UNKNOWN

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attention of a prefill batch: q [T, Hq * D], k [T, H * D], v [T, H * Dv] -> [T, Hq * Dv].

        Side effect: stores the tokens that stay resident, after every row of the layer has read.
        """
        _check_layer(layer, k, save_kv_cache, kwargs)
        q, k, v = _by_head(layer, q, k, v)
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        self.kernel.extend(layer, q, k, v, out, forward_batch)
        return out.flatten(1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attention of a decode batch: as ``forward_extend`` with one token per request.

        Side effect: stores the new tokens first, then reads.
        """
        _check_layer(layer, k, save_kv_cache, kwargs)
        q, k, v = _by_head(layer, q, k, v)
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        self.kernel.decode(layer, q, k, v, out, forward_batch)
        return out.flatten(1)


def _kernel(served: serving.Serving, pool: RaggedKVPool, runner: ModelRunner, group: int) -> Kernel:
    """The kernel that was asked for. Kernels are imported only where they run.

    Side effect: ends the process if it does not cover this model.
    """
    if served.kernel == REFERENCE:
        from engine_patches.kernels.reference import ReferenceKernel

        return ReferenceKernel(served, pool)
    try:
        check_model(served.kernel, group, str(runner.dtype), str(pool.arena.dtype))
    except Refusal as refusal:
        exit_refused(refusal)
    native = {x.layer_id: x.native_window for x in served.geometry.attention_layers}
    args = (served, pool, runner.req_to_token_pool, native, group)
    if served.kernel == TRITON:
        from engine_patches.kernels.triton import TritonKernel

        return TritonKernel(*args)
    from engine_patches.kernels.flashinfer import flashinfer_or_triton

    return flashinfer_or_triton(*args)


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


def _check_attention(model: torch.nn.Module, served: serving.Serving) -> int:
    """Refuse a model whose layers slide otherwise in SGLang than their config says.

    Returns:
        query heads of a kv head.

    Side effect: ends the process if a layer's sliding window is not the policy's native one (its
    cache would be cut where SGLang attends, or kept where it does not), or if layers group their
    query heads differently.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    native = {layer.layer_id: layer.native_window for layer in served.geometry.attention_layers}
    groups = set()
    for module in model.modules():
        if not isinstance(module, RadixAttention):
            continue
        groups.add(module.tp_q_head_num // module.tp_k_head_num)
        size = module.sliding_window_size
        window = size + 1 if size is not None and size >= 0 else 0
        if window != native.get(module.layer_id):
            exit_refused(
                Refusal(
                    f"layer {module.layer_id} attends to {window or 'all'} tokens in SGLang, its "
                    f"config.json says {native.get(module.layer_id) or 'all'}; not supported"
                )
            )
    if len(groups) != 1:
        exit_refused(
            Refusal(f"layers share kv heads among {sorted(groups)} query heads: not supported")
        )
    return groups.pop()

"""FlashInfer's templates with our variants, planned on the host at every step: no CUDA graphs."""

from __future__ import annotations

import logging

from engine_patches import serving
from engine_patches.kernels.choice import TRITON
from engine_patches.kernels.triton import TritonKernel
from engine_patches.pool import RaggedKVPool
from flashinfer_ext.flashinfer_decode import FlashInferDecode
from flashinfer_ext.flashinfer_extend import FlashInferExtend
from flashinfer_ext.flashinfer_store import VariantError

logger = logging.getLogger(__name__)


class FlashInferKernel(TritonKernel):
    """As ``TritonKernel``, but attention runs in FlashInfer's templates.

    Raises:
        VariantError: they do not cover this model, or their modules cannot be had.

    Side effects: as ``TritonKernel``; loads two modules, building them first where they are
    missing; runs each once.
    """

    def _build(self, rows: int) -> None:
        device, dtype = self.pool.arena.device, self.pool.arena.dtype
        args = self.pool.layout, self.heads, self._group
        self._decode = FlashInferDecode(*args, rows, device, dtype)
        self._extend = FlashInferExtend(*args, device, dtype)
        self._decode.warm_up()
        self._extend.warm_up()

    def _plan_decode(self) -> None:
        self._decode.plan(self._batch, self.table, self._frozen)

    def _plan_extend(self) -> None:
        self._extend.plan(self._chunks)

    def _attend_chunks(self, row: int, q, k, v, out, layer) -> None:
        self._extend.run(
            q, k, v, self.pool.arena, row, self._chunks, out, layer.scaling, layer.logit_cap
        )


def flashinfer_or_triton(served: serving.Serving, pool: RaggedKVPool, *args) -> TritonKernel:
    """FlashInfer's kernel, or Triton's where it cannot be had.

    Side effect: then ``served.kernel`` says so, and one warning says why.
    """
    try:
        return FlashInferKernel(served, pool, *args)
    except VariantError as error:
        logger.warning("RaggedKV serves with --kv-kernel triton instead of flashinfer: %s", error)
        served.kernel = TRITON
        return TritonKernel(served, pool, *args)

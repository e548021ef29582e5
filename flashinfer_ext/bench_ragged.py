"""The kernels of this package on a batch to measure: decode and extend, Triton and FlashInfer's."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_ext import decode_reference, extend_reference, triton_extend
from flashinfer_ext.bench_checks import Prepared, worst_error
from flashinfer_ext.bench_data import DecodeData, ExtendData
from flashinfer_ext.contract import DecodeBatch, ExtendBatch
from flashinfer_ext.triton_decode import TritonDecode


def check_decode(data: DecodeData, rows: list[int], layer: int = 0) -> float:
    """Worst error of ``data.out`` against the reference on those requests."""
    batch = DecodeBatch(data.batch.requests[rows], data.batch.lengths[rows])
    want, _ = decode_reference.decode(
        data.q[rows].float(), data.arena, data.layout, data.table, data.heads, layer, batch,
        data.scale,
    )  # fmt: skip
    return worst_error(data.out[rows], want)


def _read_bytes(data: DecodeData) -> int:
    return data.kv_bytes() + data.page_bytes(data.layout.page_size) + data.query_bytes()


def triton_decode(data: DecodeData) -> Prepared:
    """Both stages of one layer over the work list; filling it is measured apart."""
    decode = TritonDecode(
        data.layout, data.heads, data.case.group, data.case.requests, data.q.device
    )
    decode.plan(data.batch)
    parts = decode.work.row_parts[0]
    split = int(parts[parts > 1].sum())
    partial = 2 * split * data.case.group * (data.layout.v_head_dim + 1) * 4

    def run() -> None:
        decode.run(data.q, data.arena, data.table, 0, data.batch, data.out, data.scale)

    return Prepared(run, lambda rows: check_decode(data, rows), _read_bytes(data) + partial,
                    plan=lambda: decode.plan(data.batch))  # fmt: skip


def flashinfer_decode(data: DecodeData, module) -> Prepared:
    """FlashInfer's decode over rows of one kv head: its template, our row windows."""
    from flashinfer_ext.flashinfer_decode import FlashInferDecode
    from flashinfer_ext.flashinfer_rows import on_host

    decode = FlashInferDecode(
        data.layout, data.heads, data.case.group, data.case.requests, data.q.device, data.q.dtype,
        module=module,
    )  # fmt: skip
    host = on_host(data.batch)

    def plan() -> None:
        decode.plan(data.batch, data.table, host_batch=host)

    def run() -> None:
        decode.run(data.q, data.arena, data.table, 0, data.batch, data.out, data.scale)

    plan()
    return Prepared(run, lambda rows: check_decode(data, rows), _read_bytes(data), plan=plan)


def _one_request(batch: ExtendBatch, request: int, rows: slice) -> ExtendBatch:
    cell = slice(request, request + 1)
    return replace(
        batch, offsets=batch.offsets[:2], begins=batch.begins[cell],
        page_starts=batch.page_starts[:, cell], position_starts=batch.position_starts[:, cell],
        counts=batch.counts[:, cell], longest=rows.stop - rows.start,
    )  # fmt: skip


def check_extend(data: ExtendData, requests: list[int]) -> float:
    """Worst error of ``data.out`` against the reference on those requests."""
    chunk, errors = data.case.lengths[1], []
    for request in requests:
        rows = slice(request * chunk, (request + 1) * chunk)
        want, _ = extend_reference.extend(
            data.q[rows].float(), data.k[rows], data.v[rows], data.arena, data.layout, data.heads,
            0, _one_request(data.batch, request, rows), data.scale,
        )  # fmt: skip
        errors.append(worst_error(data.out[rows], want))
    return max(errors)


def triton_prefill(data: ExtendData) -> Prepared:
    """One layer's chunks."""

    def run() -> None:
        triton_extend.extend(
            data.q, data.k, data.v, data.arena, data.layout, data.heads, 0, data.batch, data.out,
            data.scale,
        )  # fmt: skip

    return Prepared(run, lambda rows: check_extend(data, rows), flops=data.flops())


def flashinfer_prefill(data: ExtendData, module) -> Prepared:
    """FlashInfer's prefill over rows of one kv head, in up to three runs and their merge."""
    from flashinfer_ext.flashinfer_extend import FlashInferExtend
    from flashinfer_ext.flashinfer_rows import on_host

    prefill = FlashInferExtend(
        data.layout, data.heads, data.case.group, data.q.device, data.q.dtype, module
    )
    host = on_host(data.batch)

    def plan() -> None:
        prefill.plan(data.batch, host)

    def run() -> None:
        prefill.run(data.q, data.k, data.v, data.arena, 0, data.batch, data.out, data.scale)

    plan()
    return Prepared(run, lambda rows: check_extend(data, rows), flops=data.flops(), plan=plan)


class Replay:
    """A decode step of all layers, planned and run in one captured graph.

    Lengths change in place, and only the graph is replayed. Without a GPU the step is called
    instead.
    """

    def __init__(self, data: DecodeData) -> None:
        self.data = data
        self.decode = TritonDecode(
            data.layout, data.heads, data.case.group, data.case.requests, data.q.device
        )
        self.layers = data.heads.shape[0]
        self.outs = [torch.full_like(data.out, float("nan")) for _ in range(self.layers)]

    def step(self) -> None:
        """One step, eagerly."""
        data = self.data
        self.decode.plan(data.batch)
        for layer, out in enumerate(self.outs):
            self.decode.run(data.q, data.arena, data.table, layer, data.batch, out, data.scale)

    def capture(self):
        """What replays the step; the step itself without a GPU."""
        self.step()
        if self.data.q.device.type != "cuda":
            return self.step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def lengths(self) -> list[torch.Tensor]:
        """Batches of other lengths: as built, half, all padded but one, unequal."""
        full = self.data.lengths
        one = torch.zeros_like(full)
        one[-1] = full[-1]
        mixed = (full * torch.linspace(0, 1, len(full))).long()
        return [full, full // 2 + 1, one, mixed, (full - 1).clamp(min=1)]

    def differing(self, replay) -> str:
        """What a replay does otherwise than an eager step or the reference; "" if nothing."""
        for number, lengths in enumerate(self.lengths()):
            self.data.batch.lengths.copy_(lengths)
            for out in self.outs:
                out.fill_(float("nan"))
            replay()
            replayed = [out.clone() for out in self.outs]
            self.step()
            if not all(map(torch.equal, replayed, self.outs)):
                return f"lengths {number}: the replay and an eager step differ"
            self.data.out.copy_(replayed[-1])
            rows = sorted({0, len(lengths) - 1, int(lengths.argmax())})
            error = check_decode(self.data, rows, self.layers - 1)
            if error > 0.02:
                return f"lengths {number}: error {error:.3g} against the reference"
        return ""

"""Runs cases one after another, each contender checked before it is timed, and tells of each.

A process of its own (``python -m flashinfer_ext.bench_worker``), so that a kernel which hangs or
breaks the CUDA context costs its own case only: ``gpu_check`` starts another for what is left. It
prints JSON, a line per event: ``{"begin": case}``, ``{"trying": contender}``, then its results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flashinfer_ext import bench_dense, bench_ragged, bench_sglang
from flashinfer_ext.bench_cases import BenchCase, full_cases, small_cases
from flashinfer_ext.bench_checks import WORST, Prepared, Unavailable, some_rows
from flashinfer_ext.bench_data import DecodeData, ExtendData, Storage, decode_data, extend_data
from flashinfer_ext.bench_timing import Timer, copy_bandwidth

COPY_BYTES = 4 << 30
LAYERS = 32
"""Of a work list; a model of middling size."""


@dataclass
class Bench:
    """What cases share: a device, its memory, a timer, and FlashInfer's modules once loaded.
    ``skipped``: ``kind/contender`` names that are not tried."""

    device: torch.device
    dry: bool = False
    skipped: frozenset[str] = frozenset()
    modules: dict[tuple[str, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # fp16: Triton's interpreter does not multiply bfloat16 values
        self.dtype = torch.float16 if self.dry else torch.bfloat16
        self.timer = Timer(self.device)
        self.storage = Storage(self.dtype, self.device)

    def module(self, kind: str, head_dim: int):
        """A FlashInfer module, loaded once; a stand-in in a dry run.

        Raises:
            Unavailable: why there is none.
        """
        key = (kind, head_dim)
        if key not in self.modules:
            try:
                self.modules[key] = self._load(kind, head_dim)
            except Unavailable as error:
                self.modules[key] = str(error)  # not the error: its traceback holds a case's memory
        if isinstance(self.modules[key], str):
            raise Unavailable(self.modules[key])
        return self.modules[key]

    def _load(self, kind: str, head_dim: int):
        try:
            from flashinfer_ext.flashinfer_build import load_module
            from flashinfer_ext.flashinfer_source import ModuleSpec
            from flashinfer_ext.flashinfer_store import VariantError
        except ImportError as error:
            raise Unavailable(f"FlashInfer variants need {error.name}") from error
        if self.dry:
            from flashinfer_ext import bench_standin

            return bench_standin.DenseDecode() if kind == "decode" else bench_standin.DensePrefill()
        try:
            return load_module(ModuleSpec(kind, head_dim, "bf16"), self.device, build=False)
        except VariantError as error:
            raise Unavailable(str(error)) from error

    def synchronize(self) -> None:
        """Wait for the device; an error of an earlier launch is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Result = dict[str, Any]
Builder = Callable[[], Prepared]


def run_case(bench: Bench, case: BenchCase) -> Iterator[Result]:
    """The results of a case, contender by contender; a failing one is told of and the next tried.

    Raises:
        RuntimeError: the device's state is lost.
    """
    runner = {
        "copy": _copy, "decode": _decode, "extend": _extend, "worklist": _work_list,
        "replay": _replay,
    }[case.kind]  # fmt: skip
    for result in runner(bench, case):
        yield result if "trying" in result else {"case": case.name, "kind": case.kind, **result}


def _copy(bench: Bench, case: BenchCase) -> Iterator[Result]:
    size = 1 << 12 if case.small else COPY_BYTES
    timing, rate = copy_bandwidth(bench.timer, size)
    yield {
        "contender": "torch copy", "status": "ok", **asdict(timing), "bytes": 2 * size,
        "bytes_per_s": round(rate),
    }  # fmt: skip


def _decode(bench: Bench, case: BenchCase) -> Iterator[Result]:
    data = decode_data(case, bench.storage)
    module = bench.module
    builders: dict[str, Builder] = {
        "raggedkv triton": lambda: bench_ragged.triton_decode(data),
        "raggedkv flashinfer rows": lambda: bench_ragged.flashinfer_decode(
            data, module("decode", case.head_dim)
        ),
        "dense flashinfer": lambda: bench_dense.flashinfer_decode(
            data, module("decode", case.head_dim)
        ),
        "dense flashinfer tensor cores": lambda: bench_dense.flashinfer_tensor_cores(
            data, module("prefill", case.head_dim)
        ),
        "dense sglang triton": lambda: bench_sglang.sglang_decode(data),
        "dense torch sdpa": lambda: bench_dense.sdpa_decode(data),
    }
    shape = {
        "tokens": [int(data.lengths.min()), int(data.lengths.max()), int(data.lengths.sum())],
        "kv_bytes": data.kv_bytes(), "longest_row": int(data.reads.max()),
    }  # fmt: skip
    for result in _contenders(bench, builders, data, some_rows(data.lengths)):
        yield result if "trying" in result else {**result, **shape}


def _extend(bench: Bench, case: BenchCase) -> Iterator[Result]:
    data = extend_data(case, bench.storage)
    module = bench.module
    builders: dict[str, Builder] = {
        "raggedkv triton": lambda: bench_ragged.triton_prefill(data),
        "raggedkv flashinfer rows": lambda: bench_ragged.flashinfer_prefill(
            data, module("prefill", case.head_dim)
        ),
        "dense flashinfer": lambda: bench_dense.flashinfer_extend(
            data, module("prefill", case.head_dim)
        ),
        "dense torch sdpa": lambda: bench_dense.sdpa_extend(data),
    }
    yield from _contenders(bench, builders, data, sorted({0, case.requests - 1}))


def _contenders(
    bench: Bench, builders: dict[str, Builder], data: DecodeData | ExtendData, rows: list[int]
) -> Iterator[Result]:
    for name, build in builders.items():
        yield {"trying": f"{data.case.kind}/{name}"}
        try:
            if f"{data.case.kind}/{name}" in bench.skipped:
                raise Unavailable("it broke the device, or hung, in earlier cases")
            result = _measure(bench, build(), data, rows)
        except Unavailable as error:
            result = {"status": "unavailable", "reason": _line(error)}
        except Exception as error:  # a finding like any other, unless the device is lost
            result = {"status": "failed", "reason": _line(error)}
            yield {"contender": name, **result}
            bench.synchronize()
            continue
        yield {"contender": name, **result}


def _measure(
    bench: Bench, ready: Prepared, data: DecodeData | ExtendData, rows: list[int]
) -> Result:
    data.out.fill_(float("nan"))
    ready.run()
    bench.synchronize()
    error = ready.check(rows)
    if not error <= WORST:
        return {"status": "wrong", "reason": f"error {error:.3g}, at most {WORST} is right"}
    timing = bench.timer.time(ready.run)
    result: Result = {"status": "ok", "error": round(error, 6), **asdict(timing)}
    seconds = timing.median_us * 1e-6
    if ready.bytes is not None:
        result |= {"bytes": ready.bytes, "bytes_per_s": round(ready.bytes / seconds)}
    if ready.flops is not None:
        result |= {"flops": ready.flops, "tflops": round(ready.flops / seconds / 1e12, 3)}
    if ready.plan is not None:
        result["plan_host_us"] = bench.timer.host(ready.plan).median_us
    return result


def _work_list(bench: Bench, case: BenchCase) -> Iterator[Result]:
    """The one launch per step that plans all layers."""
    layers = 2 if case.small else LAYERS
    data = decode_data(case, bench.storage)
    heads = type(data.heads)(*(x.repeat(layers, 1) for x in vars(data.heads).values()))
    from flashinfer_ext.triton_decode import TritonDecode

    decode = TritonDecode(data.layout, heads, case.group, case.requests, bench.device)
    decode.plan(data.batch)
    reads = decode.work.row_lengths.view(layers, case.requests, -1).cpu()
    if not torch.equal(reads.long(), data.reads.expand(layers, -1, -1)):
        yield {"contender": "raggedkv triton", "status": "wrong", "reason": "other row lengths"}
        return
    timing = bench.timer.time(lambda: decode.plan(data.batch))
    host = bench.timer.host(lambda: decode.plan(data.batch))
    yield {
        "contender": "raggedkv triton", "status": "ok", **asdict(timing), "layers": layers,
        "plan_host_us": host.median_us,
    }  # fmt: skip


def _replay(bench: Bench, case: BenchCase) -> Iterator[Result]:
    """A captured step against an eager one, at several lengths."""
    data = decode_data(case, bench.storage, layers=2 if case.small else 4, map_all=True)
    replayed = bench_ragged.Replay(data)
    replay = replayed.capture()
    problem = replayed.differing(replay)
    if problem:
        yield {"contender": "raggedkv triton", "status": "wrong", "reason": problem}
        return
    data.batch.lengths.copy_(data.lengths)
    for name, call in (("graph replay", replay), ("eager step", replayed.step)):
        timing = bench.timer.host(lambda call=call: (call(), bench.synchronize()))
        yield {"contender": name, "status": "ok", "layers": replayed.layers, **asdict(timing)}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300] if not isinstance(error, Unavailable) else text


def run_cases(
    bench: Bench, cases: Sequence[BenchCase], seconds: float = float("inf")
) -> Iterator[Result]:
    """Events of the cases, as the module says; none is begun after ``seconds``."""
    end = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() >= end:
            return
        yield {"begin": case.name}
        try:
            yield from run_case(bench, case)
        except Exception as error:
            yield {"case": case.name, "kind": case.kind, "status": "failed", "reason": _line(error)}
            bench.synchronize()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """``--cases NAME...``, of the full or (``--dry-run``) the small ones. Returns 0, or 1 where
    the device's state is lost."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer_ext.bench_worker")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--skip", nargs="*", default=[], help="kind/contender")
    parser.add_argument("--cases", nargs="+", required=True)
    args = parser.parse_args(argv)
    known = {case.name: case for case in (small_cases() if args.dry_run else full_cases())}
    device = torch.device("cpu" if args.dry_run else "cuda")
    bench = Bench(device, args.dry_run, frozenset(args.skip))
    try:
        for event in run_cases(bench, [known[name] for name in args.cases], args.seconds):
            print(json.dumps(event), flush=True)
    except RuntimeError as error:
        print(f"bench_worker: the device's state is lost: {_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

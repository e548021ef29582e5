"""The flags of both commands, and everything that can be checked before a server starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.plan import parse_bytes
from loadtest.capacity.needles import LEAST_CONTEXT, Needle, needles, spread
from loadtest.capacity.predict import INPUT_RESERVE
from loadtest.capacity.quality_file import QualityPoint, read_quality
from loadtest.capacity.results import (
    BATCH_FILE,
    CONTEXT_FILE,
    REPORT_FILE,
    BatchResult,
    ContextResult,
    load_beside,
)
from loadtest.capacity.serve import check_port, remote_side
from loadtest.capacity.sides import NONE, STOCK, Side, Wanted, line_up
from loadtest.demo import DEFAULT_POLICY
from loadtest.demo_workload import DTYPE_BYTES, model_folder
from loadtest.errors import UserError, in_range, naming_flag
from loadtest.freeze_measure import UNDER_WAY
from loadtest.model_specs import DEFAULT_MODEL, SPECS
from loadtest.result_files import output_folder


@dataclass(frozen=True)
class Sizes:
    """What a command measures with unless told otherwise."""

    context: int
    output: int
    budget: int
    kv_bytes: str
    needles: int


@dataclass(frozen=True)
class Setup:
    """A checked command line, the same for both commands.

    ``sides`` in the order they are measured; ``out`` for results and logs; ``limit_seconds`` after
    which a run is taken for hung.
    """

    model: Path
    geometry: ModelGeometry
    kv_bytes: int
    context: int
    output: int
    needle_count: int
    sides: tuple[Side, ...]
    seed: int
    port: int | None
    threads: int
    limit_seconds: float
    quality: tuple[QualityPoint, ...]
    out: Path

    @cached_property
    def tokenizer(self):
        """The model's."""
        from transformers import AutoTokenizer  # slow to import

        return AutoTokenizer.from_pretrained(self.model)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the model takes with its output."""
        return self.geometry.max_context - self.output - INPUT_RESERVE

    def needles(self) -> list[Needle]:
        """The needle questions that every side answers, at the context's length."""
        if not self.needle_count:
            return []
        return needles(self.tokenizer, self.context, spread(self.needle_count), self.seed)


def add_common(parser: argparse.ArgumentParser, full: Sizes, quick: Sizes) -> None:
    """Arguments of both commands; ``--quick`` takes ``quick`` as defaults."""
    add = parser.add_argument
    parser.set_defaults(sizes=full, quick_sizes=quick)
    add("--model", default=DEFAULT_MODEL, metavar="NAME|DIR",
        help=f"{', '.join(SPECS)} or a Hugging Face folder (default: %(default)s)")  # fmt: skip
    add("--policy", default=DEFAULT_POLICY, metavar="SPEC",
        help="full, native, name[@version] or a policy folder (default: %(default)s)")  # fmt: skip
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--point", metavar="NAME", help="a point of the policy, by name")
    choice.add_argument("--kv-residency", type=float, metavar="SHARE",
        help="or the one with the highest tau that keeps at most this share")  # fmt: skip
    add("--kv-residency-context", type=int, metavar="N",
        help="at this context (default: the model's longest)")  # fmt: skip
    add("--budget-tokens", type=int, metavar="B",
        help="prompt tokens a frozen request keeps, for a policy with retention tables "
        f"(default: {full.budget})")  # fmt: skip
    add("--vs", default=STOCK, metavar="WHAT",
        help="stock, another policy, or none (default: %(default)s)")  # fmt: skip
    add("--url", metavar="URL", help="measure the server that runs there instead of starting any")
    add("--vs-url", metavar="URL", help="and compare it with the one that runs there")
    _add_sizes(add, full)
    add("--needles", type=int, metavar="N",
        help=f"needle questions that each server answers (default: {full.needles})")  # fmt: skip
    add("--quality", type=Path, metavar="FILE",
        help="quality.json or suite.json of `loadtest quality`, or judge.json of `calib_cluster "
        "judge`, for the report's plot")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--port", type=int, metavar="N", help="the servers' (default: a free one)")
    add("--threads", type=int, default=1, metavar="N", help="of each server (default: %(default)s)")
    add("--limit-seconds", type=float, default=3600.0, metavar="S",
        help="a run that takes longer counts as hung (default: %(default)s)")  # fmt: skip
    add("--quick", action="store_true", help="small sizes by default: it works, it says little")
    add("--out", type=Path, default=Path("out/capacity"), metavar="DIR",
        help=f"folder for {BATCH_FILE}, {CONTEXT_FILE}, {REPORT_FILE} and the servers' logs "
        "(default: %(default)s)")  # fmt: skip


def _add_sizes(add, full: Sizes) -> None:
    add("--kv-bytes", metavar="SIZE",
        help=f"bytes of KV cache for each server (default: {full.kv_bytes})")  # fmt: skip
    add("--context", type=int, metavar="N", help=f"prompt tokens (default: {full.context})")
    add("--output", type=int, metavar="N", help=f"tokens of output (default: {full.output})")


def common_setup(args: argparse.Namespace) -> Setup:
    """Check the flags, find model and policy, line up the sides.

    Side effects: a demo model that is absent is fetched; servers at --url are asked what they are;
    the output folder is made. Raises UserError naming the flag.
    """
    sizes: Sizes = args.quick_sizes if args.quick else args.sizes
    context, output, count = (
        default if given is None else given
        for given, default in (
            (args.context, sizes.context), (args.output, sizes.output),
            (args.needles, sizes.needles),
        )
    )  # fmt: skip
    _check_numbers(args, context, output, count)
    model = model_folder(args.model)
    geometry = naming_flag("--model", read_geometry, model).with_kv_dtype_bytes(DTYPE_BYTES)
    longest = geometry.max_context - output - INPUT_RESERVE
    if context > longest:
        raise UserError(
            f"--context {context} is not accepted: with --output {output} this model takes at most "
            f"{longest}"
        )
    kv_bytes = naming_flag("--kv-bytes", parse_bytes, args.kv_bytes or sizes.kv_bytes)
    quality = read_quality(args.quality) if args.quality else ()
    return Setup(
        model, geometry, kv_bytes, context, output, count,
        tuple(_sides(args, sizes, geometry, kv_bytes, context)), args.seed, args.port,
        args.threads, args.limit_seconds, tuple(quality), _folder(args.out),
    )  # fmt: skip


def _check_numbers(args: argparse.Namespace, context: int, output: int, count: int) -> None:
    in_range("--context", context, LEAST_CONTEXT)
    in_range("--output", output, UNDER_WAY + 1)
    in_range("--needles", count, 0)
    in_range("--seed", args.seed, 0)
    in_range("--threads", args.threads, 1, os.cpu_count())
    if not args.limit_seconds > 0:  # false for NaN too
        raise UserError(f"--limit-seconds {args.limit_seconds:g} is not accepted: give more than 0")
    if args.port is not None:
        check_port(args.port)
    if args.vs_url is not None and args.url is None:
        raise UserError("--vs-url compares with --url: give both")
    if args.kv_residency_context is not None and args.kv_residency is None:
        raise UserError("--kv-residency-context needs --kv-residency")


def _sides(
    args: argparse.Namespace, sizes: Sizes, geometry: ModelGeometry, kv_bytes: int, context: int
) -> list[Side]:
    if args.url is not None:
        sides = [remote_side("--url", args.url, False, geometry)]
        if args.vs_url is not None:
            sides.insert(0, remote_side("--vs-url", args.vs_url, True, geometry))
        return sides
    if args.budget_tokens is not None:
        in_range("--budget-tokens", args.budget_tokens, 1, context - 1)
    if args.vs not in (STOCK, NONE) and args.vs == args.policy:
        raise UserError(f"--vs {args.vs} is --policy itself: give stock, none or another policy")
    wanted = Wanted(
        args.policy, args.point, args.kv_residency, args.kv_residency_context, args.budget_tokens,
        min(sizes.budget, context - 1), args.vs,
    )  # fmt: skip
    return line_up(wanted, geometry, kv_bytes)


def _folder(path: Path) -> Path:
    output_folder(path)
    for kind in (BatchResult, ContextResult):  # now, not after the measurement
        load_beside(path, kind)
    return path

"""The quality command's flags, and everything that can be checked before a server starts."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.residency import peak_bytes
from kvpolicy.store import ResolvedPolicy, resolve
from kvpolicy.windows import WindowPolicy
from loadtest.demo_workload import DTYPE_BYTES, model_folder
from loadtest.errors import UserError, in_range, naming_flag
from loadtest.model_specs import DEFAULT_MODEL, SPECS
from loadtest.quality_contenders import Contender, choose_points, line_up, parse_baselines
from loadtest.quality_results import RESULT_FILE
from loadtest.servers import PAGE_SIZE

ANSWER_TOKENS = 12
"""Decoded greedily after a needle's question: a code takes five or six."""
CHUNK = 512
"""Tokens of prefill at once, so that windows slide within the prompt."""
LEAST_CONTEXT = 128  # needle and question take about 50


@dataclass(frozen=True)
class Setup:
    """A checked command line. ``servers`` run at once, each with ``threads`` threads."""

    model: Path
    model_name: str
    geometry: ModelGeometry
    policy_id: str
    contenders: list[Contender]
    text_files: list[Path]
    context: int
    texts: int
    needles: int
    seed: int
    bootstrap: int
    threads: int
    servers: int
    concurrency: int
    out: Path
    resume: bool

    @property
    def arena_bytes(self) -> int:
        """K and V of every concurrent request and one more, were each held at full length."""
        dense = WindowPolicy.full(self.geometry).levels()
        length = self.context + ANSWER_TOKENS
        return (self.concurrency + 1) * peak_bytes(dense, self.geometry, length, PAGE_SIZE)


def add_shared_arguments(parser: argparse._ActionsContainer) -> None:
    """Arguments that both forms of ``python -m loadtest quality`` have."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, metavar="NAME|DIR",
        help=f"{', '.join(SPECS)} or a Hugging Face folder (default: %(default)s)")  # fmt: skip
    add("--texts", nargs="+", metavar="FILE",
        help='held-out text: .jsonl with {"text": ..., "corpus": ...} a line, or .txt; a suite '
        "also takes recipes by name, and without any its own")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR",
        help="folder for results, plots and the servers' logs")  # fmt: skip
    add("--resume", action="store_true",
        help="keep what DIR already holds of the same questions and policies")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--bootstrap", type=int, default=2000, metavar="N",
        help="resamples for the 95%% intervals (default: %(default)s)")  # fmt: skip
    add("--threads", type=int, default=1, metavar="N",
        help="threads of each server and worker (default: %(default)s)")  # fmt: skip
    add("--concurrency", type=int, default=4, metavar="N",
        help="requests in flight at each server (default: %(default)s)")  # fmt: skip


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Arguments of the form with one policy on real servers, but for the shared ones."""
    add = parser.add_argument
    add("--policy", metavar="NAME|DIR", help="name[@version] or an artifact folder")
    add("--point", nargs="+", metavar="NAME", help="points to measure (default: all)")
    add("--context", type=int, default=2048, metavar="N",
        help="tokens of every prompt (default: %(default)s)")  # fmt: skip
    add("--texts-per-run", type=int, default=24, metavar="N",
        help="excerpts to score for each contender (default: %(default)s)")  # fmt: skip
    add("--needles", type=int, default=40, metavar="N",
        help="needle prompts for each contender (default: %(default)s)")  # fmt: skip
    add("--baselines", default="uniform,shuffled", metavar="LIST",
        help="uniform, shuffled[:K], with commas, or none (default: %(default)s)")  # fmt: skip
    add("--baseline-point", metavar="NAME",
        help="point that sets what baselines keep (default: tau-0.99, or the default)")  # fmt: skip
    add("--servers", type=int, default=2, metavar="N",
        help="contenders measured at once (default: %(default)s); two servers of one thread do "
        "more than one of two, and suffer less from other work")  # fmt: skip


def make_setup(args: argparse.Namespace) -> Setup:
    """Check the flags, find model and policy, and line up the contenders.

    Side effects: a demo model that is absent is fetched; the output folder is made. Raises
    UserError naming the flag.
    """
    if not args.texts:
        raise UserError("--texts FILE is needed: held-out text that the policy never saw")
    _check_numbers(args)
    baselines = parse_baselines(args.baselines)
    model = model_folder(args.model)
    geometry = naming_flag("--model", read_geometry, model).with_kv_dtype_bytes(DTYPE_BYTES)
    if args.context + ANSWER_TOKENS > geometry.max_context:
        raise UserError(
            f"--context {args.context} is not accepted: with {ANSWER_TOKENS} tokens of answer this "
            f"model takes at most {geometry.max_context - ANSWER_TOKENS}"
        )
    found: ResolvedPolicy = naming_flag("--policy", resolve, args.policy, geometry)
    points, beside = choose_points(found, args.point, args.baseline_point)
    contenders = line_up(found, geometry, points, beside, baselines, args.context, args.seed)
    _check_plotting()
    return Setup(
        model=model, model_name=model.name, geometry=geometry, policy_id=found.policy_id,
        contenders=contenders, text_files=[Path(name) for name in args.texts], context=args.context,
        texts=args.texts_per_run, needles=args.needles, seed=args.seed, bootstrap=args.bootstrap,
        threads=args.threads, servers=args.servers, concurrency=args.concurrency,
        out=_folder(args.out, args.resume), resume=args.resume,
    )  # fmt: skip


def _check_numbers(args: argparse.Namespace) -> None:
    in_range("--context", args.context, LEAST_CONTEXT)
    in_range("--texts-per-run", args.texts_per_run, 0)
    in_range("--needles", args.needles, 0)
    if not args.texts_per_run and not args.needles:
        raise UserError("--texts-per-run 0 and --needles 0 leave nothing to measure")
    in_range("--seed", args.seed, 0)
    in_range("--bootstrap", args.bootstrap, 100)
    in_range("--threads", args.threads, 1)
    in_range("--servers", args.servers, 1, 16)
    in_range("--concurrency", args.concurrency, 1, 64)


def _check_plotting() -> None:
    # now, not after an hour of measuring
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the plot needs matplotlib, which is not installed: pip install matplotlib")


def _folder(path: Path, resume: bool) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f".{RESULT_FILE}.try").touch()
        (path / f".{RESULT_FILE}.try").unlink()
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error
    if (path / RESULT_FILE).exists() and not resume:
        raise UserError(f"--out {path} holds a {RESULT_FILE}: add --resume, or give another folder")
    return path

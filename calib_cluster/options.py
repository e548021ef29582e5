"""Options that all calibrations share, those of ``seqcalib``, and what their values must be."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from calib_cluster.errors import CalibrationError
from calib_cluster.seqcalib import Settings, point_name
from calib_cluster.worker import DTYPE_BYTES
from kvpolicy.windows import FULL

CODEBOOK = "64,128,256,512,1024,2048,4096,full"
# Half dialogues: prose seldom looks back far, so windows from it alone cut heads that retrieve.
CORPUS = ("dialogue/a", "dialogue/b", "key-value", "kjv")
TAUS = "0.95,0.98,0.99,0.995,0.999"


def add_seqcalib(commands) -> argparse.ArgumentParser:
    """Register the command on an argparse subparsers object."""
    text = "choose a window for every kv head with SeqCalib and write the policy"
    parser = commands.add_parser("seqcalib", help=text, description=text)
    add_inputs(parser, length=2048)
    _add_held_out(parser)
    _add_method(parser)
    add_cluster(parser)
    add_outputs(parser, name="seqcalib")
    add_again(parser, "go on after the last saved layer")
    return parser


def add_inputs(parser: argparse.ArgumentParser, length: int, more: str = "") -> None:
    """The model and the texts; ``length`` is the default of tokens a prompt, ``more`` says what
    else a corpus may be."""
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="Hugging Face model folder with weights")
    add(
        "--corpus", nargs="+", metavar="NAME|FILE|FOLDER", default=list(CORPUS),
        help="calibration texts: names of 'corpus list', .jsonl, .parquet, .txt, or folders "
        f"{more} (default: %(default)s)",
    )  # fmt: skip
    add("--prompts", type=int, default=16, metavar="N", help="prompts in all (default 16)")
    text = f"tokens a prompt (default {length})"
    add("--length", type=int, default=length, metavar="T", help=text)
    add("--field", metavar="NAME", help="field of a row that holds its text")
    add("--chat-template", action="store_true", help="apply the model's chat template")
    add("--seed", type=int, default=0, help="which excerpts are taken (default 0)")


def _add_held_out(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--eval-corpus", nargs="+", metavar="NAME|FILE|FOLDER", default=[],
        help="held-out texts: checked to be disjoint, then the loss of every point is measured",
    )  # fmt: skip
    add("--eval-prompts", type=int, default=8, metavar="N", help="held-out prompts (default 8)")


def _add_method(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--codebook", default=CODEBOOK, help="candidate windows in tokens (default %(default)s)")
    add("--tau", default=TAUS, help="mean cosines to reach, each a point (default %(default)s)")
    add("--sinks", type=int, default=4, metavar="S", help="first tokens always kept (default 4)")
    add("--dtype", choices=[*DTYPE_BYTES], help="default: float32 on CPU, bfloat16 on GPU")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Workers and where they run."""
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="W", help="workers (default 1)")
    add(
        "--threads-per-worker", type=int, default=1, metavar="C",
        help="CPU threads a worker (default 1)",
    )  # fmt: skip
    add(
        "--gpus-per-worker", type=float, default=0, metavar="G",
        help="GPUs a worker; a fraction shares one (default 0)",
    )  # fmt: skip
    add(
        "--address", metavar="HOST:PORT|auto",
        help="Ray cluster (default: $RAY_ADDRESS, as in a Ray job; else a local one)",
    )  # fmt: skip


def add_outputs(parser: argparse.ArgumentParser, name: str) -> None:
    """Where the policy goes; ``name`` is its default."""
    add = parser.add_argument
    add("--out", default="artifacts", metavar="DIR", help="artifacts root (default artifacts)")
    add("--name", default=name, help=f"policy name (default {name})")
    add("--summary", metavar="FILE.json", help="also write what the run cost, as JSON")


def add_again(parser: argparse.ArgumentParser, resume: str):
    """What to do with the run that is there; returns the group. ``resume`` is that flag's help."""
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help=resume)
    again.add_argument("--restart", action="store_true", help="drop the run that is there")
    return again


def check_least(at_least: dict[str, tuple[float, float]]) -> None:
    """Raise CalibrationError for the first flag: (value, least) whose value is too small."""
    for flag, (value, low) in at_least.items():
        if not value >= low:  # so that no NaN passes
            raise CalibrationError(f"{flag} {value:g} is not accepted: give at least {low:g}")


def check_counts(args: argparse.Namespace) -> None:
    """Raise CalibrationError naming the first of SeqCalib's options that is out of range."""
    check_least({"--eval-prompts": (args.eval_prompts, 1), "--sinks": (args.sinks, 0)})
    check_shared(args)


def check_shared(args: argparse.Namespace) -> None:
    """The same for the options of ``add_inputs`` and ``add_cluster``."""
    gpus = args.gpus_per_worker
    if not math.isfinite(gpus) or (gpus > 1 and gpus != int(gpus)):
        raise CalibrationError(
            f"--gpus-per-worker {gpus:g} is not accepted: give a share up to 1 or a whole number"
        )
    at_least = {
        "--prompts": (args.prompts, 1), "--length": (args.length, 2),
        "--workers": (args.workers, 1), "--threads-per-worker": (args.threads_per_worker, 1),
        "--gpus-per-worker": (gpus, 0),
    }  # fmt: skip
    check_least(at_least)
    if args.workers > args.prompts:
        raise CalibrationError(
            f"--workers {args.workers} is more than --prompts {args.prompts}: a worker needs one"
        )


def parse_settings(args: argparse.Namespace, say: Callable[[str], None]) -> Settings:
    """Codebook, taus and sinks of the command line.

    Windows that bind nowhere in prompts of this length are left out (there would be no evidence
    for them), which ``say`` is told.

    Raises:
        CalibrationError: malformed, or no window is left.
    """
    windows = _parse_codebook(args.codebook)
    binding = tuple(w for w in windows if w + args.sinks < args.length)
    if not binding:
        raise CalibrationError(
            f"--length {args.length} is too short: no window of --codebook {args.codebook} with "
            f"{args.sinks} sinks hides anything in it; give longer prompts or smaller windows"
        )
    if left_out := windows[len(binding) :]:
        say(
            f"windows {', '.join(map(str, left_out))} never bind in {args.length} tokens: left "
            "out, heads that need more than the others become full"
        )
    return Settings(binding, _parse_taus(args.tau), args.sinks)


def _parse_codebook(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    sizes = [word for word in words if word != "full"]
    if not sizes or not all(w.isdecimal() and 0 < int(w) < FULL for w in sizes):
        raise CalibrationError(
            f"--codebook {text!r} is not accepted: give windows in tokens and 'full', "
            f"such as {CODEBOOK}"
        )
    return tuple(sorted({int(word) for word in sizes}))


def _parse_taus(text: str) -> tuple[float, ...]:
    try:
        taus = {float(word) for word in text.split(",")}
    except ValueError:
        taus = set()
    if not taus or not all(0 < tau <= 1 for tau in taus):
        raise CalibrationError(
            f"--tau {text!r} is not accepted: give numbers in (0, 1], such as {TAUS}"
        )
    names = [point_name(tau) for tau in taus]
    if same := sorted({name for name in names if names.count(name) > 1}):
        raise CalibrationError(f"--tau {text!r}: two points would be called {same[0]}")
    return tuple(sorted(taus))


def names_of(prompts: Sequence) -> str:
    """``12 prompts (kjv 6, stdlib 6)``."""
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.corpus] = counts.get(prompt.corpus, 0) + 1
    parts = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{len(prompts)} prompts ({parts})"

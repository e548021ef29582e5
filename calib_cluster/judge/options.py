"""The options of ``python -m calib_cluster judge``, and what their values must be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from calib_cluster.corpora.recipes import EVALUATION_MIX
from calib_cluster.errors import CalibrationError
from calib_cluster.judge.items import PROTOCOLS
from calib_cluster.judge.tasks import TASKS

PEER_NAMES = (
    "snapkv", "adakv", "chunkkv", "tova", "expected_attention", "adakv_ea", "streamingllm",
    "random", "recency",
)  # fmt: skip
NONE = "none"


def add_judge(commands) -> argparse.ArgumentParser:
    """Register the command on an argparse subparsers object."""
    text = "judge retention policies beside peers: answers and text under what each keeps"
    parser = commands.add_parser("judge", help=text, description=text)
    parser.set_defaults(command=_judge)
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="Hugging Face model folder with weights")
    add(
        "--policies", default="paper,head", metavar="A,B",
        help="retention artifacts (folder or name[@version]) or rules, each also without one part "
        "(paper~heads, ~gate, ~utility; mix~shares, ~mixtures, ~order), or none "
        "(default %(default)s)",
    )  # fmt: skip
    add(
        "--peers", default=",".join(PEER_NAMES), metavar="A,B",
        help="kvpress's presses and recency, or none (default %(default)s)",
    )  # fmt: skip
    add("--against", metavar="ARM", help="arm that differences are of (default: the first policy)")
    _add_items(parser)
    _add_run(parser)
    return parser


def _add_items(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--budgets", default="64,128,256", metavar="B,B",
        help="tokens kept a kv head, averaged over a layer (default %(default)s)",
    )  # fmt: skip
    add("--tasks", default=",".join(TASKS), metavar="A,B", help="default %(default)s")
    add(
        "--protocols", default=",".join(PROTOCOLS), metavar="A,B",
        help="aware: the question is compressed too; agnostic: it comes after (default both)",
    )  # fmt: skip
    add("--length", default="1024", metavar="T,T", help="prompt tokens (default %(default)s)")
    add(
        "--per-task", type=int, default=20, metavar="N",
        help="items of each task and length (default 20)",
    )  # fmt: skip
    add(
        "--texts", nargs="+", default=list(EVALUATION_MIX), metavar="NAME|FILE|FOLDER",
        help="held-out texts (default: %(default)s)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of items and of what is random (default 0)")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="W", help="processes (default 1)")
    add(
        "--threads-per-worker", type=int, default=1, metavar="C",
        help="CPU threads a worker (default 1)",
    )  # fmt: skip
    add("--out", default="out/judge", metavar="DIR", help="results (default %(default)s)")
    add("--resume", action="store_true", help="go on with an interrupted run in --out")


def _judge(args: argparse.Namespace) -> None:
    from calib_cluster.common import quiet_libraries

    quiet_libraries()  # before they are imported
    from calib_cluster.judge.command import run_judge

    run_judge(args)


def parse_names(flag: str, text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of a comma-separated list, in order; () for ``none``.

    Raises CalibrationError if one is empty, given twice, or not among ``known``.
    """
    if text == NONE:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name or (known is not None and name not in known):
            accepted = f"give {', '.join(known)}" if known else "give names"
            raise CalibrationError(f"{flag} {text!r}: {name!r} is not accepted: {accepted}")
        if names.count(name) > 1:
            raise CalibrationError(f"{flag} {text!r}: {name!r} is named twice")
    return names


def parse_counts(flag: str, text: str, low: int) -> tuple[int, ...]:
    """Ascending whole numbers of a comma-separated list. Raises CalibrationError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= low for word in words):
        raise CalibrationError(
            f"{flag} {text!r} is not accepted: give whole numbers of at least {low}, "
            "comma-separated"
        )
    return tuple(sorted({int(word) for word in words}))


def check_counts(args: argparse.Namespace) -> None:
    """Raise CalibrationError naming the first option that is out of range."""
    for flag in ("--per-task", "--workers", "--threads-per-worker"):
        value = getattr(args, flag[2:].replace("-", "_"))
        if value < 1:
            raise CalibrationError(f"{flag} {value} is not accepted: give at least 1")

"""The options of ``python -m calib_cluster compile`` and ``fit``, and what their values must be.

Help must not load torch: what needs it is imported once a value is looked at, and an option that
is not given (None) has the default that its library function has.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from calib_cluster.corpora.asked import ASKED
from calib_cluster.errors import CalibrationError
from calib_cluster.options import (
    add_again,
    add_cluster,
    add_inputs,
    add_outputs,
    check_least,
    check_shared,
)
from calib_cluster.rewards.behaviour import BEHAVIOURS
from kvpolicy.retention.rule import RULES, RetentionRule

if TYPE_CHECKING:
    from calib_cluster.compile import CompileSettings

NAME = "compilerkv"
BUDGETS = "128,256,512"


def add_compile(commands) -> argparse.ArgumentParser:
    """Register ``compile`` on an argparse subparsers object."""
    text = "learn retention tables from rewards (CompilerKV) and write the policy"
    parser = commands.add_parser("compile", help=text, description=text)
    add_inputs(parser, length=1024, more=f", or questions: {', '.join(ASKED)}")
    _add_drawing(parser)
    _add_fit(parser)
    add_cluster(parser)
    add_outputs(parser, name=NAME)
    again = add_again(parser, "go on with the prompts that are not evaluated yet")
    text = "go on with the records that are there: with more --prompts, --corpus or draws per cell"
    again.add_argument("--extend", action="store_true", help=text)
    return parser


def add_fit(commands) -> argparse.ArgumentParser:
    """Register ``fit`` on an argparse subparsers object."""
    text = "fit retention tables to the records of a compile, without a model, and write the policy"
    parser = commands.add_parser("fit", help=text, description=text)
    add = parser.add_argument
    text = "folder that a compile keeps its records in: OUT/.calibration/MODEL.NAME"
    add("--records", metavar="DIR", required=True, help=text)
    add("--budgets", metavar="B,...", help="only these budgets (default: all there are)")
    text = "only records of these corpora (default: all there are)"
    add("--only-corpus", nargs="+", metavar="LABEL", default=[], help=text)
    _add_fit(parser)
    add_outputs(parser, name=NAME)
    return parser


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rewards", "what is evaluated on every prompt")
    add = group.add_argument
    text = "tokens after each prompt whose loss is measured (default 128)"
    add("--continuation", type=int, default=128, metavar="C", help=text)
    text = f"kept tokens to compile for (default {BUDGETS})"
    add("--budgets", default=BUDGETS, metavar="B,...", help=text)
    add("--rule", choices=tuple(RULES), default="paper", help="retention rule (default paper)")
    text = "factorial: every evaluation draws all actions; one-at-a-time: one (default factorial)"
    add("--behaviour", choices=BEHAVIOURS, default=BEHAVIOURS[0], help=text)
    text = "evaluations a prompt and budget (default 32)"
    add("--draws", type=int, default=32, metavar="K", help=text)
    text = "further draws where a risk cell has fewer evaluations a budget (default 0: none)"
    add("--draws-per-cell", type=int, default=0, metavar="M", help=text)
    text = "distinct kept sets scored at once: memory, speed and rounding (default 8)"
    add("--batch", type=int, default=8, metavar="N", help=text)


def _add_fit(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fit", "how the tables follow from the records")
    add = group.add_argument
    add("--alpha", type=float, metavar="A", help="conservative weight of eq. 1 (default 0.75)")
    text = "the gate's penalty is this over T a token past the budget (default 1)"
    add("--beta", type=float, metavar="B", help=text)
    text = "exact, converged (AdamW until it stops) or paper (AdamW as the paper; default exact)"
    add("--method", help=text)
    text = "fit each table without regard to the other"
    add("--independent", dest="joint", action="store_false", help=text)
    text = "rewards as they are, not relative to their prompt's mean"
    add("--no-baseline", dest="baseline", action="store_false", help=text)
    text = "rule mix: part of the budget that all heads get alike (default 0.35)"
    add("--even", type=float, metavar="E", help=text)
    add("--entropy-bins", type=int, metavar="N", help="risk bins of entropy (default 20)")
    add("--perplexity-bins", type=int, metavar="N", help="risk bins of perplexity (default 4)")


def check_compile(args: argparse.Namespace) -> tuple[int, ...]:
    """The budgets, after every option of ``compile`` was checked. Raises CalibrationError."""
    from calib_cluster.rewards.model import MIN_CONTINUATION

    at_least = {
        "--continuation": (args.continuation, MIN_CONTINUATION), "--draws": (args.draws, 1),
        "--draws-per-cell": (args.draws_per_cell, 0), "--batch": (args.batch, 1),
    }  # fmt: skip
    check_least(at_least)
    check_shared(args)
    if args.gpus_per_worker > 1:
        raise CalibrationError(
            f"--gpus-per-worker {args.gpus_per_worker:g} is not accepted: rewards are evaluated on "
            "one GPU, give 1 or less"
        )
    budgets = parse_budgets(args.budgets)
    if budgets[-1] >= args.length:
        raise CalibrationError(
            f"--budgets {budgets[-1]} cuts nothing off prompts of --length {args.length}: give "
            "smaller budgets or longer prompts"
        )
    rule = rule_of(args)
    if rule.mixes and args.behaviour != BEHAVIOURS[0]:
        raise CalibrationError(
            f"--behaviour {args.behaviour}: rule {rule.name} is compiled from {BEHAVIOURS[0]} draws"
        )
    if args.draws_per_cell and rule.gate == "off":
        raise CalibrationError(f"--draws-per-cell: rule {rule.name} has no gate and no risk cells")
    return budgets


def rule_of(args: argparse.Namespace) -> RetentionRule:
    """The retention rule to compile for."""
    return RULES[args.rule]


def parse_budgets(text: str) -> tuple[int, ...]:
    """Ascending budgets of ``128,256``. Raises CalibrationError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise CalibrationError(
            f"--budgets {text!r} is not accepted: give kept tokens, such as {BUDGETS}"
        )
    return tuple(sorted({int(word) for word in words}))


def fit_settings(args: argparse.Namespace) -> CompileSettings:
    """Settings of the fit. Raises CalibrationError naming the first option out of range."""
    from calib_cluster.compile import CompileSettings

    for flag, value in (("--alpha", args.alpha), ("--beta", args.beta)):
        if value is not None and (not math.isfinite(value) or value < 0):
            raise CalibrationError(f"{flag} {value:g} is not accepted: give a number of at least 0")
    bins = {"--entropy-bins": args.entropy_bins, "--perplexity-bins": args.perplexity_bins}
    check_least({flag: (value, 1) for flag, value in bins.items() if value is not None})
    names = ("alpha", "beta", "method", "entropy_bins", "perplexity_bins", "even")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return CompileSettings(joint=args.joint, baseline=args.baseline, **given)

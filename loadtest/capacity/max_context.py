"""``python -m loadtest max-context``: the longest prompt that completes, and that is understood.

Every server gets the same KV bytes and the same prompts, one at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from loadtest.capacity.command import Stages, finish
from loadtest.capacity.context import ContextBench, Search
from loadtest.capacity.flags import Setup, Sizes, add_common, common_setup
from loadtest.capacity.needles import ANSWER_TOKENS, LEAST_CONTEXT, spread
from loadtest.capacity.results import SCHEMA_VERSION, ContextResult, ContextSide
from loadtest.capacity.serve import Remote
from loadtest.capacity.sides import Side
from loadtest.errors import UserError, in_range
from loadtest.freeze_results import command, machine
from loadtest.servers import PAGE_SIZE, Server

__all__ = ["add_arguments", "run"]

FULL = Sizes(context=2048, output=16, budget=256, kv_bytes="120MB", needles=10)
QUICK = Sizes(context=512, output=16, budget=64, kv_bytes="60MB", needles=3)
QUICK_UP_TO = 2048
STEP = 64
DEPTHS = 3
LADDER = (4, 2)
"""The first side's predicted longest prompt divided by these: lengths that every side reports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest max-context``."""
    add_common(parser, FULL, QUICK)
    add = parser.add_argument
    add("--up-to", type=int, metavar="N",
        help="longest prompt to try (default: what the model takes)")  # fmt: skip
    add("--step", type=int, default=STEP, metavar="N",
        help="grain of the search in tokens (default: %(default)s)")  # fmt: skip
    add("--depths", type=int, default=DEPTHS, metavar="N",
        help="needle depths at each length; most must be found (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, write ``max-context.json`` and ``report.html``, print the table. Returns 0.

    Side effects: servers, ended on every way out; files under ``--out``. Raises UserError for bad
    flags and for a server that does not start or dies.
    """
    setup = common_setup(args)
    search = _search(args, setup)
    finish(_measure(setup, search), setup)
    return 0


def _search(args: argparse.Namespace, setup: Setup) -> Search:
    longest = setup.longest_prompt
    asked = args.up_to
    if asked is None:
        asked = min(QUICK_UP_TO, longest) if args.quick else longest
    in_range("--up-to", asked, LEAST_CONTEXT, longest)
    in_range("--step", args.step, PAGE_SIZE, asked)
    in_range("--depths", args.depths, 1, 20)
    if setup.output < ANSWER_TOKENS:
        raise UserError(
            f"--output {setup.output} is not accepted: a needle's answer takes {ANSWER_TOKENS}"
        )
    for side in setup.sides:
        if not side.store.at_once(setup.context, setup.output):
            raise UserError(
                f"--context {setup.context}: no prompt of that length fits in {side.name}; give "
                "more --kv-bytes, or a smaller --context"
            )
    base = setup.sides[0].store.longest(setup.output, asked)
    rungs = (base // part // args.step * args.step for part in LADDER)
    ladder = tuple(length for length in rungs if length >= LEAST_CONTEXT)
    return Search(asked, args.step, args.depths, ladder)


def _measure(setup: Setup, search: Search) -> ContextResult:
    needles = setup.needles()

    def make(sides: list[ContextSide], loads: list[float], finished: bool) -> ContextResult:
        return ContextResult(
            SCHEMA_VERSION, command(), finished, setup.seed, setup.model.name,
            setup.geometry.max_context, setup.kv_bytes, setup.context, setup.output, search.up_to,
            search.step, [round(depth, 3) for depth in spread(search.depths)], sides,
            machine(loads),
        )  # fmt: skip

    def measure(side: Side, server: Server | Remote, say: Callable[[str], None]) -> ContextSide:
        return ContextBench(setup, side, search, say).measure(server, needles)

    def told(side: ContextSide) -> str:
        return (
            f"longest prompt {side.longest} (predicted {side.predicted}), understood up to "
            f"{side.answered}"
        )

    return Stages("max-context", setup, make).run(measure, told)

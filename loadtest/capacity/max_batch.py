"""``python -m loadtest max-batch``: how many requests run together, how fast, at what quality.

Every server gets the same KV bytes and the same prompts, one server after the other. Throughput is
measured with SGLang's own client at equal batch and at the largest batch of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from loadtest.capacity.batch import BatchBench, Texts, check_room
from loadtest.capacity.command import Stages, finish
from loadtest.capacity.flags import Setup, Sizes, add_common, common_setup
from loadtest.capacity.results import SCHEMA_VERSION, BatchResult, BatchSide
from loadtest.capacity.serve import Remote
from loadtest.capacity.sides import Side
from loadtest.freeze_results import command, machine
from loadtest.servers import Server

__all__ = ["add_arguments", "run"]

FULL = Sizes(context=2048, output=128, budget=256, kv_bytes="330MB", needles=10)
QUICK = Sizes(context=512, output=16, budget=64, kv_bytes="90MB", needles=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest max-batch``."""
    add_common(parser, FULL, QUICK)


def run(args: argparse.Namespace) -> int:
    """Measure, write ``max-batch.json`` and ``report.html``, print the table. Returns 0.

    Side effects: servers and clients, ended on every way out; files under ``--out``. Raises
    UserError for bad flags and for a server that does not start or dies.
    """
    setup = common_setup(args)
    check_room(setup)
    finish(_measure(setup), setup)
    return 0


def _measure(setup: Setup) -> BatchResult:
    texts, needles = Texts(setup), setup.needles()
    equal: list[int] = []

    def make(sides: list[BatchSide], loads: list[float], finished: bool) -> BatchResult:
        return BatchResult(
            SCHEMA_VERSION, command(), finished, setup.seed, setup.model.name, setup.kv_bytes,
            setup.context, setup.output, equal[0], sides, machine(loads),
        )  # fmt: skip

    def measure(side: Side, server: Server | Remote, say: Callable[[str], None]) -> BatchSide:
        bench = BatchBench(setup, side, texts, equal[0] if equal else None, say)
        found = bench.measure(server, needles)
        equal[:] = equal or [found.largest]
        return found

    def told(side: BatchSide) -> str:
        run = side.at_largest
        return (
            f"{side.largest} together (predicted {side.predicted}), "
            f"{run.output_tokens_per_second:.1f} output tokens/s"
        )

    return Stages("max-batch", setup, make).run(measure, told)

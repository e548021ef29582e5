"""``python -m loadtest COMMAND``: one registry of subcommands, each in its own module.

A command module provides ``add_arguments(parser)`` and ``run(args) -> int``. Only the module
of the command that was asked for is imported, so ``--help`` never waits for torch.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.errors import UserError


@dataclass(frozen=True)
class Command:
    """One subcommand: the module that implements it and its line in ``--help``."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "model": Command("loadtest.models", "fetch, convert and verify a demo model"),
    "demo": Command("loadtest.demo", "compare stock SGLang and RaggedKV on the same KV bytes"),
    "freeze": Command("loadtest.freeze", "measure what freezing prompts brings and costs"),
    "max-batch": Command(
        "loadtest.capacity.max_batch", "how many requests run together, how fast, how well"
    ),
    "max-context": Command(
        "loadtest.capacity.max_context", "the longest prompt that completes and is understood"
    ),
    "quality": Command("loadtest.quality", "measure what a policy costs in quality"),
    "train-hybrid": Command(
        "loadtest.hybrid.command", "train a small model with recurrent layers, for the tests"
    ),
    "hybrid-recall": Command(
        "loadtest.hybrid.recall", "what a policy leaves of that model's recall"
    ),
    "calibration-cost": Command("loadtest.calibration_cost", "what SeqCalib costs and grows with"),
}


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Parser of all commands; only ``chosen`` gets its arguments (and its module imported)."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=command.summary)
        if name == chosen:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status; 2 for bad input, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    args = build_parser(chosen).parse_args(words)
    try:
        return importlib.import_module(COMMANDS[args.command].module).run(args)
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"python -m loadtest {args.command}: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"python -m loadtest {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

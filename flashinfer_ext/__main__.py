"""``python -m flashinfer_ext``: check the kernels with and without a GPU, build FlashInfer's."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from flashinfer_ext.aot import AotError, add_aot
from flashinfer_ext.balance import BalanceError, add_balance
from flashinfer_ext.gpu_check import add_gpu_check

EXIT_BAD_INPUT = 2
BUILD = "build-flashinfer"


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"flashinfer_ext: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its status, or 2 after one line on stderr for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [BUILD]:  # parses its own options: the build's child processes share them
        from flashinfer_ext.flashinfer_build import build_command

        return build_command(argv[1:])
    args = build_parser().parse_args(argv)
    try:
        return args.command(args)
    except (AotError, BalanceError) as error:
        sys.stdout.flush()
        print(f"flashinfer_ext: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("flashinfer_ext: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = _Parser(prog="python -m flashinfer_ext", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    add_aot(commands)
    add_balance(commands)
    add_gpu_check(commands)
    commands.add_parser(BUILD, help="compile the FlashInfer variants", add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""``python -m calib_cluster``: calibrate policies, and look at the texts they are calibrated on."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from calib_cluster.compile_options import add_compile, add_fit
from calib_cluster.corpora.cli import add_corpus_commands
from calib_cluster.errors import CalibrationError
from calib_cluster.judge.options import add_judge
from calib_cluster.options import add_seqcalib

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"calib_cluster: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 after one line on stderr for bad input."""
    args = build_parser().parse_args(argv)
    try:
        args.command(args)
    except CalibrationError as error:
        sys.stdout.flush()
        print(f"calib_cluster: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("calib_cluster: interrupted; --resume continues", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = _Parser(prog="python -m calib_cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    add_seqcalib(commands).set_defaults(command=_seqcalib)
    add_compile(commands).set_defaults(command=_compile)
    add_fit(commands).set_defaults(command=_fit)
    add_judge(commands)
    add_corpus_commands(commands, _Parser)
    return parser


def _seqcalib(args: argparse.Namespace) -> None:
    from calib_cluster.command import run_seqcalib  # imports Ray and torch

    run_seqcalib(args)


def _compile(args: argparse.Namespace) -> None:
    from calib_cluster.compile_command import run_compile

    run_compile(args)


def _fit(args: argparse.Namespace) -> None:
    from calib_cluster.compile_command import run_fit

    run_fit(args)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m kvpolicy``: make, show, compare and choose policies, and plan capacity."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from kvpolicy import cli_merge, cli_new, cli_transfer, render
from kvpolicy.artifact import load_artifact
from kvpolicy.cli_find import MODEL_HELP, POLICY_HELP, find, geometry_of
from kvpolicy.diff import compare
from kvpolicy.errors import KvPolicyError, PolicyError
from kvpolicy.geometry import read_geometry
from kvpolicy.plan import make_plan, parse_bytes, with_served_dtype
from kvpolicy.render_diff import diff_view
from kvpolicy.render_points import checked_text, selection_view
from kvpolicy.render_retention import retention_checked_text, summary
from kvpolicy.select import select_point
from kvpolicy.store import find_folders, resolve, search_roots

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"kvpolicy: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 after one line on stderr for bad input."""
    args = build_parser().parse_args(argv)
    try:
        return args.command(args) or 0
    except KvPolicyError as error:
        _complain(error)
        return EXIT_BAD_INPUT


def _complain(error: KvPolicyError) -> None:
    print(f"kvpolicy: {' '.join(str(error).split())}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = _Parser(prog="python -m kvpolicy", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    new = _add(commands, "new", cli_new.run, "write a policy that needs no calibration")
    cli_new.add_arguments(new)
    text = "write one policy with the windows of one artifact and the retention tables of another"
    cli_merge.add_arguments(_add(commands, "merge", cli_merge.run, text))
    text = "write a policy for another model with one's retention tables, by relative depth"
    cli_transfer.add_arguments(_add(commands, "transfer", cli_transfer.run, text))
    _add_plan(commands)
    _add_select(commands)
    _add_diff(commands)
    text = "print how a policy was made, its points, windows and residency"
    show = _add(commands, "show", show_command, text)
    show.add_argument("policy", help=POLICY_HELP)
    show.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    show.add_argument("--point", help="operating point (default: the policy's default)")
    verify = _add(commands, "verify", verify_command, "check an artifact's hashes and contents")
    verify.add_argument("policy", metavar="DIR", help="artifact folder")
    verify.add_argument("--model", metavar="DIR", help="also check that it fits this model")
    listing = _add(commands, "list", list_command, "list the policies that can be found by name")
    listing.add_argument("--root", metavar="DIR", action="append", help="search here instead")
    return parser


def _add(commands, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run)
    return parser


def _add_plan(commands) -> None:
    text = "predict KV bytes, batch and context from config.json, dense beside policy"
    plan = _add(commands, "plan", plan_command, text)
    plan.add_argument("--model", metavar="DIR", required=True, help="folder with config.json")
    plan.add_argument("--policy", metavar="P", required=True, help="folder, name, native or full")
    plan.add_argument("--point", help="operating point of the policy")
    plan.add_argument("--memory", metavar="SIZE", required=True, help="device memory, e.g. 80GB")
    plan.add_argument("--weights-bytes", metavar="SIZE", help="default: estimated from config")
    plan.add_argument("--overhead-bytes", metavar="SIZE", help="default: a tenth of the memory")
    plan.add_argument("--context", type=int, metavar="N", help="tokens a request (default: max)")
    plan.add_argument("--page-size", type=int, default=16, metavar="P", help="default 16")
    plan.add_argument("--kv-dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")


def _add_select(commands) -> None:
    text = "choose the point whose residency fits a budget, as --kv-residency does when serving"
    select = _add(commands, "select", select_command, text)
    select.add_argument("--policy", metavar="P", required=True, help=POLICY_HELP)
    select.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    share = "share of the global layers' dense cache, above 0 and at most 1"
    select.add_argument("--residency", type=float, metavar="X", required=True, help=share)
    context = "tokens a request (default: the model's longest)"
    select.add_argument("--context", type=int, metavar="N", help=context)
    select.add_argument("--json", action="store_true", help="print the choice as JSON")


def _add_diff(commands) -> None:
    text = "compare two policies, or with --against two points of one"
    diff = _add(commands, "diff", diff_command, text)
    diff.add_argument("a", metavar="A", help=POLICY_HELP)
    diff.add_argument("b", metavar="B", nargs="?", help="the other policy (default: A itself)")
    diff.add_argument("--point", metavar="X", help="point of A, and of B without --against")
    diff.add_argument("--against", metavar="Y", help="point of B")
    diff.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    diff.add_argument("--json", action="store_true", help="print the comparison as JSON")


def show_command(args: argparse.Namespace) -> None:
    """Print how an artifact was made, its points, levels, windows and residency."""
    artifact = find(args.policy, geometry_of(args))
    render.make_console().print(render.artifact_view(artifact, args.point))


def select_command(args: argparse.Namespace) -> None:
    """Print every point at a context and the one that a budget picks."""
    geom = geometry_of(args)
    artifact = find(args.policy, geom)
    selection = select_point(artifact, args.residency, args.context, geom)
    if args.json:
        _print_json(selection)
    else:
        render.make_console().print(selection_view(selection))


def diff_command(args: argparse.Namespace) -> None:
    """Print what differs between two points."""
    if args.b is None and args.against is None:
        raise PolicyError("diff needs a second policy, or --against POINT to compare within one")
    geom = geometry_of(args)
    a = find(args.a, geom)
    b = a if args.b is None else find(args.b, geom)
    # within one policy, --point names A's side only
    point_b = args.against if args.against is not None else args.point
    found = compare(a, b, args.point, point_b)
    if args.json:
        _print_json(found)
    else:
        render.make_console().print(diff_view(found), soft_wrap=found.identical)


def _print_json(record: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(record), indent=2).decode())


def verify_command(args: argparse.Namespace) -> None:
    """Verify an artifact and print what was checked."""
    geom = geometry_of(args)
    artifact = load_artifact(args.policy, geom)
    fits = f", fits {args.model}" if geom else ""
    files = len(artifact.manifest.files)
    retention = "" if artifact.retention is None else f", retention {summary(artifact)}"
    print(
        f"ok: {artifact.policy_id}, {files} file hash(es), version, geometry and recorded "
        f"residency of {len(artifact.manifest.points)} point(s) match"
        f"{checked_text(artifact)}{retention_checked_text(artifact)}{retention}{fits}"
    )
    recorded = artifact.manifest.model.config_hash
    if geom is not None and geom.config_hash != recorded:
        print("note: same geometry, but another config.json than the policy was made with")


def list_command(args: argparse.Namespace) -> int:
    """Print every policy under the search roots, then a line for each damaged one."""
    roots = [Path(root) for root in args.root] if args.root else search_roots()
    whole, damaged = [], []
    for folder in find_folders(roots):
        try:
            whole.append(load_artifact(folder))
        except KvPolicyError as error:
            damaged.append(error)
    render.make_console().print(render.artifacts_view(whole))
    for error in damaged:
        _complain(error)
    return EXIT_BAD_INPUT if damaged else 0


def plan_command(args: argparse.Namespace) -> None:
    """Print a capacity plan."""
    geom = with_served_dtype(read_geometry(args.model), args.kv_dtype)
    found = resolve(args.policy, geom, point=args.point)
    plan = make_plan(
        found.policy,
        found.policy_id,
        memory_bytes=parse_bytes(args.memory),
        context=args.context,
        weight_bytes=None if args.weights_bytes is None else parse_bytes(args.weights_bytes),
        overhead_bytes=None if args.overhead_bytes is None else parse_bytes(args.overhead_bytes),
        page_size=args.page_size,
    )
    if args.json:
        _print_json(plan)
    else:
        render.make_console().print(render.plan_view(plan, geom))


if __name__ == "__main__":
    sys.exit(main())

"""``python -m kvpolicy``: make, show, verify and list policies, and plan capacity."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from kvpolicy import render
from kvpolicy.artifact import (
    Artifact,
    PointSpec,
    load_artifact,
    write_artifact,
)
from kvpolicy.errors import KvPolicyError, PolicyError
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.plan import make_plan, parse_bytes, with_served_dtype
from kvpolicy.store import BUILT_IN, find_folders, resolve, search_roots
from kvpolicy.windows import WindowPolicy

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"kvpolicy: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 after one line on stderr for bad input."""
    args = build_parser().parse_args(argv)
    try:
        args.command(args)
    except KvPolicyError as error:
        print(f"kvpolicy: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = _Parser(prog="python -m kvpolicy", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_new(commands)
    _add_plan(commands)
    show = _add(commands, "show", show_command, "print levels, windows and residency of a policy")
    show.add_argument("policy", help="artifact folder, or name[@version]")
    show.add_argument("--model", metavar="DIR", help="model folder, needed to look up by name")
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


def _add_new(commands) -> None:
    new = _add(commands, "new", new_command, "write a policy that needs no calibration")
    new.add_argument("--model", metavar="DIR", required=True, help="Hugging Face model folder")
    new.add_argument("--kind", choices=("full", "native", "uniform"), required=True)
    new.add_argument("--window", type=int, metavar="N", help="tokens, the current one counted")
    new.add_argument("--sinks", type=int, metavar="S", help="first tokens always kept (default 0)")
    new.add_argument("--out", metavar="DIR", required=True, help="artifacts root to write under")
    new.add_argument("--name", help="policy name (default: made from the kind)")


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


def new_command(args: argparse.Namespace) -> None:
    """Write an artifact and print its folder."""
    geom = read_geometry(args.model)
    policy = _new_policy(args, geom)
    name = args.name or _default_name(args, policy)
    if name in BUILT_IN and name != args.kind:
        raise PolicyError(f"policy name {name!r} is taken by a built-in policy; choose another")
    path = write_artifact(
        args.out,
        model_name=_model_name(args.model),
        name=name,
        points=[PointSpec("default", policy)],
    )
    print(path)


def _model_name(folder: str) -> str:
    """Folder name of a model as a policy store spells it: lower case, odd characters dashed."""
    return (
        re.sub(r"[^a-z0-9._-]+", "-", Path(folder).resolve().name.lower()).strip("-._") or "model"
    )


def _new_policy(args: argparse.Namespace, geom: ModelGeometry) -> WindowPolicy:
    if args.kind == "uniform":
        if args.window is None:
            raise PolicyError("--kind uniform needs --window N")
        return WindowPolicy.uniform(geom, args.window, args.sinks or 0)
    if args.window is not None or args.sinks is not None:
        raise PolicyError(f"--kind {args.kind} takes no --window or --sinks")
    return BUILT_IN[args.kind](geom)


def _default_name(args: argparse.Namespace, policy: WindowPolicy) -> str:
    return f"uniform-w{args.window}-s{policy.sinks}" if args.kind == "uniform" else args.kind


def show_command(args: argparse.Namespace) -> None:
    """Print an artifact's levels, windows and residency."""
    render.make_console().print(render.artifact_view(_find(args), args.point))


def _find(args: argparse.Namespace) -> Artifact:
    geom = read_geometry(args.model) if args.model else None
    if Path(args.policy).is_dir():
        return load_artifact(args.policy, geom)
    if geom is None:
        raise PolicyError(f"no folder {args.policy}; to look a policy up by name give --model DIR")
    found = resolve(args.policy, geom).artifact
    if found is None:
        raise PolicyError(f"{args.policy!r} is built in; write it with new --kind to show it")
    return found


def verify_command(args: argparse.Namespace) -> None:
    """Verify an artifact and print what was checked."""
    geom = read_geometry(args.model) if args.model else None
    artifact = load_artifact(args.policy, geom)
    fits = f", fits {args.model}" if geom else ""
    files = len(artifact.manifest.files)
    print(f"ok: {artifact.policy_id}, {files} file hash(es), version and geometry match{fits}")
    recorded = artifact.manifest.model.config_hash
    if geom is not None and geom.config_hash != recorded:
        print("note: same geometry, but another config.json than the policy was made with")


def list_command(args: argparse.Namespace) -> None:
    """Print every policy under the search roots; damaged ones are an error."""
    roots = [Path(root) for root in args.root] if args.root else search_roots()
    rows = []
    for folder in find_folders(roots):
        artifact = load_artifact(folder)
        points = ", ".join(point.name for point in artifact.manifest.points)
        rows.append((folder, artifact.manifest.model.name, artifact.policy_id, points))
    render.make_console().print(render.artifacts_table(rows))


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
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    else:
        render.make_console().print(render.plan_view(plan, geom))


if __name__ == "__main__":
    sys.exit(main())

"""``python -m kvpolicy new``: policies that need no calibration."""

from __future__ import annotations

import argparse

import msgspec

from kvpolicy.artifact import PointSpec, write_artifact
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.names import folder_name
from kvpolicy.retention.rule import RULES, RetentionRule
from kvpolicy.retention.tables import RetentionTables
from kvpolicy.retention.units import retention_units
from kvpolicy.store import BUILT_IN
from kvpolicy.windows import WindowPolicy

DEFAULT_THRESHOLD = 0.9
_RULE_OPTIONS = {
    name: name
    for name in (
        "observe", "alpha_scope", "pool", "keep_window", "gate", "floor", "share", "recent", "focus"
    )
} | {"retention_sinks": "sinks"}  # fmt: skip
"""Argument name -> field of the rule; ``--sinks`` is the windows'."""


def add_arguments(new: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    new.add_argument("--model", metavar="DIR", required=True, help="Hugging Face model folder")
    new.add_argument("--kind", choices=("full", "native", "uniform"), required=True)
    new.add_argument("--window", type=int, metavar="N", help="tokens, the current one counted")
    new.add_argument("--sinks", type=int, metavar="S", help="first tokens always kept (default 0)")
    new.add_argument("--out", metavar="DIR", required=True, help="artifacts root to write under")
    new.add_argument("--name", help="policy name (default: made from the kind and the rule)")
    group = new.add_argument_group("retention", "how prompts are frozen, with an uncompiled table")
    text = "freeze prompts by this rule; the options below change it"
    group.add_argument("--retention", choices=tuple(RULES), help=text)
    text = f"score a token needs to stay (default {DEFAULT_THRESHOLD:g})"
    group.add_argument("--threshold", type=float, metavar="X", help=text)
    group.add_argument("--observe", type=int, metavar="W", help="last positions that vote")
    scopes = ("global", "layer", "head")
    group.add_argument("--alpha-scope", choices=scopes, help="whose attention is averaged")
    group.add_argument("--pool", type=int, metavar="K", help="odd pooling kernel, 1 = none")
    keep = argparse.BooleanOptionalAction
    group.add_argument("--keep-window", action=keep, help="always keep the last W positions")
    group.add_argument("--gate", choices=("table", "off"), help="off: the budget alone decides")
    text = "this many best tokens stay whatever the threshold"
    group.add_argument("--floor", type=int, metavar="N", help=text)
    group.add_argument("--share", choices=("layer", "head"), help="one kept set per layer or head")
    text = "this many last tokens always stay"
    group.add_argument("--recent", type=int, metavar="N", help=text)
    text = "this many first tokens always stay"
    group.add_argument("--retention-sinks", type=int, metavar="N", help=text)
    text = "the last queries that the sources of a mix look at"
    group.add_argument("--focus", type=int, metavar="N", help=text)


def run(args: argparse.Namespace) -> None:
    """Write an artifact and print its folder."""
    geom = read_geometry(args.model)
    policy = _windows(args, geom)
    tables = _tables(args, policy)
    name = args.name or _default_name(args, policy, tables)
    if name in BUILT_IN and (name != args.kind or tables is not None):
        raise PolicyError(f"policy name {name!r} is taken by a built-in policy; choose another")
    path = write_artifact(
        args.out,
        model_name=folder_name(args.model),
        name=name,
        points=[PointSpec("default", policy)],
        retention=tables,
    )
    print(path)


def _windows(args: argparse.Namespace, geom: ModelGeometry) -> WindowPolicy:
    if args.kind == "uniform":
        if args.window is None:
            raise PolicyError("--kind uniform needs --window N")
        return WindowPolicy.uniform(geom, args.window, args.sinks or 0)
    if args.window is not None or args.sinks is not None:
        raise PolicyError(f"--kind {args.kind} takes no --window or --sinks")
    return BUILT_IN[args.kind](geom)


def _tables(args: argparse.Namespace, policy: WindowPolicy) -> RetentionTables | None:
    given = [o for o in ("threshold", *_RULE_OPTIONS) if getattr(args, o) is not None]
    if args.retention is None:
        if given:
            option = given[0].replace("_", "-")
            raise PolicyError(f"--{option} needs --retention {' or '.join(RULES)}")
        return None
    rule = _rule(args)
    if rule.gate == "off" and args.threshold is not None:
        raise PolicyError("--threshold needs a rule with --gate table")
    if not len(retention_units(policy)[0]):
        raise PolicyError(
            f"--retention freezes units without a window, and --kind {args.kind} leaves none of "
            "this model"
        )
    threshold = DEFAULT_THRESHOLD if args.threshold is None else args.threshold
    return RetentionTables.uniform(policy.geometry, rule, threshold=threshold)


def _rule(args: argparse.Namespace) -> RetentionRule:
    base = RULES[args.retention]
    given = {
        field: getattr(args, option)
        for option, field in _RULE_OPTIONS.items()
        if getattr(args, option) is not None
    }
    rule = msgspec.structs.replace(base, **given)
    return rule if rule == base else msgspec.structs.replace(rule, name=f"{base.name}-custom")


def _default_name(
    args: argparse.Namespace, policy: WindowPolicy, tables: RetentionTables | None
) -> str:
    windows = f"uniform-w{args.window}-s{policy.sinks}" if args.kind == "uniform" else args.kind
    return windows if tables is None else f"{windows}-{tables.rule.name}"

"""Which arm is judged where: retention in process, windows and URLs behind an API."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.errors import KvPolicyError
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.store import resolve
from loadtest.demo_workload import DTYPE_BYTES
from loadtest.errors import UserError, naming_flag
from loadtest.quality_suite.judging import (
    FULL,
    Judging,
    is_in_process,
    parse_counts,
    parse_names,
    user_errors,
)
from loadtest.quality_suite.options import NONE, PEERS
from loadtest.quality_suite.served import ServedArm, policy_arm, url_arm

ALL_PEERS = (*PEERS, "adakv_ea")


@dataclass(frozen=True)
class Arms:
    """All arms of a run. ``judging`` None: nothing is judged in process. ``geometry`` None: the
    model is only known by its tokenizer. ``against``: what differences are of."""

    judging: Judging | None
    served: tuple[ServedArm, ...]
    budgets: tuple[int, ...]
    geometry: ModelGeometry | None
    against: str | None

    @property
    def policies(self) -> set[str]:
        """Names of the user's own arms: what --fail-under is about."""
        own = self.judging.policies if self.judging else {}
        return {*own, *(arm.name for arm in self.served if arm.name != FULL)}


def find_arms(args: argparse.Namespace, model: Path) -> Arms:
    """Resolve policies, peers and URLs. Raises UserError naming the flag."""
    with user_errors():
        names = parse_names("--policies", args.policies or NONE)
        budgets = parse_counts("--budget-tokens", args.budget_tokens, 1)
    served = [url_arm(text) for text in args.url]
    if not names and args.peers in (None, NONE):
        return Arms(None, _distinct(served), budgets, None, None)
    geometry = naming_flag("--model", read_geometry, model).with_kv_dtype_bytes(DTYPE_BYTES)
    frozen = [name for name in names if _freezes(name, geometry)]
    started = [policy_arm(name, geometry) for name in names if name not in frozen]
    peers = _peers(args.peers, frozen)
    judging = None
    if frozen or peers:
        judging = Judging(model, geometry, frozen, peers, budgets, args.seed, args.threads)
    elif started and FULL not in names:
        started.insert(0, policy_arm(FULL, geometry))  # what they are compared with
    against = _against(args.against, frozen, peers)
    return Arms(judging, _distinct([*started, *served]), budgets, geometry, against)


def _freezes(name: str, geometry: ModelGeometry) -> bool:
    """True for what has retention tables, or is a rule: the judge's."""
    if is_in_process(name):
        return True
    try:
        return resolve(name, geometry).retention is not None
    except KvPolicyError:
        return False  # a point of one, or nothing: the served arm's error tells


def _peers(text: str | None, frozen: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return PEERS if frozen else ()
    with user_errors():
        return parse_names("--peers", text, ALL_PEERS)


def _against(name: str | None, frozen: Sequence[str], peers: Sequence[str]) -> str | None:
    arms = [*frozen, *peers]
    if name is None:
        return frozen[0] if frozen else None
    if name not in arms:
        raise UserError(f"--against {name!r} is judged by nobody here: give {', '.join(arms)}")
    return name


def _distinct(arms: Sequence[ServedArm]) -> tuple[ServedArm, ...]:
    names = [arm.name for arm in arms]
    if clash := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two served arms are called {clash[0]!r}: give --url NAME=URL")
    return tuple(arms)

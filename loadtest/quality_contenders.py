"""Who is compared: the full cache, a policy's points, and baselines that keep as much.

A baseline answers what a point's choice is worth: ``uniform`` gives every global unit the same
window, ``shuffled`` gives the point's own windows to other units. Both keep the point's sinks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvpolicy.geometry import LayerKind, ModelGeometry
from kvpolicy.residency import residency
from kvpolicy.store import ResolvedPolicy
from kvpolicy.windows import WindowPolicy
from loadtest.errors import UserError

PREFERRED_POINT = "tau-0.99"
MAX_SHUFFLES = 20
_BASELINE = re.compile(r"uniform|shuffled(?::([0-9]+))?")


class Kind(StrEnum):
    """What a contender is."""

    FULL = "full"
    POINT = "point"
    UNIFORM = "uniform"
    SHUFFLED = "shuffled"


@dataclass(frozen=True)
class Contender:
    """One server to measure. ``beside`` names the point that a baseline is compared with."""

    name: str
    kind: Kind
    policy: WindowPolicy
    beside: str | None = None


@dataclass(frozen=True)
class Baselines:
    """Which baselines were asked for: ``uniform`` or not, and how many shuffles."""

    uniform: bool
    shuffles: int


def parse_baselines(text: str) -> Baselines:
    """``uniform``, ``shuffled`` and ``shuffled:K``, comma-separated; ``none`` for none."""
    uniform, shuffles = False, 0
    for word in [] if text == "none" else text.split(","):
        match = _BASELINE.fullmatch(word)
        if match is None or not 1 <= int(match[1] or 1) <= MAX_SHUFFLES:
            raise UserError(
                f"--baselines {text!r} is not accepted: give uniform, shuffled or shuffled:K "
                f"(K from 1 to {MAX_SHUFFLES}), comma-separated, or none"
            )
        uniform = uniform or word == "uniform"
        shuffles = max(shuffles, 0 if word == "uniform" else int(match[1] or 1))
    return Baselines(uniform, shuffles)


def global_cells(geometry: ModelGeometry) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns, in a window matrix, of the units of global layers."""
    cells = [
        (row, head)
        for row, layer in enumerate(geometry.attention_layers)
        if layer.kind is LayerKind.GLOBAL
        for head in range(layer.num_kv_heads)
    ]
    rows, heads = zip(*cells, strict=True) if cells else ((), ())
    return np.array(rows, dtype=np.intp), np.array(heads, dtype=np.intp)


def uniform_like(policy: WindowPolicy, context: int) -> WindowPolicy:
    """One window for all global units: the smallest that keeps no less than ``policy`` does.

    Sinks are the policy's; what is kept is ``kvpolicy.residency`` at ``context`` tokens.
    """
    geometry = policy.geometry
    target = residency(policy, geometry, context)

    def enough(window: int) -> bool:
        candidate = WindowPolicy.uniform(geometry, window, policy.sinks)
        return residency(candidate, geometry, context) >= target

    low, high = 0, context  # a window of the context keeps everything
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return WindowPolicy.uniform(geometry, high, policy.sinks)


def shuffled_like(policy: WindowPolicy, seed: int, number: int = 1) -> WindowPolicy:
    """``policy``'s windows dealt anew to the global units: the same windows, other heads."""
    cells = global_cells(policy.geometry)
    windows = policy.windows.copy()
    windows[cells] = np.random.default_rng([seed, number]).permutation(windows[cells])
    return WindowPolicy(policy.geometry, windows, policy.sinks)


def choose_points(
    found: ResolvedPolicy, asked: Sequence[str] | None, beside: str | None
) -> tuple[list[str], str]:
    """Points to measure and the one that baselines are compared with, which is among them.

    Without ``asked`` all of the artifact's points; without ``beside`` ``tau-0.99`` if there is
    one, else the default point. Raises UserError for an unknown name or a built-in policy.
    """
    if found.artifact is None:
        raise UserError(
            f"--policy {found.policy_id} is built in and has no points: give an artifact"
        )
    manifest = found.artifact.manifest
    known = [point.name for point in manifest.points]
    for flag, names in (("--point", asked or ()), ("--baseline-point", [beside] if beside else ())):
        for name in names:
            if name not in known:
                raise UserError(f"{flag} {name!r} is not in the policy; it has: {', '.join(known)}")
    fallback = PREFERRED_POINT if PREFERRED_POINT in known else manifest.default_point
    beside = beside or (fallback if not asked or fallback in asked else asked[0])
    chosen = {*(asked or known), beside}
    return [name for name in known if name in chosen], beside


def line_up(
    found: ResolvedPolicy,
    geometry: ModelGeometry,
    points: Sequence[str],
    beside: str,
    baselines: Baselines,
    context: int,
    seed: int,
) -> list[Contender]:
    """All contenders in the order they are measured, ``full`` first."""
    matrices = {name: found.artifact.policy(name, geometry) for name in points}
    base = matrices[beside]
    entries = [Contender("full", Kind.FULL, WindowPolicy.full(geometry))]
    entries += [Contender(name, Kind.POINT, policy) for name, policy in matrices.items()]
    if baselines.uniform:
        entries.append(Contender("uniform", Kind.UNIFORM, uniform_like(base, context), beside))
    for number in range(1, baselines.shuffles + 1):
        name = "shuffled" if baselines.shuffles == 1 else f"shuffled-{number}"
        shuffled = shuffled_like(base, seed, number)
        entries.append(Contender(name, Kind.SHUFFLED, shuffled, beside))
    names = [entry.name for entry in entries]
    if clash := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--policy: a point may not be called {clash[0]!r} here")
    return entries

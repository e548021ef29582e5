"""The budget selector: a share of the dense cache picks the matrix of an artifact to serve.

Every tau of a calibration is a window matrix of its own (design section 3); serving and the command
line choose among them by the same rule, here.
"""

from __future__ import annotations

import math

import msgspec

from kvpolicy.artifact import Artifact
from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.residency import residency
from kvpolicy.windows import WindowPolicy


class Candidate(msgspec.Struct, frozen=True):
    """One point as the selector saw it: ``residency`` is exact at the selection's context."""

    point: str
    tau: float | None
    fidelity: float | None
    residency: float
    fits: bool


class Selection(msgspec.Struct, frozen=True):
    """The chosen point, why, and every point it was chosen from (in the artifact's order).

    ``budget`` and ``residency`` are shares of the global units' tokens at ``context`` tokens.
    """

    policy_id: str
    point: str
    tau: float | None
    residency: float
    budget: float
    context: int
    candidates: tuple[Candidate, ...]


def select_point(
    artifact: Artifact,
    budget: float,
    context: int | None = None,
    geom: ModelGeometry | None = None,
) -> Selection:
    """Choose the point to serve: of those that fit the budget, the one with the highest tau.

    A point fits if its exact residency at ``context`` is at most ``budget``. Points without tau
    rank below any tau; ties go to the lower residency, then to the name that sorts first.

    Args:
        artifact: where to choose.
        budget: share of the dense cache of the global layers, in (0, 1].
        context: tokens a request; the model's max context if None.
        geom: the served model (its max context may differ from the recorded one's).

    Raises:
        PolicyError: budget or context out of range, or no point fits.
    """
    geom = geom or artifact.geometry
    budget = check_budget(budget)
    context = check_context(context, geom)
    candidates = tuple(
        _candidate(artifact, index, budget, context, geom)
        for index in range(len(artifact.manifest.points))
    )
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        least = min(candidates, key=lambda c: (c.residency, c.point))
        raise PolicyError(
            f"no point of {artifact.policy_id} fits residency {budget:g} at {context} tokens; "
            f"the smallest is {least.residency:.6f} (point {least.point})"
        )
    best = min(fitting, key=_rank)
    return Selection(
        policy_id=artifact.policy_id,
        point=best.point,
        tau=best.tau,
        residency=best.residency,
        budget=budget,
        context=context,
        candidates=candidates,
    )


def check_budget(budget: float) -> float:
    """``budget`` as a float if it is a number in (0, 1]. Raises PolicyError."""
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not number or not 0 < budget <= 1:  # false for NaN too
        raise PolicyError(f"residency must be a number above 0 and at most 1, found {budget!r}")
    return float(budget)


def check_context(context: int | None, geom: ModelGeometry) -> int:
    """``context`` in tokens, or the model's longest if None. Raises PolicyError out of range."""
    longest = geom.max_context
    if context is None:
        return longest
    if isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= longest:
        raise PolicyError(
            f"context must be 1 to {longest} tokens (the model's longest), found {context!r}"
        )
    return context


def _candidate(
    artifact: Artifact, index: int, budget: float, context: int, geom: ModelGeometry
) -> Candidate:
    point = artifact.manifest.points[index]
    policy = WindowPolicy(geom, artifact.windows[index], artifact.manifest.sinks)
    share = residency(policy, geom, context)
    return Candidate(point.name, point.tau, point.fidelity, share, share <= budget)


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    tau = -math.inf if candidate.tau is None else candidate.tau
    return (-tau, candidate.residency, candidate.point)

"""Arms that need no other library: the full cache, policies of our own, and recency.

An arm is any function ``(judged, budget) -> positions``: int64 [U, width], the prompt positions
that each freezing unit keeps, -1 where there is none, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.judge.ablations import UTILITY, ablated, split
from calib_cluster.judge.model import Judged, View
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.errors import KvPolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import RULES, DeviceTables, RetentionTables, retain, retention_units
from kvpolicy.store import resolve

Arm = Callable[[Judged, int], torch.Tensor]
FULL, RECENCY, NOTHING = "full", "recency", "nothing"


class PolicyArm:
    """Retention of our own, by the function that the engine calls.

    Args:
        tables: rule and compiled numbers.
        units: of the model.
        device: of the model.
        plain_mass: score without eq. 4's value ratio.
    """

    def __init__(
        self,
        tables: RetentionTables,
        units: FreezingUnits,
        device="cpu",
        plain_mass: bool = False,
    ) -> None:
        self._plain_mass = plain_mass
        self._layers = torch.from_numpy(units.layers).to(device)
        self._heads = torch.from_numpy(units.heads).to(device)
        self._tables = DeviceTables.of(tables, self._layers, self._heads, device)

    @torch.inference_mode()
    def __call__(self, judged: Judged, budget: int) -> torch.Tensor:
        """Raises CalibrationError if the prompt was not observed as the rule wants."""
        seen, rule = judged.prefill, self._tables.tables.rule
        wanted = View.wanted(rule, judged.view)
        if judged.view.of(seen.length) != wanted.of(seen.length):
            raise CalibrationError(
                f"rule {rule.name} needs the prompt's end seen through {wanted}, it was through "
                f"{judged.view}"
            )
        focus = seen.focus(self._query_weights(seen.squares.shape[1])) if rule.mixes else None
        norms = torch.ones_like(seen.value_norms) if self._plain_mass else seen.value_norms
        retained = retain(
            seen.mass, norms, self._layers, self._heads, self._tables, budget,
            seen.nll_sum, seen.nll_count, focus,
        )  # fmt: skip
        return retained.kept.positions

    def _query_weights(self, group: int) -> torch.Tensor:
        """float32 [U, G] of a mix: the weight of each query head that a unit serves."""
        table = torch.from_numpy(self._tables.tables.mix.query_weights.copy())
        columns = self._heads[:, None] * group + torch.arange(group, device=self._heads.device)
        return table.to(self._heads.device)[self._layers[:, None], columns]


def recency(judged: Judged, budget: int) -> torch.Tensor:
    """The last ``budget`` tokens."""
    units, length = judged.prefill.mass.shape
    last = torch.arange(max(0, length - budget), length, device=judged.prefill.mass.device)
    return last.expand(units, -1)


def nothing(judged: Judged, budget: int) -> torch.Tensor:
    """The last token alone, whatever the budget: what a task scores without its prompt."""
    return recency(judged, 1)


@dataclass(frozen=True)
class OwnArm:
    """An arm that needs no tables, and what is said of it."""

    arm: Arm
    title: str


OWN_ARMS = {
    RECENCY: OwnArm(recency, RECENCY),
    NOTHING: OwnArm(nothing, "nothing but the prompt's last token"),
}


@dataclass(frozen=True)
class Policy:
    """A retention policy by the ``name`` it was asked for; ``title`` says exactly which it is.
    ``plain_mass``: tokens are scored without eq. 4's value ratio."""

    name: str
    title: str
    tables: RetentionTables
    plain_mass: bool = False


def find_policy(spec: str, geometry: ModelGeometry) -> Policy:
    """A rule's name (with uniform tables), or an artifact's folder or ``name[@version]``; with
    ``~PART`` after it, without that part (``ablations``).

    Raises:
        CalibrationError: not found, of another model, without retention tables, or with windows
            of its own: the judge measures retention alone.
    """
    base, part = split(spec)
    found = _find(base, geometry)
    if not part:
        return found
    title = f"{found.title} without {part}"
    return Policy(spec, title, ablated(found.tables, part), plain_mass=part == UTILITY)


def _find(spec: str, geometry: ModelGeometry) -> Policy:
    if spec in RULES:
        tables = RetentionTables.uniform(geometry, RULES[spec])
        return Policy(spec, f"rule {spec} ({RULES[spec].options}), uniform tables", tables)
    try:
        found = resolve(spec, geometry)
    except KvPolicyError as error:
        rules = ", ".join(RULES)
        raise CalibrationError(f"--policies {spec}: {error}; or a rule: {rules}") from error
    if found.retention is None:
        raise CalibrationError(
            f"--policies {spec}: {found.policy_id} has no retention tables, nothing to judge"
        )
    units, all_units = len(retention_units(found.policy)[0]), len(FreezingUnits.of(geometry))
    if units != all_units:
        raise CalibrationError(
            f"--policies {spec}: {found.policy_id} gives windows to {all_units - units} of "
            f"{all_units} units; the judge measures retention without windows"
        )
    return Policy(spec, found.policy_id, found.retention)

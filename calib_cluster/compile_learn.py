"""How tables are fitted: the settings of a compile, and one table's horizon-1 CQL."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from calib_cluster.cql import PAPER, CellStatistics, Recipe, converge, solve, train
from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.bandit import BETA
from calib_cluster.rewards.risk import ENTROPY_BINS, PERPLEXITY_BINS

METHODS = ("exact", "converged", "paper")


class CompileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hyperparameters of a compile; the defaults are the paper's, but for ``method``.

    Fields: ``alpha`` of eq. 1; ``beta`` of the gate's penalty beta / T; ``method``: ``exact``
    (``cql.solve``), ``converged`` (AdamW until it stops) or ``paper`` (AdamW by ``recipe``);
    ``joint``: False fits each table without regard to the other; ``baseline``: rewards are relative
    to their prompt's mean, so that the best action tried in a cell is above 0 and untried ones,
    which alpha = 0 leaves there, cannot win; ``entropy_bins`` and
    ``perplexity_bins``, whose edges are quantiles over the prompts; ``max_rounds`` of alternation;
    ``even``: of a rule that mixes, the part of the budget that is dealt to all units evenly.
    """

    alpha: float = 0.75
    beta: float = BETA
    method: Literal["exact", "converged", "paper"] = "exact"
    joint: bool = True
    baseline: bool = True
    entropy_bins: int = ENTROPY_BINS
    perplexity_bins: int = PERPLEXITY_BINS
    max_rounds: int = 50
    even: float = 0.35
    recipe: Recipe = PAPER

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise CalibrationError(
                f"method {self.method!r} is not accepted: give {', '.join(METHODS)}"
            )
        if min(self.entropy_bins, self.perplexity_bins, self.max_rounds) < 1 or self.beta < 0:
            raise CalibrationError("bins and rounds must be at least 1 and beta at least 0")
        if not 0 < self.even <= 1:
            raise CalibrationError(f"the even part must be in (0, 1], found {self.even:g}")


def learn(
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    shape: tuple[int, int],
    settings: CompileSettings,
) -> tuple[np.ndarray, CellStatistics, float]:
    """Q, the standardised statistics behind it, and the worst residual."""
    statistics, scale = CellStatistics.of(states, actions, rewards, shape).standardised()
    if settings.method == "exact":
        found = solve(statistics, settings.alpha)
    elif settings.method == "converged":
        found = converge(statistics, settings.alpha)
    else:
        scaled = (rewards - scale.mean) / scale.deviation
        found = train(states, actions, scaled, shape, settings.alpha, settings.recipe)
    return found.q, statistics, float(found.residual.max())

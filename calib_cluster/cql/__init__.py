"""Horizon-1 conservative Q-learning over a table: eq. 1 of CompilerKV.

Every state (a kv head, or a layer in a risk cell) is a bandit of its own. ``statistics`` holds all
that eq. 1 needs of the records, ``solve`` minimises it exactly, ``train`` as the paper does, and
``decide`` reads off the actions.
"""

from calib_cluster.cql.decide import Choice, decide
from calib_cluster.cql.objective import gradient, objective, residual
from calib_cluster.cql.solve import Solution, solve
from calib_cluster.cql.statistics import CellStatistics, Scale
from calib_cluster.cql.train import CONVERGED, PAPER, Recipe, Schedule, Trained, converge, train

__all__ = [
    "CONVERGED",
    "PAPER",
    "CellStatistics",
    "Choice",
    "Recipe",
    "Scale",
    "Schedule",
    "Solution",
    "Trained",
    "converge",
    "decide",
    "gradient",
    "objective",
    "residual",
    "solve",
    "train",
]

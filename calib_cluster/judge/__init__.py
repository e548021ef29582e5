"""The offline judge: what retention policies and their peers cost answers, at equal kept tokens.

A prompt is prefilled once; every arm then chooses what to keep of it, and the answer is scored
reading only that. In code: ``make_items(load_texts(...), ...)``, a ``JudgedModel``, and
``measure(model, model.judge_case(item.case(protocol)), arms, budgets)``, where an arm is any
function ``(Judged, budget) -> positions``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calib_cluster.judge.arms import Arm, PolicyArm, find_policy, recency
    from calib_cluster.judge.haystack import load_texts
    from calib_cluster.judge.items import AGNOSTIC, AWARE, PLAIN, PROTOCOLS, Case, Item
    from calib_cluster.judge.model import Judged, JudgedModel, LayerSeen, View
    from calib_cluster.judge.peers import PEERS, PeerArm
    from calib_cluster.judge.scoring import Score, measure
    from calib_cluster.judge.tasks import TASKS, make_items

# The command line's help must not load torch: these are imported when first asked for.
_MODULES = {
    "arms": ("Arm", "PolicyArm", "find_policy", "recency"),
    "haystack": ("load_texts",),
    "items": ("AGNOSTIC", "AWARE", "PLAIN", "PROTOCOLS", "Case", "Item"),
    "model": ("Judged", "JudgedModel", "LayerSeen", "View"),
    "peers": ("PEERS", "PeerArm"),
    "scoring": ("Score", "measure"),
    "tasks": ("TASKS", "make_items"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AGNOSTIC",
    "AWARE",
    "PEERS",
    "PLAIN",
    "PROTOCOLS",
    "TASKS",
    "Arm",
    "Case",
    "Item",
    "Judged",
    "JudgedModel",
    "LayerSeen",
    "PeerArm",
    "PolicyArm",
    "Score",
    "View",
    "find_policy",
    "load_texts",
    "make_items",
    "measure",
    "recency",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

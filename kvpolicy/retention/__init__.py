"""CompilerKV's online half: which prompt tokens a unit keeps when its cache is frozen.

Algorithm 1 of the paper as pure functions, plus named options that depart from it (``rule``).
``rule``, ``tables`` and ``units`` need numpy only; the tensor functions load torch on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvpolicy.retention.mix_tables import MixTables
from kvpolicy.retention.rule import RULES, SOURCES, RetentionRule
from kvpolicy.retention.tables import RetentionTables
from kvpolicy.retention.units import retention_units

if TYPE_CHECKING:
    from kvpolicy.retention.freeze import DeviceTables, Retained, retain
    from kvpolicy.retention.mix import Focus
    from kvpolicy.retention.risk import bin_of, semantic_risk, structural_risk
    from kvpolicy.retention.scores import (
        alpha,
        focus_mass,
        layer_max,
        pooled,
        utility,
        value_ratio,
        window_mass,
    )
    from kvpolicy.retention.select import Kept

# Reading a policy must not load torch: these names are imported when first asked for. The function
# select is not among them, its module has that name: from kvpolicy.retention.select import select.
_TORCH_NAMES = {
    "DeviceTables": "freeze",
    "Retained": "freeze",
    "retain": "freeze",
    "Focus": "mix",
    "bin_of": "risk",
    "semantic_risk": "risk",
    "structural_risk": "risk",
    "alpha": "scores",
    "focus_mass": "scores",
    "layer_max": "scores",
    "pooled": "scores",
    "utility": "scores",
    "value_ratio": "scores",
    "window_mass": "scores",
    "Kept": "select",
}

__all__ = [
    "RULES",
    "SOURCES",
    "DeviceTables",
    "Focus",
    "Kept",
    "MixTables",
    "Retained",
    "RetentionRule",
    "RetentionTables",
    "alpha",
    "bin_of",
    "focus_mass",
    "layer_max",
    "pooled",
    "retain",
    "retention_units",
    "semantic_risk",
    "structural_risk",
    "utility",
    "value_ratio",
    "window_mass",
]


def __getattr__(name: str) -> object:
    if name not in _TORCH_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_TORCH_NAMES[name]}"), name)

"""The retention rule: every choice of the freeze that is not a compiled number."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from kvpolicy.errors import PolicyError
from kvpolicy.names import check_name

_CHOICES = {
    "alpha_scope": ("global", "layer", "head"),
    "gate": ("table", "off"),
    "share": ("layer", "head"),
    "mix": ("off", "table"),
}
_LEAST = {"observe": 1, "pool": 1, "floor": 1, "recent": 1, "sinks": 0, "focus": 1}

SOURCES = ("window", "focus", "retrieval")
"""Orders of tokens that a mix draws from (see ``kvpolicy.retention.mix``)."""


# omit_defaults: a rule that does not use an option is written as before there was that option
class RetentionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a prompt's tokens are scored and selected; the defaults are the paper's Algorithm 1.

    Fields:
        name: what people call the rule.
        observe: observation window, in last prompt positions; W = min(observe, T).
        alpha_scope: what the window mass of eq. 4 is averaged over: every unit (the paper), the
            units of the layer, or the unit alone.
        pool: odd kernel of an average pooling of that mass along T; 1 = none (the paper).
        keep_window: the last W positions are always kept, inside the budget.
        gate: ``table``: tokens below the compiled threshold are dropped (eq. 8); ``off``: the
            budget alone decides.
        floor: this many top-scored tokens stay even below the threshold (within the budget).
        share: ``layer``: one kept set for all heads of a layer (eq. 6); ``head``: each its own.
        mix: ``table``: instead of by eq. 4 to 6, each unit orders tokens by its compiled mixture of
            ``SOURCES`` and keeps its compiled share of the budget; needs ``share`` head and
            ``gate`` off.
        sinks: this many first tokens are always kept, inside the budget.
        recent: this many last tokens are always kept, inside the budget (more with
            ``keep_window``).
        focus: the last queries that the ``focus`` and ``retrieval`` sources of a mix look at.

    Raises:
        PolicyError: a value out of range, or a mix with a gate, with shared sets or with a focus
            beyond the observation window.
    """

    name: str
    observe: int = 64
    alpha_scope: Literal["global", "layer", "head"] = "global"
    pool: int = 1
    keep_window: bool = False
    gate: Literal["table", "off"] = "table"
    floor: int = 1
    share: Literal["layer", "head"] = "layer"
    mix: Literal["off", "table"] = "off"
    sinks: int = 0
    recent: int = 1
    focus: int = 8

    def __post_init__(self) -> None:
        for field in _CHOICES:  # omit_defaults compares by identity, which pickling loses
            if isinstance(value := getattr(self, field), str):
                msgspec.structs.force_setattr(self, field, sys.intern(value))
        check_name(self.name, "retention rule name")
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PolicyError(
                    f"retention {field} must be an integer >= {least}, found {value!r}"
                )
        if self.pool % 2 == 0:
            raise PolicyError(f"retention pool must be an odd kernel, found {self.pool}")
        if not isinstance(self.keep_window, bool):
            raise PolicyError(f"retention keep_window must be a bool, found {self.keep_window!r}")
        for field, accepted in _CHOICES.items():
            value = getattr(self, field)
            if value not in accepted:
                raise PolicyError(
                    f"retention {field} must be {' or '.join(accepted)}, found {value!r}"
                )
        if self.mixes:
            self._check_mix()

    def _check_mix(self) -> None:
        if (self.gate, self.share) != ("off", "head"):
            raise PolicyError("retention mix=table needs gate=off and share=head")
        if self.focus > self.observe:
            raise PolicyError(
                f"retention focus must be within the {self.observe} observed positions, found "
                f"{self.focus}"
            )

    @property
    def mixes(self) -> bool:
        """True if tokens are ordered by compiled mixtures."""
        return self.mix == "table"

    @property
    def last_kept(self) -> int:
        """This many last tokens are always kept, as far as the budget allows."""
        return max(self.recent, self.observe if self.keep_window else 1)

    @property
    def least(self) -> int:
        """Fewest tokens a unit of a mix keeps, if the budget allows: those always kept."""
        return self.sinks + self.last_kept

    @property
    def compiled_budgets(self) -> bool:
        """True if the tables have a row per budget."""
        return self.gate == "table" or self.mixes

    @property
    def departures(self) -> dict[str, str | int | bool]:
        """Options that differ from the paper's."""
        return {
            field.name: getattr(self, field.name)
            for field in msgspec.structs.fields(self)
            if not field.required and getattr(self, field.name) != field.default
        }

    @property
    def options(self) -> str:
        """Every option but the name, as ``observe=64 alpha_scope=global …``; those beyond the
        paper's algorithm (from ``mix`` on) only if they are used."""
        values, names = msgspec.structs.asdict(self), self.__struct_fields__
        beyond = names.index("mix")
        shown = [name for i, name in enumerate(names) if i < beyond or name in self.departures]
        return " ".join(f"{name}={values[name]}" for name in shown[1:])


RULES: dict[str, RetentionRule] = {
    "paper": RetentionRule("paper"),
    "head": RetentionRule(
        "head", alpha_scope="head", pool=5, keep_window=True, gate="off", share="head"
    ),
    "mix": RetentionRule(
        "mix", alpha_scope="head", pool=5, gate="off", share="head", mix="table", sinks=4, recent=16
    ),
}
"""``paper``: Algorithm 1 literally. ``head``: every unit keeps its own pooled top tokens. ``mix``:
every unit its compiled share of the budget, by its compiled mixture of orders."""

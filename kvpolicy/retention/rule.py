"""The retention rule: every choice of the freeze that is not a compiled number."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvpolicy.errors import PolicyError
from kvpolicy.names import check_name

_CHOICES = {
    "alpha_scope": ("global", "layer", "head"),
    "gate": ("table", "off"),
    "share": ("layer", "head"),
}


class RetentionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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

    Raises:
        PolicyError: a value out of range.
    """

    name: str
    observe: int = 64
    alpha_scope: Literal["global", "layer", "head"] = "global"
    pool: int = 1
    keep_window: bool = False
    gate: Literal["table", "off"] = "table"
    floor: int = 1
    share: Literal["layer", "head"] = "layer"

    def __post_init__(self) -> None:
        check_name(self.name, "retention rule name")
        for field in ("observe", "pool", "floor"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PolicyError(f"retention {field} must be an integer >= 1, found {value!r}")
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
        """Every option but the name, as ``observe=64 alpha_scope=global …``."""
        values = msgspec.structs.asdict(self)
        return " ".join(f"{field}={values[field]}" for field in self.__struct_fields__[1:])


RULES: dict[str, RetentionRule] = {
    "paper": RetentionRule("paper"),
    "head": RetentionRule(
        "head", alpha_scope="head", pool=5, keep_window=True, gate="off", share="head"
    ),
}
"""``paper``: Algorithm 1 literally. ``head``: every unit keeps its own pooled top tokens."""

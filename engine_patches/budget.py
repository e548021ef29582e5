"""How many prompt tokens a request keeps once it is frozen: the server's flags, or its own wish.

A request speaks through SGLang's ``custom_params`` (a sampling parameter, also of the OpenAI API):
``kv_retention`` "on" or "off", ``kv_budget_tokens`` or ``kv_budget_ratio``, and ``kv_positions``
true to get the kept positions back in ``meta_info``.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

PREFIX = "kv_"
KEYS = ("kv_retention", "kv_budget_tokens", "kv_budget_ratio", "kv_positions")


class BudgetError(ValueError):
    """A budget that cannot be served; one line, for the client or the command line."""


class Budget(msgspec.Struct, frozen=True):
    """Kept prompt tokens of each layer: ``tokens``, or else ``ratio`` of the prompt."""

    tokens: int | None = None
    ratio: float | None = None

    def of(self, prompt: int) -> int:
        """Tokens kept of a prompt of ``prompt`` tokens, at least 1."""
        if self.tokens is not None:
            return self.tokens
        # a share such as .07 of 100 is a hair above 7 in binary
        return max(1, math.ceil(round((self.ratio or 0.0) * prompt, 6)))

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.tokens is not None else f"{self.ratio:g} of a prompt"


class Wish(msgspec.Struct, frozen=True):
    """What one request gets: its budget, None to keep everything; whether it lists positions."""

    budget: Budget | None
    positions: bool = False


def tokens_budget(value: Any, name: str) -> Budget:
    """A budget in tokens. Raises BudgetError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BudgetError(f"{name} must be a whole number of tokens, 1 or more; found {value!r}")
    return Budget(tokens=value)


def ratio_budget(value: Any, name: str) -> Budget:
    """A budget as a share of the prompt. Raises BudgetError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:
        raise BudgetError(f"{name} must be a share of the prompt, above 0 up to 1; found {value!r}")
    return Budget(ratio=float(value))


def wish_of(custom_params: Any, default: Budget | None, retains: bool) -> Wish:
    """What a request asks for.

    Args:
        custom_params: the request's, any JSON value; keys that do not start with ``kv_`` are
            somebody else's.
        default: the server's budget, None if it freezes only on request.
        retains: whether the served policy has retention tables.

    Raises:
        BudgetError: a malformed or unknown ``kv_`` parameter, or one this server cannot follow.
    """
    params = custom_params if isinstance(custom_params, dict) else {}
    ours = {key: params[key] for key in params if str(key).startswith(PREFIX)}
    if not ours:
        return Wish(default)
    unknown = sorted(set(ours) - set(KEYS))
    if unknown:
        raise BudgetError(f"custom_params has no {unknown[0]!r}; RaggedKV takes {', '.join(KEYS)}")
    if not retains:
        raise BudgetError(f"{sorted(ours)[0]} needs a server whose --kv-policy can freeze prompts")
    return Wish(_budget(ours, default), _flag(ours.get("kv_positions", False)))


def _budget(ours: dict[str, Any], default: Budget | None) -> Budget | None:
    retention = ours.get("kv_retention")
    if retention not in (None, "on", "off"):
        raise BudgetError(f'kv_retention must be "on" or "off"; found {retention!r}')
    if "kv_budget_tokens" in ours and "kv_budget_ratio" in ours:
        raise BudgetError("give kv_budget_tokens or kv_budget_ratio, not both")
    budget = default
    if "kv_budget_tokens" in ours:
        budget = tokens_budget(ours["kv_budget_tokens"], "kv_budget_tokens")
    if "kv_budget_ratio" in ours:
        budget = ratio_budget(ours["kv_budget_ratio"], "kv_budget_ratio")
    if retention == "off":
        if budget is not default:
            raise BudgetError('kv_retention "off" takes no budget')
        return None
    if retention == "on" and budget is None:
        raise BudgetError('kv_retention "on" needs a budget: this server has no default')
    return budget


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BudgetError(f"kv_positions must be true or false; found {value!r}")
    return value

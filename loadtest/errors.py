"""The one exception that the command line turns into a single line on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvpolicy.errors import KvPolicyError

T = TypeVar("T")


class UserError(Exception):
    """Bad input or environment: the message names what was wrong and what is accepted.

    ``python -m loadtest`` prints the message as one line on stderr and exits with status 2.
    """


def in_range(flag: str, value: int, low: int, high: int | None = None) -> None:
    """Raise UserError, naming ``flag`` and what it takes, unless low <= value <= high."""
    if value < low or (high is not None and value > high):
        accepted = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{flag} {value} is not accepted: give {accepted}")


def naming_flag(flag: str, function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, with a KvPolicyError turned into a UserError that names the flag."""
    try:
        return function(*args)
    except KvPolicyError as error:
        raise UserError(f"{flag}: {error}") from error

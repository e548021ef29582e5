"""A line of progress on stderr that changes in place on a terminal, and is left out of a pipe."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.status import Status


class Say:
    """``with Say(name, console) as say: say("now this")``."""

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._status = Status(name, console=console) if console.is_terminal else None

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._name}: {text}")

"""How far a run is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from calib_cluster.progress import clock

ETA_SECONDS = 600.0  # kinds of cases differ in length: average over many
LOG_SECONDS = 30.0


class CaseProgress:
    """A context of ``total`` cases, ``done`` of them in an earlier run; writes to stderr."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._resumed = total, done, done
        self._console = Console(stderr=True, highlight=False, markup=False)
        columns = (
            TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TextColumn("cases"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(
            *columns, console=self._console, speed_estimate_period=ETA_SECONDS,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("cases", total=total, completed=done)
        self._began = self._told = time.monotonic()

    def __enter__(self) -> CaseProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._bar.stop()

    def advance(self) -> None:
        """One more case is finished."""
        self._done += 1
        self._bar.advance(self._task)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told >= LOG_SECONDS:
            self._told = now
            elapsed = now - self._began
            left = elapsed / (self._done - self._resumed) * (self._total - self._done)
            self._console.print(
                f"{self._done} of {self._total} cases, elapsed {clock(elapsed)}, ETA {clock(left)}"
            )

"""What both commands share: a line of progress a stage, results on disk after each side."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from kvpolicy.render import make_console
from loadtest.capacity.flags import Setup
from loadtest.capacity.page import write_report
from loadtest.capacity.results import BatchResult, ContextResult, load_beside, save
from loadtest.capacity.serve import Remote, started
from loadtest.capacity.sides import Side
from loadtest.capacity.terminal import show
from loadtest.freeze_results import load_now
from loadtest.say import Say
from loadtest.servers import Server

Result = BatchResult | ContextResult
Record = TypeVar("Record")


class Stages:
    """Runs each side's server in turn, and keeps what was measured.

    Args:
        command: its name, also a part of the logs' names.
        make: the result of the sides so far; called with (records, load averages, finished).
    """

    def __init__(
        self, command: str, setup: Setup, make: Callable[[list, list[float], bool], Result]
    ) -> None:
        self.command, self.setup, self._make = command, setup, make
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._loads: list[float] = [load_now()]

    def run(
        self,
        measure: Callable[[Side, Server | Remote, Callable[[str], None]], Record],
        told: Callable[[Record], str],
    ) -> Result:
        """``measure`` every side; what ``told`` says of it is a line on stderr.

        Side effects: servers, one at a time, ended on every way out; result and report are written
        after each side, and stay if a later one fails or is interrupted. Raises UserError.
        """
        records: list[Record] = []
        try:
            for side in self.setup.sides:
                records.append(self._side(side, measure))
                self._tell(f"{side.name}: {told(records[-1])}")
                self._keep(records, finished=len(records) == len(self.setup.sides))
        except BaseException:
            kept = f"{len(records)} of {len(self.setup.sides)} servers were measured"
            where = f", kept in {self.setup.out}" if records else ""
            self._tell(f"stopped: {kept}{where}")
            raise
        return self._result(records, finished=True)

    def _side(self, side: Side, measure: Callable[..., Record]) -> Record:
        setup = self.setup
        self._loads.append(load_now())
        log = setup.out / f"{self.command}-{side.role}.log"
        with Say(side.name, self._console) as say:
            if side.url is None:
                self._tell(f"{side.name}: starting the server (log: {log})")
            with started(side, setup.model, log, setup.port, setup.threads) as server:
                return measure(side, server, self._also_in_pipe(side, say))

    def _also_in_pipe(self, side: Side, say: Callable[[str], None]) -> Callable[[str], None]:
        """``say`` that, where lines cannot change in place, writes each new stage once."""
        if self._console.is_terminal:
            return say
        seen: set[str] = set()

        def tell(text: str) -> None:
            stage = text.partition(":")[0]
            if stage not in seen:
                seen.add(stage)
                self._tell(f"{side.name}: {stage}")

        return tell

    def _keep(self, records: list, finished: bool) -> None:
        result = self._result(records, finished)
        save(result, self.setup.out)
        report(result, self.setup)

    def _result(self, records: list, finished: bool) -> Result:
        return self._make(list(records), [*self._loads, load_now()], finished)

    def _tell(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True)


def report(result: Result, setup: Setup) -> Path:
    """Write ``report.html``: the result, and the other command's on the same model beside it."""
    is_batch = isinstance(result, BatchResult)
    other = load_beside(setup.out, ContextResult if is_batch else BatchResult)
    if other is not None and other.model != result.model:
        other = None
    batch, context = (result, other) if is_batch else (other, result)
    return write_report(batch, context, setup.quality, setup.out)


def finish(result: Result, setup: Setup) -> None:
    """Write everything once more with the last load average, and print table and meaning."""
    saved = save(result, setup.out)
    page = report(result, setup)
    sys.stderr.flush()
    show(result, [saved, page], make_console())

"""What a policy costs in quality, measured through the served engine in paired comparisons.

Every contender (the full cache, the policy's points, baselines that keep as much) is served with
the same flags and gets the same prompts: held-out texts to score, and needles to find in others.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from loadtest.model_fetch import sha256_file
from loadtest.quality_contenders import Contender
from loadtest.quality_measure import Bench, Fleet, Tick
from loadtest.quality_report import compare, show
from loadtest.quality_results import (
    SCHEMA_VERSION,
    Result,
    Row,
    model_fingerprint,
    read_rows,
    row_fingerprint,
    versions,
    write_result,
)
from loadtest.quality_setup import ANSWER_TOKENS, CHUNK, Setup, make_setup
from loadtest.quality_texts import Prompts, build_prompts, load_texts

NARROWEST, WIDEST = 80, 100  # columns; what a pipe gets, and what a wide terminal gets
ETA_SECONDS = 600.0  # a prompt takes seconds, a start half a minute: average over many


def run_served(args: argparse.Namespace) -> int:
    """Measure, print and plot. Returns 0.

    Side effects: servers on free ports, ended on every way out; ``quality.json`` (rewritten after
    each contender), ``quality.png`` and logs under ``--out``. Raises UserError for bad flags and
    for a server that does not start or dies.
    """
    setup = make_setup(args)
    prompts = _prompts(setup)
    console = Console(stderr=True, highlight=False, markup=False)
    book = ResultBook(setup, prompts, ["python", "-m", "loadtest", *sys.argv[1:]])
    Measurement(setup, prompts, book, console).run()
    _finish(book.result(), setup.out)
    return 0


def _prompts(setup: Setup) -> Prompts:
    from transformers import AutoTokenizer  # slow to import

    corpora = load_texts(setup.text_files)
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    return build_prompts(corpora, tokenizer, setup.context, setup.texts, setup.needles, setup.seed)


def _finish(result: Result, out: Path) -> None:
    from loadtest.quality_plot import write_plot  # imports matplotlib

    saved = write_result(result, out)
    plot = write_plot(result, out)
    console = Console(highlight=False, markup=False)
    sys.stderr.flush()
    console.width = min(console.width, WIDEST) if console.is_terminal else NARROWEST
    show(result, [saved, plot], console)


class ResultBook:
    """The rows measured so far, on disk after each one.

    With ``--resume`` it starts with the rows of an earlier run that have the same fingerprint:
    model, prompts, windows, sinks, dtype, versions.
    """

    def __init__(self, setup: Setup, prompts: Prompts, command: list[str]) -> None:
        self.setup, self.prompts, self.command = setup, prompts, command
        self._versions = versions()
        self._model = model_fingerprint(setup.model)
        self._text_files = {path.name: sha256_file(path) for path in setup.text_files}
        earlier = read_rows(setup.out) if setup.resume else {}
        self.fingerprints = {c.name: self._fingerprint(c) for c in setup.contenders}
        self._rows = {
            contender.name: _renamed(earlier[fingerprint], contender)
            for contender in setup.contenders
            if (fingerprint := self.fingerprints[contender.name]) in earlier
        }

    def _fingerprint(self, contender: Contender) -> str:
        settings = [self._model, self.prompts.fingerprint, ANSWER_TOKENS, CHUNK, self._versions]
        return row_fingerprint(settings, contender.policy.windows, contender.policy.sinks)

    def missing(self) -> list[Contender]:
        """Contenders without a row, in their order."""
        return [c for c in self.setup.contenders if c.name not in self._rows]

    def add(self, row: Row) -> None:
        """Keep a row and write ``quality.json``. Raises UserError if that fails."""
        self._rows[row.name] = row
        write_result(self.result(), self.setup.out)

    def result(self) -> Result:
        """All rows in the contenders' order, with their comparisons."""
        setup = self.setup
        rows = [self._rows[c.name] for c in setup.contenders if c.name in self._rows]
        return Result(
            schema_version=SCHEMA_VERSION,
            command=self.command,
            versions=self._versions,
            model=setup.model_name,
            model_fingerprint=self._model,
            policy_id=setup.policy_id,
            context=setup.context,
            answer_tokens=ANSWER_TOKENS,
            chunk=CHUNK,
            seed=setup.seed,
            bootstrap=setup.bootstrap,
            text_files=self._text_files,
            prompts_fingerprint=self.prompts.fingerprint,
            complete=len(rows) == len(setup.contenders),
            rows=rows,
            comparisons=compare(rows, setup.bootstrap, setup.seed),
        )


def _renamed(row: Row, contender: Contender) -> Row:
    kind = contender.kind.value
    return replace(row, name=contender.name, kind=kind, beside=contender.beside)


class Measurement:
    """Runs the missing contenders, a few at once, with a line of progress for each."""

    def __init__(self, setup: Setup, prompts: Prompts, book: ResultBook, console: Console) -> None:
        self.setup, self.prompts, self.book, self.console = setup, prompts, book, console

    def run(self) -> None:
        """Measure every missing contender; each row is on disk before the next is waited for."""
        todo = self.book.missing()
        kept = len(self.setup.contenders) - len(todo)
        if kept:
            self._say(f"{kept} of {len(self.setup.contenders)} contenders are already measured")
        if not todo:
            return
        fleet = Fleet()
        bench = Bench(self.setup, self.prompts, fleet)
        total = len(self.prompts.texts) + len(self.prompts.needles)
        with self._bars() as bars, ThreadPoolExecutor(self.setup.servers) as threads:
            overall = bars.add_task("all contenders", total=total * len(todo))

            def measure(contender: Contender) -> Row:
                with self._bar(bars, overall, contender, total) as tick:
                    fingerprint = self.book.fingerprints[contender.name]
                    return bench.measure(contender, fingerprint, tick)

            began = time.monotonic()
            try:
                futures = [threads.submit(measure, contender) for contender in todo]
                for done, future in enumerate(as_completed(futures), start=1):
                    each = (time.monotonic() - began) / done
                    self._keep(future.result(), each * (len(todo) - done))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                fleet.close()
                raise

    def _keep(self, row: Row, seconds_left: float) -> None:
        self.book.add(row)
        self._say(
            f"{row.name}: {len(row.texts)} texts in {row.text_seconds:.0f} s, {len(row.needles)} "
            f"needles in {row.needle_seconds:.0f} s, start {row.start_seconds:.0f} s; about "
            f"{seconds_left / 60:.0f} min left"
        )

    @contextlib.contextmanager
    def _bar(
        self, bars: Progress, overall: int, contender: Contender, total: int
    ) -> Iterator[Tick]:
        self._say(f"{contender.name}: starting (log: {self.setup.out / contender.name}.log)")
        mine = bars.add_task(contender.name, total=total)

        def tick() -> None:
            bars.advance(mine)
            bars.advance(overall)

        try:
            yield tick
        finally:
            bars.remove_task(mine)

    def _bars(self) -> Progress:
        columns = (
            TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        hidden = not self.console.is_terminal
        return Progress(
            *columns, console=self.console, transient=True, disable=hidden,
            speed_estimate_period=ETA_SECONDS,
        )  # fmt: skip

    def _say(self, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        self.console.print(f"{clock} {text}", soft_wrap=True)

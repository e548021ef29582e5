"""Stock SGLang and RaggedKV with the same KV bytes and the same prompts, side by side.

One server at a time: on two cores they would disturb each other.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.demo_measure import Checked, agreement, check, measure, sample
from loadtest.demo_report import Result, Row, show, write_result
from loadtest.demo_workload import (
    FREEZE_POLICY,
    Contender,
    Workload,
    frozen,
    make_workload,
    ragged,
    stock,
)
from loadtest.model_specs import DEFAULT_MODEL, SPECS
from loadtest.result_files import output_folder
from loadtest.servers import PAGE_SIZE, TextCompletion

DEFAULT_POLICY = "seqcalib@b34b784ae412"  # one version, whatever is calibrated beside it
NO_FREEZE = "none"
NARROWEST = 80  # columns; what a pipe gets
WIDEST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest demo``."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, metavar="NAME|DIR",
        help=f"{', '.join(SPECS)} or a Hugging Face folder (default: %(default)s)")  # fmt: skip
    add("--policy", default=DEFAULT_POLICY, metavar="SPEC",
        help="full, native, name[@version] or a policy folder (default: %(default)s)")  # fmt: skip
    add("--freeze", metavar="SPEC",
        help="a policy with retention tables, for a run with frozen prompts, or none "
        f"(default: {FREEZE_POLICY}, for another --model none)")  # fmt: skip
    add("--budget-tokens", type=int, default=256, metavar="B",
        help="prompt tokens that a frozen request keeps (default: %(default)s)")  # fmt: skip
    add("--kv-bytes", default="330MB", metavar="SIZE",
        help="bytes of KV cache for each server (default: %(default)s)")  # fmt: skip
    add("--requests", type=int, default=10, metavar="N", help="sent at once (default: %(default)s)")
    add("--prompt-tokens", type=int, default=1700, metavar="N", help="default: %(default)s")
    add("--output-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--checks", type=int, default=3, metavar="N",
        help="answers to compare with the reference (default: %(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path("out"), metavar="DIR",
        help="folder for demo.json and the servers' logs (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the comparison and print it. 0, or 1 if an answer is not its reference's.

    Side effects: servers on free ports, ended on every way out; files under ``--out``. Raises
    UserError for bad flags and for a server that does not start or dies.
    """
    sizes = (args.requests, args.prompt_tokens, args.output_tokens, args.checks)
    work = make_workload(args.model, args.kv_bytes, *sizes)
    contenders = [stock(work), ragged(work, args.policy)]
    default = FREEZE_POLICY if args.model == DEFAULT_MODEL else NO_FREEZE
    if (freeze := args.freeze or default) != NO_FREEZE:
        contenders.append(frozen(work, freeze, args.budget_tokens, "--freeze"))
    out = output_folder(args.out)
    demo = _Demo(work, Console(stderr=True, highlight=False, markup=False))
    result = demo.compare(contenders, out)
    saved = write_result(result, out)
    show(result, args.policy, saved, _stdout())
    return 0 if all(row.checked.equal == row.checked.answers for row in result.rows) else 1


class _Demo:
    """The steps of the comparison, each with its line of progress on stderr."""

    def __init__(self, work: Workload, console: Console) -> None:
        self.work, self.console = work, console

    def compare(self, contenders: Sequence[Contender], out: Path) -> Result:
        """Run each server, then check its answers while nothing else runs."""
        work = self.work
        self._say("about 7 minutes on 2 idle cores; Ctrl-C stops everything")
        prompts = work.prompts()
        rows: list[Row] = []
        baseline: list[TextCompletion] | None = None
        for contender in contenders:
            log = out / f"demo-{contender.log_name}.log"
            measured, answers = self._measure(contender, prompts, log)
            checked = Checked(0, 0, 0, 0, None)  # a frozen answer has no dense reference
            if contender.budget is None:
                checked = self._check(contender, prompts, answers)
            baseline = baseline or answers
            rows.append(Row(measured, checked, agreement(baseline, answers)))
        sizes = (work.requests, work.prompt_tokens, work.output_tokens, PAGE_SIZE)
        return Result(str(work.model), work.kv_bytes, *sizes, rows)

    def _measure(self, contender: Contender, prompts: list[list[int]], log: Path):
        self._say(f"{contender.name}: starting the server (log: {log})")
        with self._bar(f"{contender.name}: starting", len(prompts)) as (bar, task):

            def progress(answered: int, running: int) -> None:
                now = f"{running} running" if running else "reading prompts"
                text = f"{contender.name}: {now}, {answered} answered"
                bar.update(task, description=text, completed=answered)

            measured, answers = measure(contender, self.work, prompts, log, progress)
        self._say(
            f"{contender.name}: {len(answers)} answers in {measured.seconds:.0f} s, at most "
            f"{measured.peak_running} requests at once"
        )
        return measured, answers

    def _check(
        self, contender: Contender, prompts: list[list[int]], answers: list[TextCompletion]
    ) -> Checked:
        from transformers.utils.logging import disable_progress_bar  # imports torch

        from loadtest.reference import MaskedReference

        disable_progress_bar()  # our own is running
        chosen = sample(self.work.checks, len(answers))
        policy = contender.windows
        with self._bar(f"{contender.name}: comparing with the reference", len(chosen)) as (b, task):
            masks = (None, 0) if policy is None else (policy.windows, policy.sinks)
            reference = MaskedReference(self.work.model, *masks)
            checked = check(
                reference, prompts, answers, chosen, lambda done: b.update(task, completed=done)
            )
        self._say(f"{contender.name}: {checked.equal} of {checked.answers} answers checked equal")
        return checked

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def _bar(self, text: str, total: int) -> Iterator[tuple[Progress, int]]:
        columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bar:
            yield bar, bar.add_task(text, total=total)


def _stdout() -> Console:
    console = Console(highlight=False, markup=False)
    sys.stderr.flush()
    console.width = min(console.width, WIDEST) if console.is_terminal else NARROWEST
    return console

"""``python -m loadtest quality --policies …``: from the command line to tables, JSON and plots."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console

from kvpolicy.render import make_console
from loadtest.demo_workload import model_folder
from loadtest.errors import UserError
from loadtest.quality_suite.arms import Arms, find_arms
from loadtest.quality_suite.floors import Verdict, parse_floors, served_verdicts, verdicts
from loadtest.quality_suite.heatmap import write_heatmap
from loadtest.quality_suite.judging import (
    MIN_LENGTH,
    SCHEMA_VERSION,
    CaseLog,
    CaseProgress,
    CaseResult,
    Chat,
    cells,
    code_hash,
    differences,
    hash_weights,
    library_versions,
    tokenizer_of,
    user_errors,
    versions,
    write_plot,
)
from loadtest.quality_suite.openai_api import reach
from loadtest.quality_suite.options import HELD_OUT, check_numbers, chosen_suite, url_needed
from loadtest.quality_suite.prompts import Questions, make_questions
from loadtest.quality_suite.report import show
from loadtest.quality_suite.results import (
    SERVED_FILE,
    ServedCase,
    SuiteResult,
    SuiteSettings,
    write_result,
)
from loadtest.quality_suite.served import ServedArm, Serving, asked_of_servers
from loadtest.quality_suite.suites import SUITES, Suite
from loadtest.quality_suite.task_files import FileSpec

WIDE = 150  # columns of a pipe: three budgets side by side
ROOM = 128  # tokens of the longest answer
PACKAGES = ("raggedkv", "sglang", "torch", "transformers", "numpy", "kvpress")


def run_suite(args: argparse.Namespace) -> int:
    """Judge, print, plot. Returns 0, or 1 with ``--fail-under`` and a policy below a floor.

    Side effects under ``--out``: ``cases.jsonl`` and ``served.jsonl`` grow with every answer;
    ``suite.json``, ``judge.png`` and ``heatmap.png`` at the end, also after an interrupt or a
    server's death; logs of started servers. Raises UserError; after an interrupt KeyboardInterrupt.
    """
    url_needed(args)
    check_numbers(args)
    run = _Run(args)
    try:
        run.measure()
    except (KeyboardInterrupt, UserError):
        run.finish()
        raise
    failed = run.finish()
    return 1 if args.fail_under and failed else 0


class _Run:
    """One run: everything checked and made before a model is loaded or a server started."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._out = args, Path(args.out)
        suite, files = chosen_suite(args), [FileSpec.of(text) for text in args.task_file]
        self._model = model_folder(args.model)
        self._arms: Arms = find_arms(args, self._model)
        with user_errors():
            self._tokenizer = tokenizer_of(self._model)
        chat = Chat.of(self._tokenizer) if args.chat_template else Chat.none(self._tokenizer)
        length = _length(args, suite, self._arms)
        self._questions: Questions = make_questions(
            suite, args.texts or HELD_OUT, files, length, self._tokenizer, chat, args.seed
        )
        self._floors = parse_floors(args.floor, self._questions.tasks)
        self._served = asked_of_servers(self._questions.asked) if self._arms.served else []
        if self._arms.judging is None and not self._served:
            raise UserError("--tasks: a server cannot be asked text alone, give other tasks too")
        for arm in self._arms.served:
            if arm.url:
                reach(arm.url)
        self._settings = self._make_settings(suite.name)
        self._cases: CaseLog[CaseResult] | None = None
        self._answers: CaseLog[ServedCase] | None = None
        with user_errors():
            if self._arms.judging is not None:
                self._cases = CaseLog(self._out, self._settings, args.resume)
            if self._served:
                self._answers = CaseLog(
                    self._out, self._settings, args.resume, SERVED_FILE, ServedCase
                )
        self._console = Console(stderr=True, highlight=False, markup=False)

    def _make_settings(self, suite: str) -> SuiteSettings:
        asked, arms, judging = self._questions.asked, self._arms, self._arms.judging
        items = "".join(f"{one.item.digest}{one.protocol}" for one in asked)
        with user_errors():
            weights = hash_weights(self._model) if arms.geometry is not None else {}
        return SuiteSettings(
            schema=SCHEMA_VERSION,
            model=self._model.name,
            model_config=arms.geometry.config_hash if arms.geometry is not None else "",
            model_weights=weights,
            policies=judging.policies if judging else {},
            peers=judging.peers if judging else {},
            budgets=arms.budgets if judging else (),
            tasks=self._questions.tasks,
            protocols=tuple(dict.fromkeys(one.protocol for one in asked)),
            lengths=tuple(dict.fromkeys(one.item.length for one in asked)),
            per_task=max(part.items for part in self._questions.parts),
            seed=self._args.seed,
            texts=self._questions.texts,
            items=hashlib.sha256(items.encode()).hexdigest(),
            code=code_hash(),
            libraries=library_versions() | versions(("sglang", "kvpress")),
            suite=suite,
            parts=tuple(self._questions.parts),
            served={arm.name: arm.title for arm in arms.served},
            task_files=self._questions.files,
            chat_template=self._args.chat_template,
            cut=self._questions.cut,
            skipped=self._questions.skipped,
        )

    def measure(self) -> None:
        """Ask everything that the logs lack. Raises UserError, KeyboardInterrupt."""
        if self._cases is not None:
            self._judge(self._cases)
        if self._answers is not None:
            for arm in self._arms.served:
                self._serve(arm, self._answers)

    def _judge(self, log: CaseLog[CaseResult]) -> None:
        asked = self._questions.asked
        done = {case.key for case in log.cases}
        left = [(one.item, one.protocol) for one in asked if one.key not in done]
        cases = self._arms.judging.run(left, self._args.workers)
        with CaseProgress(len(asked), len(done)) as progress, closing(cases):
            for case in cases:
                with user_errors():
                    log.add(case)
                progress.advance()

    def _serve(self, arm: ServedArm, log: CaseLog[ServedCase]) -> None:
        done = {case.key for case in log.cases}
        left = [one for one in self._served if (arm.name, *one.key) not in done]
        if not left:
            return
        where = arm.url or f"a server of its own, log: {self._out / arm.log_name}"
        self._say(f"{arm.name}: {len(left)} questions to {where}")
        serving = Serving(
            self._model, self._arms.geometry, self._tokenizer, self._args.threads,
            self._args.concurrency, self._out,
        )  # fmt: skip

        def add(case: ServedCase) -> None:
            with user_errors():
                log.add(case)

        began = time.monotonic()
        form = serving.run(arm, left, add)
        told = "token ids" if form == "ids" else "text: the server does not take token ids"
        self._say(f"{arm.name}: done in {time.monotonic() - began:.0f} s, prompts sent as {told}")

    def finish(self) -> list[Verdict]:
        """Write and show what there is. Returns the policies' verdicts that are below a floor."""
        if not _cases(self._cases) and not _cases(self._answers):
            return []
        result = self._result()
        saved = [write_result(result, self._out)]
        if result.cases:
            with user_errors():
                saved.append(write_plot(result, self._out))
        if (heat := write_heatmap(result, self._out)) is not None:
            saved.append(heat)
        console = make_console()
        if not console.is_terminal:
            console.width = WIDE
        show(result, console)
        console.print(f"Wrote {', '.join(map(str, saved))}", soft_wrap=True)
        own = self._arms.policies
        return [verdict for verdict in result.verdicts if verdict.below and verdict.arm in own]

    def _result(self) -> SuiteResult:
        arms, settings, args = self._arms, self._settings, self._args
        cases: list[CaseResult] = sorted(_cases(self._cases), key=lambda case: case.key)
        served = sorted(_cases(self._answers), key=lambda case: case.key)
        means = cells(cases)
        pairs = []
        if arms.against and cases:
            pairs = differences(cases, arms.against, args.bootstrap, args.seed)
        wanted = len(self._questions.asked) * (arms.judging is not None)
        longest = max(settings.lengths)
        kept = {arm.name: arm.kept(arms.geometry, longest) for arm in arms.served}
        return SuiteResult(
            schema=SCHEMA_VERSION,
            command=_command(),
            versions=versions(PACKAGES),
            settings=settings,
            finished=len(cases) == wanted and len(served) == len(self._served) * len(arms.served),
            against=arms.against,
            resamples=args.bootstrap,
            cells=means,
            differences=pairs,
            cases=cases,
            served=served,
            kept={name: share for name, share in kept.items() if share is not None},
            floors=self._floors,
            verdicts=[
                *verdicts(means, self._floors),
                *served_verdicts(served, means, self._floors),
            ],
        )

    def _say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True)


def _cases(log: CaseLog | None) -> list:
    return log.cases if log is not None else []


def _length(args: argparse.Namespace, suite: Suite, arms: Arms) -> int:
    """What prompts of files are cut to. Raises UserError if the model or the tasks forbid it."""
    length = args.length or SUITES[args.suite].longest
    if length < MIN_LENGTH:
        raise UserError(f"--length {length} is not accepted: give at least {MIN_LENGTH}")
    longest = max([length, *(part.length for part in suite.parts)]) + ROOM
    if arms.geometry is not None and longest > arms.geometry.max_context:
        raise UserError(
            f"--length: prompts and answers take {longest} tokens, this model at most "
            f"{arms.geometry.max_context}; give --length {arms.geometry.max_context - ROOM} or less"
        )
    return length


def _command() -> list[str]:
    """The command line that is running; where the model lay is nobody's business."""
    words = sys.argv[1:]
    for i, word in enumerate(words[:-1]):
        if word == "--model":
            words[i + 1] = Path(words[i + 1]).name
    return ["python", "-m", "loadtest", *words]

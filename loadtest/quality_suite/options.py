"""The suite's own flags, and what can be checked of them without a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from loadtest.errors import UserError, in_range
from loadtest.quality_suite.suites import SUITES, Suite, chosen

PEERS = (
    "snapkv", "adakv", "chunkkv", "tova", "expected_attention", "streamingllm", "random", "recency"
)  # fmt: skip
HELD_OUT = ("moby-dick", "sotu", "postgresql-doc")
NONE = "none"


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Flags of the suite form, but for those that both forms have."""
    add = parser.add_argument
    add("--policies", metavar="A,B",
        help="artifacts (folder or name[@version]) and rules that freeze prompts are judged in "
        "process; window policies (seqcalib, seqcalib:POINT, native, full) on a server each; or "
        "none")  # fmt: skip
    add("--peers", metavar="A,B",
        help=f"kvpress's presses, random and recency, or none (default: {','.join(PEERS)}; none "
        "where no policy is judged in process)")  # fmt: skip
    add("--budget-tokens", default="128,256,512", metavar="B,B",
        help="tokens kept a kv head, averaged over a layer (default: %(default)s)")  # fmt: skip
    add("--suite", choices=tuple(SUITES), default="ci",
        help="ci: minutes; nightly: more items, more lengths (default: %(default)s)")  # fmt: skip
    add("--tasks", metavar="A,B", help="only these of the suite's tasks, or none (default: all)")
    add("--items", type=int, metavar="N", help="at most N items of a task (default: the suite's)")
    add("--length", type=int, metavar="T",
        help="prompt tokens of every task, and what files' prompts are cut to (default: the "
        "suite's, and its longest)")  # fmt: skip
    add("--task-file", action="append", default=[], metavar="FORMAT:PATH",
        help="also ask a file of yours: longbench:F.jsonl, ruler:F.jsonl, locomo:F.json, niah:F "
        "(.txt, folder, .jsonl); may be repeated")  # fmt: skip
    add("--chat-template", action="store_true",
        help="wrap questions in the model's chat template, the answer's first words in its own "
        "turn. Default: plain text with <bos> where the model wants it, which base and instruct "
        "models both continue, and which earlier results were measured with")  # fmt: skip
    add("--floor", action="append", default=[], metavar="TASK=SHARE",
        help="share of the full cache's score that a policy must keep (default: .9, text .8); may "
        "be repeated")  # fmt: skip
    add("--fail-under", action="store_true",
        help="exit with 1 if a policy is below a task's floor at any budget")  # fmt: skip
    add("--url", action="append", default=[], metavar="[NAME=]URL",
        help="also judge any server with OpenAI's /v1/completions; the name full makes it what "
        "others are compared with; may be repeated")  # fmt: skip
    add("--against", metavar="ARM", help="arm that differences are of (default: the first policy)")
    add("--workers", type=int, default=1, metavar="W",
        help="processes that judge, each with the model in memory (default: 1)")  # fmt: skip


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError naming the first flag that is out of range."""
    for flag, value in (
        ("--items", args.items),
        ("--length", args.length),
        ("--workers", args.workers),
        ("--threads", args.threads),
    ):
        if value is not None:
            in_range(flag, value, 1)
    in_range("--concurrency", args.concurrency, 1, 64)
    in_range("--seed", args.seed, 0)
    in_range("--bootstrap", args.bootstrap, 100)


def chosen_suite(args: argparse.Namespace) -> Suite:
    """The suite asked for, cut down to the tasks, items and length asked for. Raises UserError."""
    suite = SUITES[args.suite]
    tasks: Sequence[str] = suite.tasks
    if args.tasks is not None:
        tasks = [] if args.tasks == NONE else [task.strip() for task in args.tasks.split(",")]
    return chosen(suite, tasks, args.items, args.length)


def url_needed(args: argparse.Namespace) -> None:
    """Raise UserError if there is nothing to judge."""
    if args.policies in (None, NONE) and not args.url and args.peers in (None, NONE):
        raise UserError(
            "nothing to judge: give --policies A,B, --peers A,B or --url http://HOST:PORT"
        )

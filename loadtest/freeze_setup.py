"""The freeze command's flags, and everything that can be checked before a server starts."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from loadtest.demo_workload import (
    FREEZE_POLICY,
    MAX_REQUESTS,
    Contender,
    Workload,
    frozen,
    make_workload,
    ragged,
    stock,
)
from loadtest.errors import UserError, in_range
from loadtest.freeze_measure import UNDER_WAY
from loadtest.freeze_results import RESULT_FILE
from loadtest.model_specs import DEFAULT_MODEL, SPECS
from loadtest.result_files import output_folder

SURPLUS = 2
"""Requests sent beyond what is predicted to fit, so that a peak is a limit and not a choice."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, an answer and a budget; arena bytes; pairs of cold prompts."""

    prompt_tokens: int
    output_tokens: int
    budget_tokens: int
    kv_bytes: str
    pairs: int


FULL = Sizes(2048, 256, 256, "330MB", 7)
QUICK = Sizes(512, 16, 64, "60MB", 3)


@dataclass(frozen=True)
class Setup:
    """A checked command line; ``equal`` requests at once is what stock SGLang holds."""

    work: Workload
    contenders: tuple[Contender, ...]
    equal: int
    requests: int | None
    budget: int
    pairs: int
    seed: int
    out: Path

    def sent(self, contender: Contender) -> int:
        """Requests sent at once to find the most that ``contender`` decodes together."""
        return self.requests or contender.predicted + SURPLUS

    def prompts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids: prompts that are sent together, and one a pair. All differ."""
        from transformers import AutoTokenizer  # slow to import, and only needed here

        from loadtest import corpora

        together = max(self.equal, *(self.sent(contender) for contender in self.contenders))
        lengths = [self.work.prompt_tokens] * (together + self.pairs)
        tokenizer = AutoTokenizer.from_pretrained(self.work.model)
        prompts = corpora.prompts(tokenizer, lengths, self.seed)
        return prompts[:together], prompts[together:]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m loadtest freeze``."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, metavar="NAME|DIR",
        help=f"{', '.join(SPECS)} or a Hugging Face folder (default: %(default)s)")  # fmt: skip
    add("--policy", default=FREEZE_POLICY, metavar="SPEC",
        help="a policy with retention tables (default: %(default)s)")  # fmt: skip
    add("--kv-bytes", "--bytes", metavar="SIZE",
        help=f"bytes of KV cache for each server (default: {FULL.kv_bytes})")  # fmt: skip
    add("--prompt-tokens", "--prompt", type=int, metavar="N",
        help=f"default: {FULL.prompt_tokens}")  # fmt: skip
    add("--output-tokens", "--output", type=int, metavar="N",
        help=f"default: {FULL.output_tokens}")  # fmt: skip
    add("--budget-tokens", "--budget", type=int, metavar="B",
        help=f"prompt tokens that each head keeps (default: {FULL.budget_tokens})")  # fmt: skip
    add("--requests", type=int, metavar="N",
        help=f"sent at once to find each server's largest batch (default: {SURPLUS} more than are "
        "predicted to fit)")  # fmt: skip
    add("--pairs", type=int, metavar="N",
        help=f"cold prompts timed with and without the freeze (default: {FULL.pairs})")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--quick", action="store_true", help="small sizes by default: it works, it says little")
    add("--out", type=Path, default=Path("out/freeze"), metavar="DIR",
        help=f"folder for {RESULT_FILE}, freeze.png and the servers' logs (default: %(default)s)",
        )  # fmt: skip


def make_setup(args: argparse.Namespace) -> Setup:
    """Check the flags, find model and policy, predict what fits.

    Side effects: a demo model that is absent is fetched; the output folder is made. Raises
    UserError naming the flag.
    """
    sizes = QUICK if args.quick else FULL
    prompt, output, budget, pairs = (
        getattr(sizes, name) if getattr(args, name) is None else getattr(args, name)
        for name in ("prompt_tokens", "output_tokens", "budget_tokens", "pairs")
    )
    if args.requests is not None:
        in_range("--requests", args.requests, 1, MAX_REQUESTS)
    in_range("--output-tokens", output, UNDER_WAY + 1)
    in_range("--pairs", pairs, 2)
    in_range("--seed", args.seed, 0)
    work = make_workload(args.model, args.kv_bytes or sizes.kv_bytes, 1, prompt, output, 0)
    contenders = (stock(work), ragged(work, "native", "RaggedKV unfrozen"),
                  frozen(work, args.policy, budget, "--policy"))  # fmt: skip
    _check_room(contenders)
    _check_plotting()
    equal = min(contender.predicted for contender in contenders)
    if args.requests is not None:
        equal = min(equal, args.requests)
    return Setup(
        work,
        contenders,
        equal,
        args.requests,
        budget,
        pairs,
        args.seed,
        output_folder(args.out),
    )


def _check_room(contenders: tuple[Contender, ...]) -> None:
    for contender in contenders:
        if not contender.predicted:
            raise UserError(f"--kv-bytes: no request fits in {contender.name}; give more")
        if contender.predicted + SURPLUS > MAX_REQUESTS:
            raise UserError(
                f"--kv-bytes: {contender.predicted} requests would fit in {contender.name}; "
                f"at most {MAX_REQUESTS - SURPLUS} are measured: give less"
            )


def _check_plotting() -> None:
    # now, not after the measurement
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the plot needs matplotlib, which is not installed: pip install matplotlib")

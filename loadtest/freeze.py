"""``python -m loadtest freeze``: what freezing prompts brings, stock SGLang beside it.

Stock, RaggedKV without and with a freeze get the same KV bytes and the same prompts, one server
after the other: how many requests decode together, how fast, and what the freeze costs a prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from kvpolicy.render import make_console
from loadtest.demo_measure import RETRACTIONS, kept_share, one_line
from loadtest.demo_workload import Contender
from loadtest.errors import UserError
from loadtest.freeze_measure import measure_batch, measure_pairs
from loadtest.freeze_plot import write_plot
from loadtest.freeze_report import meaning, table
from loadtest.freeze_results import (
    RESULT_FILE,
    Pair,
    Result,
    Side,
    command,
    first_token,
    load_now,
    machine,
)
from loadtest.freeze_setup import Setup, add_arguments, make_setup
from loadtest.result_files import write_json
from loadtest.say import Say
from loadtest.servers import Server, ServerError

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, write ``freeze.json`` and ``freeze.png``, print the table.

    Side effects: servers on free ports, one at a time, ended on every way out; files under
    ``--out``. Raises UserError for bad flags and for a server that does not start or dies.
    """
    setup = make_setup(args)
    result = _Benchmark(setup, Console(stderr=True, highlight=False, markup=False)).run()
    saved = write_json(setup.out / RESULT_FILE, result)
    plot = write_plot(result, setup.out)
    console = make_console()
    console.print(table(result))
    for sentence in meaning(result):
        console.print(sentence)
    console.print(f"written: {saved}, {plot}", soft_wrap=True)
    return 0


class _Benchmark:
    """The stages, each with a line on stderr."""

    def __init__(self, setup: Setup, console: Console) -> None:
        self.setup, self.console = setup, console
        self.loads: list[float] = []
        self.pairs: list[Pair] = []
        self.together, self.alone = setup.prompts()

    def run(self) -> Result:
        setup, work = self.setup, self.setup.work
        sides = [self._side(contender) for contender in setup.contenders]
        self.loads.append(load_now())
        return Result(
            command=command(),
            seed=setup.seed,
            model=work.model.name,
            kv_bytes=work.kv_bytes,
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            budget_tokens=setup.budget,
            sides=sides,
            first_token=first_token(self.pairs, setup.seed),
            machine=machine(self.loads),
        )

    def _side(self, contender: Contender) -> Side:
        self.loads.append(load_now())
        log = self.setup.out / f"freeze-{contender.log_name}.log"
        work = self.setup.work
        flags = (*contender.flags, "--enable-metrics")
        server = Server(work.model, *flags, log=log)
        try:
            with Say(contender.name, self.console) as say:
                self._tell(f"{contender.name}: starting the server (log: {log})")
                with server:
                    return self._measure(contender, server, say)
        except ServerError as error:
            raise UserError(one_line(contender.name, server, error)) from error

    def _measure(self, contender: Contender, server: Server, say: Callable[[str], None]) -> Side:
        setup, output = self.setup, self.setup.work.output_tokens
        freezes = contender.budget is not None

        def batch(count: int):
            found = measure_batch(server, self.together[:count], output, freezes, say)
            self._tell(
                f"{contender.name}: {found.peak_decoding} decoded together of {count} sent, "
                f"{found.tokens_per_second:.2f} tokens/s"
            )
            return found

        largest = batch(setup.sent(contender))
        equal = largest if largest.finished == setup.equal else batch(setup.equal)
        kept = None
        if freezes:
            kept = kept_share(server.info()["internal_states"][0]["raggedkv"])
            self.pairs = measure_pairs(server, self.alone, contender.budget, say)
        retracted = sum(sample.value for sample in server.metrics().get(RETRACTIONS, []))
        return Side(
            contender.name, contender.policy_id, contender.predicted, contender.request_bytes,
            equal, largest, int(retracted), kept, round(server.start_seconds, 2),
            list(contender.flags),
        )  # fmt: skip

    def _tell(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

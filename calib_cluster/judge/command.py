"""``python -m calib_cluster judge``: from the command line to tables, JSON and plot."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from calib_cluster.common import calibratable, tokenizer_of
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import hash_weights, library_versions
from calib_cluster.judge.arms import Policy, find_policy
from calib_cluster.judge.bench import BenchSpec, run_cases, view_of
from calib_cluster.judge.haystack import load_texts
from calib_cluster.judge.items import PROTOCOLS, Item
from calib_cluster.judge.losses import losses
from calib_cluster.judge.options import PEER_NAMES, check_counts, parse_counts, parse_names
from calib_cluster.judge.peers import CHUNK, PEERS, load_kvpress
from calib_cluster.judge.progress import CaseProgress
from calib_cluster.judge.results import (
    SCHEMA_VERSION,
    CaseLog,
    Result,
    Settings,
    code_hash,
    command,
    versions,
    write_result,
)
from calib_cluster.judge.summary import RESAMPLES, cells, differences
from calib_cluster.judge.tasks import MIN_LENGTH, TASKS, make_items
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.render import make_console

WIDE = 150  # columns of a pipe: three budgets side by side


def run_judge(args: argparse.Namespace) -> None:
    """Judge, print, plot.

    Side effects: ``--out``: ``cases.jsonl`` grows with every case; ``judge.json`` and
    ``judge.png`` at the end, also after an interrupt. Raises CalibrationError and, after an
    interrupt, KeyboardInterrupt.
    """
    check_counts(args)
    _import_plot()
    run = _Run(args)
    log = CaseLog(run.out, run.settings, args.resume)
    try:
        run.measure(log, args.workers)
    except KeyboardInterrupt:
        run.finish(log)
        raise
    run.finish(log)


def _import_plot():
    """The plotting module. Raises CalibrationError without matplotlib."""
    try:
        from calib_cluster.judge import plot
    except ImportError as error:
        raise CalibrationError(
            f"judge needs matplotlib ({error}): pip install 'raggedkv[judge]'"
        ) from error
    return plot


class _Run:
    """One run: everything checked and made before the model is loaded."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out = Path(args.out)
        model = Path(args.model)
        geometry = calibratable(model)
        FreezingUnits.of(geometry)  # refuses what cannot be judged
        names = parse_names("--policies", args.policies)
        policies = tuple(find_policy(name, geometry) for name in names)
        view_of(policies)
        peers = parse_names("--peers", args.peers, PEER_NAMES)
        self.against = _against(args.against, policies, peers)
        budgets = _budgets(args.budgets, peers)
        if any(peer in PEERS for peer in peers):
            load_kvpress()
        self.spec = BenchSpec(
            model, geometry, policies, peers, budgets, args.seed, args.threads_per_worker
        )
        self.protocols = parse_names("--protocols", args.protocols, PROTOCOLS)
        self.items, texts = self._make_items(args, tokenizer_of(model))
        self.tasks = [(i, p) for i in self.items for p in i.protocols(self.protocols)]
        if not self.tasks:
            raise CalibrationError("--tasks and --protocols leave nothing to judge")
        self.settings = self._settings(args, texts)

    def _make_items(self, args: argparse.Namespace, tokenizer) -> tuple[list[Item], dict[str, str]]:
        tasks = parse_names("--tasks", args.tasks, tuple(TASKS))
        corpora = load_texts(args.texts)
        items = [
            item
            for length in parse_counts("--length", args.length, MIN_LENGTH)
            for item in make_items(
                corpora, tokenizer, tasks=tasks, length=length, per_task=args.per_task,
                seed=args.seed,
            )
        ]  # fmt: skip
        return items, {corpus.label: corpus.digest() for corpus in corpora}

    def _settings(self, args: argparse.Namespace, texts: dict[str, str]) -> Settings:
        spec = self.spec
        digests = "".join(item.digest for item in self.items)
        return Settings(
            schema=SCHEMA_VERSION,
            model=spec.model.name,
            model_config=spec.geometry.config_hash,
            model_weights=hash_weights(spec.model),
            policies={policy.name: policy.title for policy in spec.policies},
            peers={name: PEERS[name].title if name in PEERS else name for name in spec.peers},
            budgets=spec.budgets,
            tasks=tuple(dict.fromkeys(item.task for item in self.items)),
            protocols=self.protocols,
            lengths=tuple(dict.fromkeys(item.length for item in self.items)),
            per_task=args.per_task,
            seed=args.seed,
            texts=texts,
            items=hashlib.sha256(digests.encode()).hexdigest(),
            code=code_hash(),
            libraries=library_versions() | _kvpress_version(spec.peers),
        )

    def measure(self, log: CaseLog, workers: int) -> None:
        """Run every case that ``log`` lacks. Raises CalibrationError, KeyboardInterrupt."""
        done = {case.key for case in log.cases}
        left = [task for task in self.tasks if _key(*task) not in done]
        with CaseProgress(len(self.tasks), len(done)) as progress:
            for case in run_cases(self.spec, left, workers):
                log.add(case)
                progress.advance()

    def finish(self, log: CaseLog) -> None:
        """Write and show what there is."""
        if not log.cases:
            return
        cases = sorted(log.cases, key=lambda case: case.key)
        seed, means = self.settings.seed, cells(cases)
        result = Result(
            schema=SCHEMA_VERSION,
            command=command(),
            versions=versions(),
            settings=self.settings,
            finished=len(cases) == len(self.tasks),
            against=self.against,
            resamples=RESAMPLES,
            cells=means,
            differences=differences(cases, self.against, seed=seed) if self.against else [],
            cases=cases,
            losses=losses(means),
        )
        saved = [write_result(self.out, result), _import_plot().write_plot(result, self.out)]
        from calib_cluster.judge.report import show

        console = make_console()
        if not console.is_terminal:
            console.width = WIDE
        show(result, console)
        print("wrote " + " and ".join(map(str, saved)), flush=True)


def _against(name: str | None, policies: Sequence[Policy], peers: Sequence[str]) -> str | None:
    """The arm that differences are of. Raises CalibrationError."""
    arms = [policy.name for policy in policies] + list(peers)
    if clash := sorted({arm for arm in arms if arms.count(arm) > 1}):
        raise CalibrationError(f"--policies and --peers both have an arm {clash[0]!r}")
    if name is None:
        return policies[0].name if policies else None
    if name not in arms:
        raise CalibrationError(f"--against {name!r} is no arm of this run: give {', '.join(arms)}")
    return name


def _budgets(text: str, peers: Sequence[str]) -> tuple[int, ...]:
    budgets = parse_counts("--budgets", text, 1)
    if "chunkkv" in peers and budgets[0] < CHUNK:
        raise CalibrationError(
            f"--budgets {text}: chunkkv keeps whole chunks of {CHUNK} tokens, give at least "
            f"{CHUNK} or leave it out"
        )
    return budgets


def _key(item: Item, protocol: str) -> tuple[int, str, str, int]:
    return item.length, protocol, item.task, item.index


def _kvpress_version(peers: Sequence[str]) -> dict[str, str]:
    wanted = ("kvpress",) if any(peer in PEERS for peer in peers) else ()
    return {name: found for name, found in versions(wanted).items() if name in wanted}

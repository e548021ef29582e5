"""``python -m calib_cluster compile`` and ``fit``: from a command line to an artifact."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from calib_cluster.cluster import connected
from calib_cluster.common import (
    calibratable,
    is_there,
    quiet_libraries,
    say,
    state_of,
)
from calib_cluster.compile import CompileSettings
from calib_cluster.compile_fit import Fitted, choose, fit, publish_tables
from calib_cluster.compile_job import NOTHING, CollectCost, CollectJob, CollectPlan
from calib_cluster.compile_options import check_compile, fit_settings, parse_budgets, rule_of
from calib_cluster.compile_records import (
    Collection,
    CompileFingerprint,
    CompileResult,
    RecordIndex,
    RecordState,
    digest_of,
)
from calib_cluster.compile_start import Start, begin, decide_compile
from calib_cluster.compile_summary import cost, print_compile_summary, write_compile_summary
from calib_cluster.compile_tasks import TaskSet, choose_tasks
from calib_cluster.compile_worker import REWARD_DTYPE, Drawing
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import (
    RecordFingerprint,
    code_version,
    hash_weights,
    library_versions,
    record_code_version,
)
from calib_cluster.job_paths import input_path, output_file, output_folder
from calib_cluster.options import names_of
from calib_cluster.rewards.actions import MIX_GRID, PAPER_GRID
from calib_cluster.rewards.units import FreezingUnits
from calib_cluster.worker import worker_spec
from kvpolicy.artifact import check_name, folder_name
from kvpolicy.errors import KvPolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.store import BUILT_IN


def run_compile(args: argparse.Namespace) -> None:
    """Collect rewards, fit the tables and write the artifact, or say that it is complete.

    Raises:
        CalibrationError: bad input, or the run cannot go on.
    """
    began = time.monotonic()
    quiet_libraries()
    budgets, settings = check_compile(args), fit_settings(args)
    _check_name(args.name)
    model = Path(input_path(args.model))
    geometry = calibratable(model)
    FreezingUnits.of(geometry)  # refuses what cannot be evaluated, before anything is read
    out = output_folder(args.out)
    summary = output_file("--summary", args.summary) if args.summary else None
    state = state_of(RecordState, out, model, args.name)
    chosen = _tasks(args, model)
    plan = _plan(args, model, geometry, budgets, chosen)
    fingerprint = CompileFingerprint(_fingerprint(args, plan, chosen, settings), settings)
    with state.locked():
        start = decide_compile(state, fingerprint, args)
        if start.result and is_there(out / start.result.artifact):
            say(f"already complete: {out / start.result.artifact}")
            return
        collection = Collection(
            state, plan.tasks, args.draws, args.draws_per_cell, fingerprint.records.bins
        )
        took = _collect(args, plan, state, collection, start, fingerprint)
        fitted, seconds = _fit(
            state, _index(state, collection, plan, fingerprint.records), settings
        )
        artifact = publish_tables(out, args.name, fitted)
        state.finish(CompileResult(str(artifact.relative_to(out)), code_version()))
    _finish(fitted, args.workers, time.monotonic() - began, seconds, took, summary, artifact)


def run_fit(args: argparse.Namespace) -> None:
    """Fit the tables to records that are there and write the artifact.

    Raises:
        CalibrationError: bad input, or the records are not complete.
    """
    began = time.monotonic()
    settings = fit_settings(args)
    _check_name(args.name)
    budgets = parse_budgets(args.budgets) if args.budgets else ()
    out = output_folder(args.out)
    summary = output_file("--summary", args.summary) if args.summary else None
    folder = Path(input_path(args.records))
    if not folder.is_dir():
        raise CalibrationError(f"--records {args.records}: no such folder")
    state = RecordState(folder)
    fitted, seconds = _fit(state, state.index(), settings, budgets, args.only_corpus)
    artifact = publish_tables(out, args.name, fitted)
    _finish(fitted, 0, time.monotonic() - began, seconds, NOTHING, summary, artifact)


def _check_name(name: str) -> None:
    try:
        check_name(name)
    except KvPolicyError as error:
        raise CalibrationError(f"--name: {error}") from error
    if name in BUILT_IN:
        raise CalibrationError(f"--name: {name!r} is taken by a built-in policy; choose another")


def _tasks(args: argparse.Namespace, model: Path) -> TaskSet:
    began = time.monotonic()
    found = choose_tasks(args, model)
    say(f"texts: {names_of(found.tasks)}, {time.monotonic() - began:.0f} s")
    return found


def _plan(
    args: argparse.Namespace,
    model: Path,
    geometry: ModelGeometry,
    budgets: tuple[int, ...],
    chosen: TaskSet,
) -> CollectPlan:
    spec = worker_spec(model, geometry, REWARD_DTYPE, args.gpus_per_worker, args.threads_per_worker)
    rule = rule_of(args)
    grid = MIX_GRID if rule.mixes else PAPER_GRID
    drawing = Drawing(rule, args.behaviour, budgets, args.draws, args.seed, args.batch, grid)
    return CollectPlan(model, geometry, drawing, spec, args.workers, chosen.tasks)


def _fingerprint(
    args: argparse.Namespace, plan: CollectPlan, chosen: TaskSet, settings: CompileSettings
) -> RecordFingerprint:
    bins = (settings.entropy_bins, settings.perplexity_bins) if args.draws_per_cell else (0, 0)
    return RecordFingerprint(
        model_config=plan.geometry.config_hash,
        model_weights=hash_weights(plan.model),
        corpora=chosen.corpora,
        prompts=chosen.fingerprint,
        prompt_count=args.prompts,
        length=args.length,
        continuation=args.continuation,
        seed=args.seed,
        chat_template=args.chat_template,
        rule=plan.drawing.rule,
        behaviour=plan.drawing.behaviour,
        budgets=plan.drawing.budgets,
        draws=plan.drawing.draws,
        draws_per_cell=args.draws_per_cell,
        bins=bins,
        batch=plan.drawing.batch,
        device="cuda" if plan.spec.gpus else "cpu",
        threads=plan.spec.threads,
        code_version=record_code_version(),
        libraries=library_versions(),
    )


def _collect(
    args: argparse.Namespace,
    plan: CollectPlan,
    state: RecordState,
    collection: Collection,
    start: Start,
    fingerprint: CompileFingerprint,
) -> CollectCost:
    """Evaluate what is missing; the run begins once nothing more can be refused."""
    if start.keeps_shards:
        plan = plan.weighted(state.query_weights())
        found = collection.find(plan.check)
        say(f"{found} shards of reward records are there already")
    if not collection.missing():
        begin(state, start, fingerprint)
        return NOTHING
    with connected(args.address, args.workers, args.threads_per_worker, args.gpus_per_worker):
        say(_headline(plan, collection))
        job = CollectJob(plan, collection, state, say)
        begin(state, start, fingerprint)
        return job.run()


def _headline(plan: CollectPlan, collection: Collection) -> str:
    drawing, units = plan.drawing, FreezingUnits.of(plan.geometry)
    return (
        f"rewards of {plan.model.name}: rule {drawing.rule.name}, {len(units)} kv heads in "
        f"{len(units.layer_ids)} layers, {len(plan.tasks)} prompts of {len(plan.tasks[0].prompt)} "
        f"and {len(plan.tasks[0].continuation)} tokens, {drawing.draws} {drawing.behaviour} draws "
        f"at budgets {', '.join(map(str, drawing.budgets))}, {plan.workers} worker(s) of "
        f"{plan.spec.threads} thread(s), {plan.spec.dtype}"
    )


def _index(
    state: RecordState, collection: Collection, plan: CollectPlan, fingerprint: RecordFingerprint
) -> RecordIndex:
    """Say, in the log and in the folder, that the records are complete."""
    used = collection.used
    index = RecordIndex(
        model=folder_name(plan.model),
        geometry=plan.geometry,
        fingerprint=fingerprint,
        shards=tuple(draw.file for draw in used),
        sha256=digest_of(shard.sha256 for shard in used.values()),
    )
    state.save_index(index)
    return index


def _fit(
    state: RecordState,
    index: RecordIndex,
    settings: CompileSettings,
    budgets: Sequence[int] = (),
    corpora: Sequence[str] = (),
) -> tuple[Fitted, float]:
    """Fitted tables, and the seconds that took."""
    began = time.monotonic()
    fitted = fit(index, choose(state.parts(index), budgets, corpora), settings)
    if (prompts := fitted.evidence.cell_prompts) is not None:
        some = prompts[prompts > 0]
        say(
            f"risk cells: {some.size} of {prompts.size} have prompts, {some.min()} to {some.max()} "
            f"each, median {sorted(some.tolist())[some.size // 2]}"
        )
    return fitted, time.monotonic() - began


def _finish(
    fitted: Fitted,
    workers: int,
    wall: float,
    fit_seconds: float,
    took: CollectCost,
    summary: Path | None,
    artifact: Path,
) -> None:
    found = cost(fitted, workers, wall, fit_seconds, took)
    print_compile_summary(fitted, found)
    if summary:
        write_compile_summary(summary, found)
    say(f"artifact: {artifact}")

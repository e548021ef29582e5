"""``python -m calib_cluster seqcalib``: from a command line to an artifact."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from calib_cluster.cluster import connected
from calib_cluster.common import (
    calibratable,
    is_there,
    load_texts,
    quiet_libraries,
    say,
    state_of,
    tokenizer_of,
)
from calib_cluster.corpora import Corpus, PromptSet, Size, check_disjoint, choose_prompts
from calib_cluster.fingerprint import (
    RunFingerprint,
    code_version,
    hash_weights,
    library_versions,
)
from calib_cluster.job import CalibrationJob, JobPlan
from calib_cluster.job_paths import input_path, output_file, output_folder
from calib_cluster.options import check_counts, names_of, parse_settings
from calib_cluster.publish import publish
from calib_cluster.run_state import RunResult, RunState, decide
from calib_cluster.seqcalib import Settings
from calib_cluster.summary import print_summary, write_summary
from calib_cluster.worker import worker_spec
from kvpolicy.geometry import LayerKind, ModelGeometry


def run_seqcalib(args: argparse.Namespace) -> None:
    """Calibrate and write the artifact, or say that it is already complete.

    Raises:
        CalibrationError: bad input, or the run cannot go on.
    """
    quiet_libraries()
    check_counts(args)
    settings = parse_settings(args, say)
    model = Path(input_path(args.model))
    geometry = calibratable(model)
    out = output_folder(args.out)
    summary = output_file("--summary", args.summary) if args.summary else None
    state = state_of(RunState, out, model, args.name)
    prompts, held_out = _texts(args, model, settings)
    plan = _plan(args, model, geometry, settings, prompts, held_out)
    fingerprint = _fingerprint(args, plan, prompts, held_out)
    with state.locked():
        decision = decide(state, fingerprint, resume=args.resume, restart=args.restart)
        if decision.result and is_there(out / decision.result.artifact):
            say(f"already complete: {out / decision.result.artifact}")
            return
        with connected(args.address, args.workers, args.threads_per_worker, args.gpus_per_worker):
            say(_headline(plan, prompts, settings))
            job = CalibrationJob(plan, state, say)
            if decision.fresh:
                state.begin(fingerprint)
            outcome = job.run()
        artifact = publish(out, args.name, model, outcome, fingerprint, prompts)
        state.finish(RunResult(str(artifact.relative_to(out))))
    print_summary(outcome, plan)
    if summary:
        write_summary(summary, outcome, plan)
    say(f"artifact: {artifact}")


def _texts(
    args: argparse.Namespace, model: Path, settings: Settings
) -> tuple[PromptSet, PromptSet | None]:
    """Calibration prompts and, if asked for, held-out ones, checked to be disjoint."""
    began = time.monotonic()
    tokenizer = tokenizer_of(model)
    loaded = _corpora(args, args.corpus, args.prompts)
    prompts = _prompts(args, settings, tokenizer, loaded, args.prompts)
    held_out = None
    if args.eval_corpus:
        others = _corpora(args, args.eval_corpus, args.eval_prompts)
        check_disjoint(loaded, others)  # whole corpora, not only the prompts taken from them
        held_out = _prompts(args, settings, tokenizer, others, args.eval_prompts)
    say(f"texts: {names_of(prompts.prompts)}, {time.monotonic() - began:.0f} s")
    return prompts, held_out


def _corpora(args: argparse.Namespace, specs: list[str], prompts: int) -> tuple[Corpus, ...]:
    return load_texts(specs, Size(prompts, args.length, args.seed), args.field)


def _prompts(
    args: argparse.Namespace, settings: Settings, tokenizer, corpora: tuple[Corpus, ...], count: int
) -> PromptSet:
    return choose_prompts(
        corpora,
        tokenizer,
        prompts=count,
        length=args.length,
        min_length=settings.codebook[0] + settings.sinks,
        seed=args.seed,
        chat_template=args.chat_template,
    )


def _plan(
    args: argparse.Namespace,
    model: Path,
    geometry: ModelGeometry,
    settings: Settings,
    prompts: PromptSet,
    held_out: PromptSet | None,
) -> JobPlan:
    dtype = args.dtype or ("bfloat16" if args.gpus_per_worker else "float32")
    gpus, threads = args.gpus_per_worker, args.threads_per_worker
    return JobPlan(
        model=model,
        geometry=geometry,
        settings=settings,
        spec=worker_spec(model, geometry, dtype, gpus, threads),
        workers=args.workers,
        prompts=tuple(prompt.ids for prompt in prompts.prompts),
        held_out=tuple(prompt.ids for prompt in held_out.prompts) if held_out else (),
        held_out_corpora=held_out.corpora if held_out else {},
    )


def _fingerprint(
    args: argparse.Namespace, plan: JobPlan, prompts: PromptSet, held_out: PromptSet | None
) -> RunFingerprint:
    return RunFingerprint(
        model_config=plan.geometry.config_hash,
        model_weights=hash_weights(plan.model),
        corpora=prompts.corpora,
        prompts=prompts.fingerprint,
        prompt_count=args.prompts,
        length=args.length,
        seed=args.seed,
        chat_template=args.chat_template,
        codebook=plan.settings.codebook,
        taus=plan.settings.taus,
        sinks=plan.settings.sinks,
        dtype=plan.spec.dtype,
        device="cuda" if plan.spec.gpus else "cpu",
        threads=plan.spec.threads,
        held_out_corpora=plan.held_out_corpora,
        held_out=held_out.fingerprint if held_out else "",
        code_version=code_version(),
        libraries=library_versions(),
    )


def _headline(plan: JobPlan, prompts: PromptSet, settings: Settings) -> str:
    units = sum(
        layer.num_kv_heads for layer in plan.geometry.layers if layer.kind is LayerKind.GLOBAL
    )
    return (
        f"SeqCalib of {plan.model.name}: {units} global kv heads, {prompts.tokens} tokens, "
        f"windows {', '.join(map(str, settings.codebook))} and full, {settings.sinks} sinks, "
        f"{plan.workers} worker(s) of {plan.spec.threads} thread(s), {plan.spec.dtype}"
    )

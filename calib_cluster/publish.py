"""From a finished calibration to a policy artifact on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calib_cluster.corpora import PromptSet
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import RecordFingerprint, RunFingerprint
from calib_cluster.job import JobOutcome
from calib_cluster.report import ReportInput, render_report
from calib_cluster.seqcalib import point_name
from kvpolicy.artifact import PointSpec, folder_name, write_artifact
from kvpolicy.errors import KvPolicyError
from kvpolicy.evidence import REPORT_FILE, to_files
from kvpolicy.manifest import CalibrationRecord

METHOD = "seqcalib"
DEFAULT_TAU = 0.99


def publish(
    out: Path,
    name: str,
    model: Path,
    outcome: JobOutcome,
    fingerprint: RunFingerprint,
    prompts: PromptSet,
) -> Path:
    """Write the artifact with its evidence and report; returns its folder.

    The same run gives the same version. Raises CalibrationError if it cannot be written.
    """
    seqcalib = outcome.seqcalib
    taus = seqcalib.settings.taus
    points = [
        PointSpec(point_name(tau), seqcalib.policy(tau), tau, seqcalib.fidelity(tau))
        for tau in taus
    ]
    default = point_name(DEFAULT_TAU if DEFAULT_TAU in taus else taus[-1])
    record = calibration_record(fingerprint, prompts)
    model_name = folder_name(model)
    evidence = seqcalib.evidence()
    report = render_report(
        ReportInput(model_name, name, points, default, evidence, outcome.held_out, record)
    )
    files = {**to_files(evidence, outcome.held_out), REPORT_FILE: report}
    try:
        return write_artifact(
            out,
            model_name=model_name,
            name=name,
            points=points,
            default_point=default,
            calibration=record,
            weight_hashes=fingerprint.model_weights,
            extra_files=files,
        )
    except KvPolicyError as error:
        raise CalibrationError(str(error)) from error


def calibration_record(fingerprint: RunFingerprint, prompts: PromptSet) -> CalibrationRecord:
    """Where a policy comes from; every parameter of the run but the number of workers."""
    return CalibrationRecord(
        method=METHOD,
        corpora=dict(sorted(prompts.corpora.items())),
        prompts=len(prompts.prompts),
        tokens=prompts.tokens,
        seed=fingerprint.seed,
        code_version=fingerprint.code_version,
        hyperparameters={
            "codebook": list(fingerprint.codebook),
            "taus": list(fingerprint.taus),
            "sinks": fingerprint.sinks,
            "length": fingerprint.length,
            "chat_template": fingerprint.chat_template,
            "prompts_sha256": fingerprint.prompts,
            "held_out_sha256": fingerprint.held_out or None,
            "dtype": fingerprint.dtype,
            **machine_record(fingerprint),
        },
    )


def machine_record(fingerprint: RunFingerprint | RecordFingerprint) -> dict[str, Any]:
    """Device, threads and libraries of the workers, as hyperparameters."""
    return {
        "device": fingerprint.device,
        "threads_per_worker": fingerprint.threads,
        **dict(sorted(fingerprint.libraries.items())),
    }

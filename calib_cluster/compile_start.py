"""What a compile does with the run that is there: its records are dear, so nothing drops them
unasked."""

from __future__ import annotations

import argparse

import msgspec

from calib_cluster.compile_records import CompileFingerprint, CompileResult, RecordState
from calib_cluster.errors import CalibrationError
from calib_cluster.fingerprint import code_version
from calib_cluster.run_state import check_finished, decide


class Start(msgspec.Struct, frozen=True):
    """How a compile starts: ``result`` of a run that is already complete; else ``keeps_shards`` of
    the run that is there, which this one ``grows`` if its fingerprint is another."""

    keeps_shards: bool
    grows: bool = False
    result: CompileResult | None = None


def decide_compile(
    state: RecordState, fingerprint: CompileFingerprint, args: argparse.Namespace
) -> Start:
    """Decide by ``args.resume``, ``restart`` and ``extend``. Writes nothing.

    Without any of them a finished run is never dropped: it is the result, or another one.

    Raises:
        CalibrationError: nothing to resume or extend, the run is another one, or it is unfinished.
    """
    if args.extend:
        return _extended(state, fingerprint)
    there = state.fingerprint() if not args.restart else None
    if there is not None and not args.resume:
        check_finished(state, there)
        if differences := there.differences(fingerprint):
            raise CalibrationError(
                f"a finished compile with other settings is in {state.folder}; "
                + "; ".join(differences)
                + " (--extend grows its records, fit --records fits them otherwise, another --name "
                "keeps both, --restart drops them)"
            )
    decision = decide(
        state, fingerprint, resume=args.resume or there is not None, restart=args.restart
    )
    result = decision.result
    if result is not None and result.code_version != code_version():
        result = None  # the records are the same, the tables may not be
    return Start(keeps_shards=not decision.fresh, result=result)


def _extended(state: RecordState, fingerprint: CompileFingerprint) -> Start:
    there = state.fingerprint()
    if there is None:
        raise CalibrationError(f"nothing to extend in {state.folder}; leave --extend out")
    if differences := there.records.grown(fingerprint.records).differences(fingerprint.records):
        raise CalibrationError(
            "--extend: these are other rewards than the ones that are there; "
            + "; ".join(differences)
            + " (another --name keeps both, --restart drops them)"
        )
    if there == fingerprint and (result := state.result()) is not None:
        current = result.code_version == code_version()
        return Start(keeps_shards=True, result=result if current else None)
    return Start(keeps_shards=True, grows=there != fingerprint)


def begin(state: RecordState, start: Start, fingerprint: CompileFingerprint) -> None:
    """Make the decision durable."""
    if not start.keeps_shards:
        state.begin(fingerprint)
    elif start.grows:
        state.grow(fingerprint)

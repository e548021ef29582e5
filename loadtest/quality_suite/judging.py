"""The judge's side of a suite: the one module of loadtest that imports ``calib_cluster``.

loadtest measures what is served and otherwise needs no calibration code. But a retention policy or
a peer chooses what to keep from a model's own queries, keys and values, at one budget after
another, from one prefill: such arms need the model in this process, and ``calib_cluster.judge`` has
it. Importing this loads torch, so it is imported when a suite runs, never for ``--help``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from calib_cluster.common import quiet_libraries, tokenizer_of

quiet_libraries()  # before what follows imports them

from calib_cluster.corpora.chat import ChatFormat  # noqa: E402
from calib_cluster.corpora.documents import Corpus  # noqa: E402
from calib_cluster.corpora.excerpts import bos, plain_encoder  # noqa: E402
from calib_cluster.errors import CalibrationError  # noqa: E402
from calib_cluster.fingerprint import hash_weights, library_versions  # noqa: E402
from calib_cluster.judge.ablations import MARK  # noqa: E402
from calib_cluster.judge.arms import FULL, find_policy  # noqa: E402
from calib_cluster.judge.bench import OWN_ARMS, BenchSpec, run_cases, view_of  # noqa: E402
from calib_cluster.judge.haystack import load_texts  # noqa: E402
from calib_cluster.judge.items import Item  # noqa: E402
from calib_cluster.judge.options import parse_counts, parse_names  # noqa: E402
from calib_cluster.judge.peers import CHUNK, PEERS, load_kvpress  # noqa: E402
from calib_cluster.judge.plot import write_plot  # noqa: E402
from calib_cluster.judge.progress import CaseProgress  # noqa: E402
from calib_cluster.judge.report import show as show_judged  # noqa: E402
from calib_cluster.judge.results import (  # noqa: E402
    SCHEMA_VERSION,
    CaseLog,
    CaseResult,
    Cell,
    Result,
    Settings,
    code_hash,
    versions,
)
from calib_cluster.judge.summary import RESAMPLES, cells, differences  # noqa: E402
from calib_cluster.judge.tasks import MIN_LENGTH, make_items  # noqa: E402
from calib_cluster.rewards.units import FreezingUnits  # noqa: E402
from kvpolicy.geometry import ModelGeometry  # noqa: E402
from kvpolicy.retention import RULES  # noqa: E402
from loadtest.errors import UserError  # noqa: E402
from loadtest.quality_suite.suites import NOTHING, TEXT, Suite  # noqa: E402

__all__ = [
    "FULL", "MIN_LENGTH", "RESAMPLES", "SCHEMA_VERSION", "CaseLog", "CaseProgress", "CaseResult",
    "Cell", "Chat", "Item", "Judging", "Result", "Settings", "bos", "built_in_items", "cells",
    "code_hash", "corpora_of", "differences", "encoder", "hash_weights", "is_in_process",
    "library_versions", "parse_counts", "parse_names", "show_judged", "tokenizer_of",
    "user_errors", "versions", "write_plot",
]  # fmt: skip
encoder = plain_encoder


@contextmanager
def user_errors() -> Iterator[None]:
    """What the judge finds wrong, as this command line's own error."""
    try:
        yield
    except CalibrationError as error:
        raise UserError(str(error)) from error


def is_in_process(policy: str) -> bool:
    """True for what only the judge takes by name: a rule, or a policy without one of its parts."""
    return policy in RULES or MARK in policy


class Judging:
    """The arms that are judged in process, checked before the model is loaded.

    Args:
        model: Hugging Face folder with weights.
        policies, peers: names; ``nothing``, the floor, is added to the peers.
        budgets: tokens kept a kv head.
        threads: of each worker.

    Attributes:
        arms: name -> what it is.

    Raises:
        UserError: unknown names, budgets that a peer cannot keep, kvpress missing, or a model that
            cannot freeze.
    """

    def __init__(
        self,
        model: Path,
        geometry: ModelGeometry,
        policies: Sequence[str],
        peers: Sequence[str],
        budgets: Sequence[int],
        seed: int,
        threads: int,
    ) -> None:
        with user_errors():
            FreezingUnits.of(geometry)
            found = tuple(find_policy(name, geometry) for name in policies)
            view_of(found)
            if any(peer in PEERS for peer in peers):
                load_kvpress()
        if "chunkkv" in peers and min(budgets) < CHUNK:
            raise UserError(
                f"--budget-tokens {min(budgets)}: chunkkv keeps whole chunks of {CHUNK} tokens, "
                f"give at least {CHUNK} or leave it out"
            )
        self.policies = {policy.name: policy.title for policy in found}
        names = (*peers, NOTHING)
        self.peers = {n: PEERS[n].title if n in PEERS else OWN_ARMS[n].title for n in names}
        if clash := sorted(self.policies.keys() & self.peers.keys()):
            raise UserError(f"--policies and --peers both have an arm {clash[0]!r}")
        self._spec = BenchSpec(model, geometry, found, names, tuple(budgets), seed, threads)

    def run(self, tasks: Sequence[tuple[Item, str]], workers: int) -> Iterator[CaseResult]:
        """Results as they are finished. Closing it ends all workers. Raises UserError."""
        with user_errors():
            yield from run_cases(self._spec, tasks, workers)


def corpora_of(specs: Sequence[str]) -> tuple[Corpus, ...]:
    """Held-out texts of recipes, files and folders. Raises UserError."""
    with user_errors():
        return load_texts(specs)


@dataclass(frozen=True)
class Chat:
    """A model's chat template around one user message, as token ids; both empty without one.

    ``before`` begins with <bos> where the template has it, and takes the place of a plain
    prompt's; ``after`` ends where the model's own turn begins.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def none(cls, tokenizer) -> Chat:
        """No template: a prompt is <bos>, where the model wants it, and text."""
        return cls(tuple(bos(tokenizer)), ())

    @classmethod
    def of(cls, tokenizer) -> Chat:
        """The tokenizer's template. Raises UserError if it has none."""
        try:
            before, after = ChatFormat(tokenizer).around("--chat-template")
        except CalibrationError as error:
            raise UserError(
                "--chat-template: the model's tokenizer has no usable chat template; leave the "
                "flag out"
            ) from error
        encode = encoder(tokenizer)
        return cls(tuple(encode(before)), tuple(encode(after)))


def built_in_items(
    suite: Suite, corpora: Sequence[Corpus], tokenizer, seed: int, spare: int
) -> list[tuple[Item, str]]:
    """Every item of ``suite`` with its protocol, part by part.

    ``spare``: tokens that a chat template will add, which prompts (but plain text) are shorter by.
    Raises UserError if a length is too short or the texts do not suffice.
    """
    found: list[tuple[Item, str]] = []
    lengths = dict.fromkeys((p.length, spare if p.task != TEXT else 0) for p in suite.parts)
    for length, shorter in lengths:
        parts = [
            p for p in suite.parts
            if p.length == length and (spare if p.task != TEXT else 0) == shorter
        ]  # fmt: skip
        with user_errors():
            items = make_items(
                corpora, tokenizer, tasks=tuple(dict.fromkeys(p.task for p in parts)),
                length=length - shorter, per_task=max(p.items for p in parts), seed=seed,
            )  # fmt: skip
        for part in parts:
            own = [item for item in items if item.task == part.task and item.index < part.items]
            found += [(item, part.protocol) for item in own]
    return found

"""Scores of arms on one case: the answer under what each kept, beside the full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.judge.arms import FULL, Arm
from calib_cluster.judge.model import Judged, JudgedModel
from calib_cluster.rewards.model import Prefill

GROUP = 8  # kept sets scored at once


class Score(msgspec.Struct, frozen=True):
    """One arm on one case.

    ``budget`` None is the full cache. ``kept`` is the mean of tokens kept a kv head; ``accuracy``
    the share of the scored answer tokens (``Case.scored``) that are the most likely one, given
    the ones before (with ``Case.choices``, the last one among these); ``exact``: all of the
    answer's are, which is when greedy decoding gives the answer; ``nll`` and ``kl`` (full cache to
    arm) are mean nats a scored token; ``agreement`` is the share of them where arm and full cache
    find the same token most likely.
    """

    arm: str
    budget: int | None
    kept: float
    accuracy: float
    exact: bool
    nll: float
    kl: float
    agreement: float


def measure(
    model: JudgedModel, judged: Judged, arms: Mapping[str, Arm], budgets: Sequence[int]
) -> list[Score]:
    """The full cache first, then every arm at every budget.

    At a budget of at least T tokens nothing is dropped, as in an engine that leaves such prompts
    alone: every arm is the full cache.

    Raises:
        CalibrationError: an arm keeps nothing in some unit, or what is no position, or one twice.
    """
    names = [(name, budget) for name in arms for budget in budgets if budget < judged.length]
    kept = [
        checked(arms[name](judged, budget), judged.prefill, f"{name} at budget {budget}")
        for name, budget in names
    ]
    scorer = _Scorer(model, judged)
    found = {(FULL, None): scorer.score(FULL, None, float(judged.length), judged.full[1:])}
    order = sorted(range(len(kept)), key=lambda i: kept[i].shape[1])  # alike widths together
    for start in range(0, len(order), GROUP):
        group = order[start : start + GROUP]
        hidden, rows = model.continuation_hidden(judged.prefill, _stacked([kept[i] for i in group]))
        for i, row in zip(group, rows.tolist(), strict=True):
            mean = float((kept[i] >= 0).sum(1).double().mean())
            found[names[i]] = scorer.score(*names[i], mean, hidden[row])
    full = found[FULL, None]
    rest = [
        found.get((name, b)) or msgspec.structs.replace(full, arm=name, budget=b)
        for name in arms
        for b in budgets
    ]
    return [full, *rest]


def checked(positions: torch.Tensor, prefill: Prefill, arm: str) -> torch.Tensor:
    """``positions`` if they are sound: int64 [U, width], in -1..T-1, none twice, some in each."""
    units, length = prefill.mass.shape
    if positions.ndim != 2 or positions.shape[0] != units or positions.dtype != torch.int64:
        raise CalibrationError(
            f"arm {arm} gave {positions.dtype} {list(positions.shape)}, not positions of {units} "
            "units"
        )
    ordered = positions.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
    if not positions.numel() or twice or ordered.min() < -1 or ordered.max() >= length:
        raise CalibrationError(f"arm {arm} gave positions that are no set within 0..{length - 1}")
    if (ordered[:, -1] < 0).any():
        raise CalibrationError(f"arm {arm} keeps nothing in some unit")
    return positions


def _stacked(kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [N, U, width] of sets of several widths."""
    width = max(one.shape[1] for one in kept)
    pad = torch.nn.functional.pad
    return torch.stack([pad(one, (0, width - one.shape[1]), value=-1) for one in kept])


class _Scorer:
    """Scores one case's last hidden states against its answer and the full cache's predictions."""

    def __init__(self, model: JudgedModel, judged: Judged) -> None:
        self._model, self._judged = model, judged
        case = judged.case
        self._scored = case.scored
        device = judged.full.device
        self._targets = torch.tensor(case.continuation[self._scored], device=device)
        self._choices = torch.tensor(case.choices, dtype=torch.int64, device=device)
        self._full = model.log_probs(judged, judged.full[self._scored], self._scored)
        self._first_right = True
        if case.start == 0:  # the first answer token is the prefill's, alike in every arm
            first = model.log_probs(judged, judged.full[:1], slice(0, 1))
            self._first_right = int(first.argmax()) == case.continuation[0]

    def score(self, arm: str, budget: int | None, kept: float, hidden: torch.Tensor) -> Score:
        """``hidden`` [C - 1, hidden]: the last layer's output for all but the last token."""
        if arm == FULL:
            ours = self._full
        else:
            before = slice(self._scored.start - 1, self._scored.stop - 1)
            ours = self._model.log_probs(self._judged, hidden[before], self._scored)
        best = self._best(ours)
        right = best == self._targets
        nll = -ours.gather(1, self._targets[:, None])
        kl = (self._full.exp() * (self._full - ours)).sum(-1)
        return Score(
            arm, budget, kept,
            accuracy=float(right.double().mean()),
            exact=self._first_right and bool(right.all()),
            nll=float(nll.double().mean()),
            kl=float(kl.double().mean()),
            agreement=float((best == self._best(self._full)).double().mean()),
        )  # fmt: skip

    def _best(self, log_probs: torch.Tensor) -> torch.Tensor:
        """int64 [n], the predicted tokens."""
        best = log_probs.argmax(-1)
        if len(self._choices):
            best[-1] = self._choices[log_probs[-1, self._choices].argmax()]
        return best

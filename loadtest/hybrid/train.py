"""Trains the small hybrid: short samples first, longer ones once the short ones are answered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from transformers import PreTrainedModel

from loadtest.hybrid.tasks import TASKS, Sample, Tasks

STEPS = 1600
LENGTHS = (64, 128, 256, 512, 1024, 2048)
LOOKED_UP = ("needle", "recall")
PASSED = 0.9  # of the asked tokens of these tasks, smoothed, before samples get longer
ROWS = 32
BATCH_TOKENS = 8192  # at most
SMOOTHING = 0.9
WARMUP = 100  # steps
CLIP = 1.0


@dataclass
class Progress:
    """Where training is. ``accuracy``: of the asked tokens, by task, smoothed over steps."""

    step: int = 0
    length: int = LENGTHS[0]
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)


def train(
    model: PreTrainedModel,
    tasks: Tasks,
    steps: int,
    rate: float,
    report: Callable[[Progress], None],
    last: int | None = None,
) -> Progress:
    """Run ``steps`` steps of AdamW on ``model``, in place, or the first ``last`` of them.

    Args:
        rate: highest learning rate; it rises for ``WARMUP`` steps, then falls as a cosine.
        report: called after every step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    now, began = Progress(), time.monotonic()
    model.train()
    for step in range(steps if last is None else last):
        for group in optimizer.param_groups:
            group["lr"] = rate * _schedule(step, steps)
        length = _length(now, step / steps)
        if length != now.length:
            now.length, now.accuracy = length, {}
        ids, weights, samples = tasks.batch(min(ROWS, BATCH_TOKENS // length), length)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        asked = weights[:, 1:].flatten()
        loss = (losses * asked).sum() / asked.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        _smooth(now, logits.argmax(-1) == ids[:, 1:], samples)
        now.step, now.loss, now.tokens = step + 1, float(loss.detach()), now.tokens + ids.numel()
        now.seconds = time.monotonic() - began
        report(now)
    return now


def _schedule(step: int, steps: int) -> float:
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))


def _length(now: Progress, done: float) -> int:
    """The next length once looking up is passed; the last two at the latest near the end."""
    index = LENGTHS.index(now.length)
    passed = all(now.accuracy.get(task, 0.0) > PASSED for task in LOOKED_UP)
    if passed and index + 1 < len(LENGTHS):
        index += 1
    return LENGTHS[max(index, 4 if done > 0.7 else 0)]


def _smooth(now: Progress, right: torch.Tensor, samples: Sequence[Sample]) -> None:
    found: dict[str, list[float]] = {}
    for row, sample in zip(right, samples, strict=True):
        for start, end in sample.answers:
            found.setdefault(sample.task, []).append(float(row[start - 1 : end - 1].float().mean()))
    for task, values in found.items():
        mean = sum(values) / len(values)
        before = now.accuracy.get(task, 0.0)
        now.accuracy[task] = SMOOTHING * before + (1 - SMOOTHING) * mean


@dataclass(frozen=True)
class Score:
    """Held-out answers of one task at one length: how many, and the share that is right whole."""

    task: str
    length: int
    answers: int
    right: float


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel, tasks: Tasks, lengths: Sequence[int], count: int
) -> list[Score]:
    """Ask ``count`` samples of every task at every length, teacher-forced."""
    model.eval()
    scores = []
    for length in lengths:
        for task in TASKS:
            right = []
            for _ in range(count):
                sample = tasks.sample(task, length)
                ids = torch.tensor([sample.ids])
                best = model(input_ids=ids, use_cache=False).logits[0, :-1].argmax(-1)
                same = best == ids[0, 1:]
                right += [bool(same[a - 1 : b - 1].all()) for a, b in sample.answers]
            scores.append(Score(task, length, len(right), sum(right) / max(1, len(right))))
    return scores


def plain(item: Progress | Score) -> dict:
    """As a JSON object, numbers rounded for a log."""

    def short(value):
        if isinstance(value, dict):
            return {key: short(x) for key, x in value.items()}
        return round(value, 4) if isinstance(value, float) else value

    return short(asdict(item))

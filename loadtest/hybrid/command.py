"""``python -m loadtest train-hybrid``: train the small hybrid that the tests and examples use."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.errors import UserError
from loadtest.hybrid.train import STEPS, Progress
from loadtest.model_fetch import sha256_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOG = "training.jsonl"
SUMS = "SHA256SUMS"
TEXTS = "calibration.jsonl"
TEXT_COUNT, TEXT_LENGTH = 24, 2048
EVALUATED = (512, 1024, 2048)
ITEMS = 12  # held-out samples of each task and length; a sample asks several times
EVERY = 10  # steps between lines of the log
SAVE_EVERY = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``train-hybrid``."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument(
        "--stop-after", type=int, metavar="N", help="end after N steps of the --steps planned"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--threads", type=int, default=2)


def run(args: argparse.Namespace) -> int:
    """Train, evaluate, write the folder by one rename. Raises UserError.

    Side effects: ``DIR.partial`` with weights and log while it trains.
    """
    if args.out.exists():
        raise UserError(f"--out {args.out} exists; remove it or name another folder")
    counts = (args.steps, args.threads, args.stop_after or 1)
    if min(counts) < 1 or not 0 < args.rate < 1:
        raise UserError(
            "--steps, --stop-after and --threads must be 1 or more, --rate above 0 and below 1"
        )
    import torch

    from loadtest.hybrid.model import make_model, make_tokenizer, save
    from loadtest.hybrid.tasks import Tasks
    from loadtest.hybrid.train import evaluate, plain, train

    torch.set_num_threads(args.threads)
    partial = args.out.with_name(args.out.name + ".partial")
    if partial.exists():
        raise UserError(f"{partial} is left from another run; remove it, or name another --out")
    partial.mkdir(parents=True)
    last = min(args.steps, args.stop_after or args.steps)
    tokenizer, model = make_tokenizer(), make_model(args.seed)
    with (partial / LOG).open("w", buffering=1) as log:

        def write(line: dict) -> None:
            log.write(json.dumps(line) + "\n")
            print(json.dumps(line), file=sys.stderr, flush=True)

        write(_settings(args, model))

        def report(now: Progress) -> None:
            if now.step % EVERY == 0 or now.step == last:
                write(plain(now))
            if now.step % SAVE_EVERY == 0:
                save(model, tokenizer, partial)

        tasks = Tasks(tokenizer, args.seed)
        train(model, tasks, args.steps, args.rate, report, last)
        save(model, tokenizer, partial)
        for score in evaluate(model, Tasks(tokenizer, f"held out {args.seed}"), EVALUATED, ITEMS):
            write({"held_out": plain(score)})
    write_texts(tokenizer, args.seed, partial / TEXTS)
    write_sums(partial)
    partial.rename(args.out)
    print(f"wrote {args.out}")
    return 0


def _settings(args: argparse.Namespace, model) -> dict:
    import torch
    import transformers

    return {
        "command": f"python -m loadtest train-hybrid --steps {args.steps} --seed {args.seed} "
        f"--rate {args.rate} --threads {args.threads}"
        + (f" --stop-after {args.stop_after}" if args.stop_after else ""),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def write_texts(tokenizer: PreTrainedTokenizerFast, seed: int, path: Path) -> None:
    """Held-out texts of the tasks that look up, to calibrate the model on: JSON lines."""
    from loadtest.hybrid.tasks import Tasks
    from loadtest.hybrid.train import LOOKED_UP

    tasks = Tasks(tokenizer, f"calibration {seed}")
    samples = [tasks.sample(LOOKED_UP[i % 2], TEXT_LENGTH) for i in range(TEXT_COUNT)]
    lines = [json.dumps({"text": tokenizer.decode(sample.ids)}) for sample in samples]
    path.write_text("\n".join(lines) + "\n")


def write_sums(folder: Path) -> None:
    """``SHA256SUMS`` of every other file."""
    lines = [
        f"{sha256_file(path)}  {path.name}"
        for path in sorted(folder.iterdir())
        if path.name != SUMS
    ]
    (folder / SUMS).write_text("\n".join(lines) + "\n")

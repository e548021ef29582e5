"""``python -m flashinfer_ext balance``: how evenly a decode step is cut up when heads differ.

Compared, for rows of one (request, kv head) each: the chunks of ``triton_work``; per-request
splits, as SGLang 0.5.23 makes them; and FlashInfer 0.7.2's plans, its scheduler.cuh ported line by
line (the tests run the original beside it where nvcc is found).
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from flashinfer_ext.contract import CHUNK_STEP, ITEMS_PER_PROCESSOR

FULL = 2**31 - 1
SGLANG_BLOCK, SGLANG_SPLITS = 32, 8  # its smallest split in tokens, its default most splits


class BalanceError(Exception):
    """Bad input; one line says what."""


class Batch(msgspec.Struct, frozen=True):
    """Requests of ``lengths`` tokens on one layer of kv heads with ``windows``, ``sinks`` each."""

    name: str
    lengths: tuple[int, ...]
    windows: tuple[int, ...]
    group: int = 4
    sinks: int = 4

    def reads(self) -> np.ndarray:
        """int64 [requests, heads], tokens that each row reads."""
        length, window = np.array(self.lengths)[:, None], np.array(self.windows)[None]
        return np.minimum(length, window + np.where(window == FULL, 0, self.sinks))


class Chip(msgspec.Struct, frozen=True):
    """``sms`` multiprocessors, and how many CTAs of FlashInfer's CUDA-core decode share one, at
    its likely best, ``flashinfer``."""

    sms: int = 132
    flashinfer: int = 8


class Cut(msgspec.Struct, frozen=True):
    """What a scheme made of a batch: its items' number, longest and mean, in tokens; ``skew`` is
    longest / mean, and ``finish`` the time of the last item over that of a perfect cut, when each
    of ``2 * sms`` slots takes the next item in order (1.0 is ideal)."""

    batch: str
    scheme: str
    items: int
    longest: int
    mean: float
    skew: float
    finish: float


def our_items(reads: np.ndarray, target: int) -> np.ndarray:
    """Tokens of each work item in launch order: what ``triton_work``'s fill kernel lists.

    Args:
        reads: [requests, heads].
        target: items beyond one per row.
    """
    total = int(reads.sum())
    chunk = max(-(-total // (target * CHUNK_STEP)) * CHUNK_STEP, CHUNK_STEP)
    items = _pieces(reads.ravel(), np.full(reads.size, chunk))
    long = 2 * items >= chunk
    return np.concatenate([items[long], items[~long]])


def sglang_splits(lengths: Sequence[int], heads: int, group: int, sms: int) -> np.ndarray:
    """Splits of each request, as ``get_num_kv_splits_triton`` counts them (int64 [requests])."""
    lens = np.array(lengths)
    most, least = int(lens.max()), int(lens.min())
    if most * 8 < least * 10:
        least = most
    by_skew = min(-(-most // least), SGLANG_SPLITS)
    cores = int(np.float32(sms) * max(math.log2(most / 64), 1.0))
    tiles = -(-heads * group // min(16, group))
    by_cores = min(-(-cores // (len(lens) * tiles)), SGLANG_SPLITS)
    chunks = [-(-most // splits) for splits in (by_skew, by_cores)]
    return np.maximum(*(-(-lens // chunk) for chunk in chunks))


def sglang_items(batch: Batch, sms: int) -> np.ndarray:
    """Every head of a request is split into as many parts as its length asks for."""
    reads = batch.reads()
    splits = sglang_splits(batch.lengths, reads.shape[1], batch.group, sms)[:, None]
    part = -(-reads // splits)
    return _pieces(reads.ravel(), (-(-part // SGLANG_BLOCK) * SGLANG_BLOCK).ravel())


def flashinfer_decode_chunk(reads: Sequence[int], page: int, grid: int) -> int | None:
    """Chunk of FlashInfer's CUDA-core decode in tokens, None where it does not split.

    As ``BatchDecodeWithPagedKVCacheWorkEstimationDispatched`` in CUDA-graph mode, of rows with one
    kv head each and ``grid`` CTAs resident.
    """
    if len(reads) >= grid:
        return None
    pages = -(-np.array(reads) // page)
    return page * _search(max(128 // page, 1), int(pages.max()), pages, grid)


def flashinfer_prefill_chunk(reads: Sequence[int], page: int, grid: int) -> int:
    """Chunk of FlashInfer's tensor-core (FA2) plan in tokens, of rows with one query token and one
    kv head: ``PrefillBinarySearchKVChunkSize`` with ``grid`` CTAs (two per multiprocessor)."""
    pages = np.maximum(-(-np.array(reads) // page), 1)
    return page * _search(max(128 // page, 1), int(pages.max()), pages, grid)


def _search(low: int, high: int, pages: np.ndarray, grid: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if int((-(-pages // middle)).sum()) > grid:
            low = middle + 1
        else:
            high = middle
    return low


def _pieces(reads: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    rows = []
    for length, chunk in zip(reads.tolist(), chunks.tolist(), strict=True):
        full, rest = divmod(length, chunk)
        rows += [chunk] * full + [rest] * bool(rest)
    return np.array(rows)


def finish_time(items: np.ndarray, slots: int) -> int:
    """When the last of ``slots`` is done, if each takes the next item as it gets free (tokens)."""
    busy = [0] * slots
    for tokens in items.tolist():
        heapq.heapreplace(busy, busy[0] + tokens)
    return max(busy)


def cuts_of(batch: Batch, chip: Chip, page: int = 16) -> list[Cut]:
    """All schemes on one batch."""
    reads = batch.reads()
    flat, slots = reads.ravel(), 2 * chip.sms
    decode = flashinfer_decode_chunk(flat, page, chip.flashinfer * chip.sms)
    prefill = flashinfer_prefill_chunk(flat, page, 2 * chip.sms)
    schemes: dict[str, Callable[[], np.ndarray]] = {
        "RaggedKV work list": lambda: our_items(reads, ITEMS_PER_PROCESSOR * chip.sms),
        "per-request splits (SGLang)": lambda: sglang_items(batch, chip.sms),
        f"FlashInfer decode, {chip.flashinfer} CTAs/SM": lambda: _pieces(
            flat, np.full(flat.size, decode or int(flat.max()))
        ),
        "FlashInfer tensor-core": lambda: _pieces(flat, np.full(flat.size, prefill)),
    }
    return [_cut(batch.name, name, items(), slots) for name, items in schemes.items()]


def _cut(batch: str, scheme: str, items: np.ndarray, slots: int) -> Cut:
    longest, mean = int(items.max()), float(items.mean())
    finish = finish_time(items, slots) / (float(items.sum()) / slots)
    return Cut(
        batch, scheme, len(items), longest, round(mean, 1), round(longest / mean, 2),
        round(finish, 2),
    )  # fmt: skip


def default_batches(length: int = 32768, window: int = 1024, heads: int = 8) -> list[Batch]:
    """One full head beside windows: 8, 64, 256 requests of one length, and 64 of mixed lengths."""
    windows = (FULL, *[window] * (heads - 1))
    batches = [
        Batch(f"{count} requests of {length}, 1 of {heads} heads full, windows {window}",
              (length,) * count, windows)
        for count in (8, 64, 256)
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    mixed = tuple(rng.integers(min(1024, length), length + 1, 64).tolist())
    name = f"64 requests of {min(1024, length)} to {length}, 1 of {heads} heads full"
    return [*batches, Batch(name, mixed, windows)]


def policy_batch(folder: Path, length: int, requests: int = 64) -> Batch:
    """The layer of an artifact's default point whose rows differ most (longest / mean).

    Raises:
        BalanceError: not a sound artifact.
    """
    from kvpolicy.artifact import load_artifact
    from kvpolicy.errors import PolicyError

    try:
        policy = load_artifact(folder).policy()
    except PolicyError as error:
        raise BalanceError(str(error)) from error
    reads = np.minimum(policy.windows, length)
    used = [row[row > 0] for row in reads]
    layer = max(range(len(used)), key=lambda index: used[index].max() / used[index].mean())
    windows = tuple(int(w) for w in policy.windows[layer] if w > 0)
    name = f"{requests} requests of {length}, layer {layer} of {folder.parent.name}"
    return Batch(name, (length,) * requests, windows, 3, policy.sinks)


def add_balance(commands: argparse._SubParsersAction) -> None:
    """Add the command's options."""
    parser = commands.add_parser("balance", help="compare how decode work is cut for uneven heads")
    parser.add_argument("--length", type=_count, default=32768, help="tokens (default: 32768)")
    parser.add_argument("--window", type=_count, default=1024, help="tokens (default: 1024)")
    parser.add_argument("--sms", type=_count, default=132, help="multiprocessors (default: 132)")
    parser.add_argument(
        "--policy", type=Path, metavar="FOLDER", help="also the most uneven layer of this policy"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(command=run_balance)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 to {1 << 24} is wanted")
    return int(text)


def run_balance(args: argparse.Namespace) -> int:
    """Print the table. Returns 0.

    Raises:
        BalanceError: a policy that cannot be read, or a file that cannot be written.
    """
    from rich.console import Console
    from rich.table import Table

    batches = default_batches(args.length, args.window)
    if args.policy:
        batches.append(policy_batch(args.policy, args.length))
    cuts = [cut for batch in batches for cut in cuts_of(batch, Chip(args.sms))]
    table = Table(title=f"Decode work of one layer, {args.sms} multiprocessors")
    for name in ("batch", "scheme", "items", "longest", "mean", "longest/mean", "finish/ideal"):
        table.add_column(name, justify="left" if name in ("batch", "scheme") else "right")
    for cut in cuts:
        table.add_row(
            cut.batch, cut.scheme, str(cut.items), str(cut.longest), f"{cut.mean:.0f}",
            f"{cut.skew:.2f}", f"{cut.finish:.2f}",
        )  # fmt: skip
    console = Console()
    Console(width=console.width if console.is_terminal else 150).print(table)
    if args.json:
        _write(args.json, cuts)
    return 0


def _write(path: Path, cuts: Sequence[Cut]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(cuts)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BalanceError(f"cannot write {path}: {error.strerror}") from error

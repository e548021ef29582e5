"""The seeded faults that ``mutants`` tries: name, file, and the text that one replaces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TILES, WORK, DECODE, EXTEND = (
    f"triton_{name}.py" for name in ("tiles", "work", "decode", "extend")
)
ON_DECODE = ("test_triton_decode.py", "test_work_list.py")
ON_EXTEND = ("test_triton_extend.py",)
BOTH = ("test_triton_extend.py", "test_triton_decode.py")


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, the ``nth`` (from 0) occurrence of ``old`` becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    nth: int = 0

    def apply(self, package: Path) -> None:
        """Edit the copy of the package. Raises ValueError if there is no such text."""
        path = package / self.file
        source = path.read_text()
        places = [found.start() for found in re.finditer(re.escape(self.old), source)]
        if len(places) <= self.nth:
            raise ValueError(f"{self.file} has no {self.old!r} number {self.nth}")
        at = places[self.nth]
        path.write_text(source[:at] + self.new + source[at + len(self.old) :])


def _on(file: str, tests: tuple[str, ...], faults: dict[str, tuple]) -> list[Mutant]:
    """``faults``: name -> (old, new[, nth])."""
    return [Mutant(name, file, text[0], text[1], tests, *text[2:]) for name, text in faults.items()]


MUTANTS = [
    *_on(
        WORK,
        ON_DECODE,
        {
            "window off by one": (
                "tl.maximum(length - window, 0)",
                "tl.maximum(length - window - 1, 0)",
            ),
            "sinks dropped": ("tl.minimum(sinks, first)", "tl.minimum(sinks * 0, first)"),
            "sinks past the window's start": ("tl.minimum(sinks, first)", "sinks"),
            "frozen count ignored": ("return tl.where(is_frozen, kept, 0)", "return kept * 0"),
            "frozen prompt not skipped": (
                "gap = tl.where(is_frozen, prompt, first - gap_at)",
                "gap = first - gap_at",
            ),
            "windowed heads frozen too": ("valid & (window == UNLIMITED) &", "valid &"),
            "padded rows have work": (
                "tl.where(valid & (length > 0), frozen",
                "tl.where(valid, 1 + frozen",
            ),
            "chunk rounded down": ("(total + target * STEP - 1)", "(total)"),
            "last part forgotten": ("(reads + chunk - 1) // chunk", "reads // chunk"),
            "empty rows without an item": (
                "(reads + chunk - 1) // chunk, 1)",
                "(reads + chunk - 1) // chunk, 0)",
            ),
            "first places off": (
                "firsts = tl.cumsum(parts, 0) - parts",
                "firsts = tl.cumsum(parts, 0) - 1",
            ),
            "short items over long ones": (
                "short_places = tl.sum(long, 0) + tl.cumsum",
                "short_places = tl.cumsum",
            ),
            "long items at the end": ("2 * last >= chunk", "2 * last < chunk"),
            "one part too many": ("mine = part < parts", "mine = part <= parts"),
            "stale items kept": ("mask=(item >= used) & (item < items)", "mask=item < 0"),
            "layer's own heads ignored": ("layer * HEADS + row % HEADS", "row % HEADS"),
            "lists of layers overlap": (
                "place = layer * item_stride + tl.where",
                "place = tl.where",
            ),
        },
    ),
    *_on(
        DECODE,
        ON_DECODE,
        {
            "gap starts a token late": ("own < gap_at", "own <= gap_at"),
            "gap off by one": (
                "tl.where(own < gap_at, 0, gap)",
                "tl.where(own < gap_at, 0, gap + 1)",
            ),
            "tail mask dropped": ("live = index < end", "live = index < end + BLOCK_N"),
            "chunk end off by one": (
                "(part + 1) * chunk, reads)",
                "(part + 1) * chunk - 1, reads)",
            ),
            "chunks overlap": ("tl.minimum((part + 1) * chunk, reads)", "reads"),
            "wrong query heads": (
                "(h * GROUP + g)[:, None] * stride_qh",
                "(g * HEADS + h)[:, None] * stride_qh",
            ),
            "query rows packed": (
                "r.to(tl.int64) * stride_qr",
                "r.to(tl.int64) * HEADS * GROUP * D",
            ),
            "output rows packed": (
                "r.to(tl.int64) * stride_or",
                "r.to(tl.int64) * HEADS * GROUP * DV",
            ),
            "merged rows packed": (
                "r.to(tl.int64) * stride_or",
                "r.to(tl.int64) * HEADS * GROUP * DV",
                1,
            ),
            "request slot is the row": ("slots + request * stride_slot", "slots + r * stride_slot"),
            "page by position": ("logical // PAGE", "position // PAGE"),
            "slot by index": ("slot = position % PAGE", "slot = own % PAGE"),
            "frozen slot by position": ("tl.where(in_compact, index % PAGE, slot)", "slot"),
            "frozen pages from the list's start": ("compact + first_compact +", "compact +"),
            "unit is the head": ("unit = tl.load(units + head)", "unit = head"),
            "windowed heads read compact pages": ("(window == UNLIMITED) & (length", "(length"),
            "keys as values": ("live, PAGE * D, PAGE,", "live, 0, PAGE,"),
            "values where keys are as wide": ("live, PAGE * D, PAGE,", "live, PAGE * DV, PAGE,"),
            "merge by lengths": ("tl.sum(weights, 0)", "tl.sum(tl.where(live, 1.0, 0.0), 0)"),
            "merge without rescaling": ("acc = acc * decay + tl.sum", "acc = acc + tl.sum"),
            "merge drops its first part": (
                "part = start + tl.arange(0, MERGED)",
                "part = start + 1 + tl.arange(0, MERGED)",
            ),
            "merged sum is the largest part's": ("top + tl.log(mass)", "top"),
            "partial place by item": (
                "(tl.load(row_firsts + layer * row_stride + row) + part) * GROUP + g",
                "item * GROUP + g",
            ),
            "partial place by part": (
                "(tl.load(row_firsts + layer * row_stride + row) + part) * GROUP + g",
                "part * GROUP + g",
            ),
        },
    ),
    *_on(
        TILES,
        BOTH,
        {
            "scale missing": ('input_precision="ieee") * scale', 'input_precision="ieee")'),
            "soft-cap dropped": ("if CAP > 0:", "if CAP > 1e9:"),
            "soft-cap halved": ("tl.exp(2.0 * s / CAP)", "tl.exp(s / CAP)"),
            "hidden keys read": ("mask = live[:, None]", "mask = (live | True)[:, None]"),
            "hidden keys weighed": (
                "tl.where(visible, s, float",
                "tl.where(visible | True, s, float",
            ),
            "largest score of the tile": ("tl.maximum(top, tl.max(s, 1))", "tl.max(s, 1)"),
            "sum not rescaled": ("mass = mass * decay + tl.sum", "mass = mass + tl.sum"),
            "values not rescaled": ("acc = acc * decay[:, None]", "acc = acc * 1.0"),
            "nothing seen yet is NaN": ('tl.where(new == float("-inf"), 0.0, new)', "new"),
            "log-sum-exp in base 2": ("tl.log2(safe)) * LN2", "tl.log2(safe))"),
            "padding of odd head dims read": (
                "mask = mask & (dims < DIM)[None, :]",
                "mask = mask & (dims >= 0)[None, :]",
            ),
        },
    ),
    *_on(
        EXTEND,
        ON_EXTEND,
        {
            "diagonal dropped": (
                "position[None, :] <= query[:, None]",
                "position[None, :] < query[:, None]",
            ),
            "diagonal off by one": (
                "position[None, :] <= query[:, None]",
                "position[None, :] <= query[:, None] + 1",
            ),
            "history window off by one": (
                "> query[:, None] - window",
                ">= query[:, None] - window",
            ),
            "chunk window off by one": (
                "> query[:, None] - window",
                ">= query[:, None] - window",
                1,
            ),
            "history sinks dropped": ("| (position < sink)[None, :]", ""),
            "chunk sinks dropped": ("| (position < sink)[None, :]", "", 1),
            "history sinks hidden": (
                "((position > oldest) | (position < sink))",
                "(position > oldest)",
            ),
            "history position test dropped": ("& (position < begin)", ""),
            "empty history slots read": ("(position >= 0) &", ""),
            "oldest off by one": ("begin + first - window", "begin + first - window + 1"),
            "oldest of the block's last query": (
                "begin + first - window",
                "begin + first + QUERIES - 1 - window",
            ),
            "last history slots forgotten": (
                "for start in range(0, slots, BLOCK_N)",
                "for start in range(0, slots - PAGE, BLOCK_N)",
            ),
            "nearest of the block's last query": (
                "first - window + 1, 0) //",
                "first + QUERIES - window, 0) //",
            ),
            "sinks of the chunk skipped": ("tl.minimum(tl.maximum(sink - begin, 0), nearest)", "0"),
            "sinks counted twice": (
                "tl.minimum(tl.maximum(sink - begin, 0), nearest)",
                "tl.maximum(sink - begin, 0)",
            ),
            "last sink of the chunk forgotten": (
                "tl.maximum(sink - begin, 0)",
                "tl.maximum(sink - begin - 1, 0)",
            ),
            "rows of other requests written": (
                "(m < QUERIES * GROUP) & (own < length)",
                "(m < QUERIES * GROUP)",
            ),
            "packed rows past the block": ("(m < QUERIES * GROUP) &", ""),
            "queries of the first request": ("row = (first_row + own)", "row = (own)"),
            "keys of the first request": (
                "first_row + index, live, stride_kt",
                "index, live, stride_kt",
            ),
            "values of the first head": ("v + h * stride_vh", "v"),
            "wrong query heads of the chunk": (
                "h * GROUP + m % GROUP",
                "m % GROUP * tl.num_programs(2) + h",
            ),
            "another request's positions": (
                "tl.load(position_starts + cell)",
                "tl.load(position_starts + r)",
            ),
            "history of the head, not its unit": ("unit = tl.load(units + head)", "unit = head"),
            "first layer's heads": ("head = first_head + h", "head = h"),
            "last block skipped": ("if first >= length", "if first + 1 >= length"),
        },
    ),
]

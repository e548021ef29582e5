"""What is measured on a GPU, in order of importance; names are the lines' ``case``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

FULL = 2**31 - 1
HEADS = 8
PAGE = 16
SINKS = 4
Kind = Literal["copy", "decode", "extend", "worklist", "replay"]
KINDS: tuple[Kind, ...] = ("copy", "decode", "extend", "worklist", "replay")

WINDOWS: dict[str, tuple[int, ...]] = {
    "uniform": (FULL,) * HEADS,
    "skewed": (FULL, *[1024] * (HEADS - 1)),
    "policy": (64, 256, 512, 512, 1024, 1024, FULL, FULL),
}
"""Per kv head. ``policy``: eight quantiles of the SmolLM2 policy under ``artifacts``."""


@dataclass(frozen=True)
class BenchCase:
    """One case. ``windows`` names a row of ``WINDOWS``; ``lengths`` (least, most) tokens of a
    request, for ``extend`` (history, chunk); ``small`` shrinks what has a fixed size."""

    kind: Kind
    windows: str = "skewed"
    requests: int = 64
    head_dim: int = 128
    group: int = 4
    lengths: tuple[int, int] = (8192, 32768)
    small: bool = False

    @property
    def name(self) -> str:
        """Such as ``decode skewed 64x D128 G4``."""
        if self.kind == "copy":
            return "copy"
        words = [self.kind, self.windows, f"{self.requests}x", f"D{self.head_dim}"]
        words.append(f"G{self.group}")
        if self.kind == "extend":
            words += [f"chunk{self.lengths[1]}", f"history{self.lengths[0]}"]
        return " ".join(words)

    @property
    def head_windows(self) -> tuple[int, ...]:
        """Window of each kv head."""
        rows = WINDOWS[self.windows]
        if not self.small:
            return rows
        return tuple(window if window == FULL else max(1, window // 32) for window in rows[:2])

    @property
    def sinks(self) -> int:
        """Sinks of every head, in tokens."""
        return SINKS


def full_cases() -> list[BenchCase]:
    """All cases, the most telling first."""
    cases = [BenchCase("copy")]
    for windows in ("skewed", "uniform"):
        cases += [BenchCase("decode", windows, requests) for requests in (64, 8, 256)]
    cases += [BenchCase("replay", requests=16), BenchCase("worklist", requests=64)]
    cases += [_extend(windows, 8192, 2048) for windows in ("skewed", "uniform")]
    cases += [BenchCase("decode", "policy", requests) for requests in (64, 8, 256)]
    for head_dim, group in ((64, 4), (128, 8), (128, 1), (64, 8), (64, 1)):
        for windows in ("skewed", "uniform"):
            cases += [
                BenchCase("decode", windows, requests, head_dim, group) for requests in (64, 8, 256)
            ]
    cases += [BenchCase("worklist", requests=requests) for requests in (8, 256)]
    for head_dim in (128, 64):
        for history in (8192, 0):
            for chunk in (2048, 512):
                for windows in ("skewed", "uniform"):
                    cases.append(_extend(windows, history, chunk, head_dim))
    return list(dict.fromkeys(cases))


def _extend(windows: str, history: int, chunk: int, head_dim: int = 128) -> BenchCase:
    """4096 fresh tokens in all."""
    return BenchCase("extend", windows, 4096 // chunk, head_dim, 4, (history, chunk))


def small_cases() -> list[BenchCase]:
    """The same code paths on sizes that Triton's interpreter manages in seconds."""
    tiny = BenchCase("decode", requests=2, head_dim=64, group=2, lengths=(20, 70), small=True)
    chunk = dataclasses.replace(tiny, kind="extend", lengths=(48, 20))
    return [
        dataclasses.replace(tiny, kind="copy"),
        tiny,
        dataclasses.replace(tiny, windows="uniform", group=1),
        dataclasses.replace(tiny, kind="replay", lengths=(1, 24)),
        dataclasses.replace(tiny, kind="worklist"),
        chunk,
        dataclasses.replace(chunk, windows="uniform", lengths=(0, 20)),
    ]

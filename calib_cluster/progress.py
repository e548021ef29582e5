"""Progress of a calibration as log lines: they read the same in a terminal and in a job's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from calib_cluster.seqcalib import SeqCalib
from kvpolicy.geometry import ModelGeometry

BAR = 20


class LayerProgress:
    """One line a layer: how far, what every tau keeps so far, elapsed, and time left.

    Args:
        geometry: the model.
        length: tokens at which kept shares are told.
        resumed: layers that were finished before this run.
        say: takes one line.
    """

    def __init__(
        self, geometry: ModelGeometry, length: int, resumed: int, say: Callable[[str], None]
    ) -> None:
        self._layers, self._length, self._say = len(geometry.layers), length, say
        self._resumed = resumed
        self._began = time.monotonic()

    def start(self) -> None:
        """Count time from now on."""
        self._began = time.monotonic()

    def layer_done(self, seqcalib: SeqCalib) -> None:
        """Tell that the last recorded layer is finished."""
        done = seqcalib.next_layer
        elapsed = time.monotonic() - self._began
        left = elapsed / (done - self._resumed) * (self._layers - done)
        bar = "#" * (BAR * done // self._layers)
        kept = ", ".join(
            f"{tau:g}: {kept_share(seqcalib, tau, self._length):.0%}"
            for tau in seqcalib.settings.taus
        )
        self._say(
            f"[{bar:<{BAR}}] layer {done} of {self._layers} | "
            f"tau: kept at {self._length} tokens | {kept or 'nothing calibrated yet'} | "
            f"elapsed {clock(elapsed)}, ETA {clock(left)}"
        )


def kept_share(seqcalib: SeqCalib, tau: float, length: int) -> float:
    """Share of tokens that the units calibrated so far keep at ``length`` (1 if none are)."""
    windows = [w for row in seqcalib.chosen_rows(tau) for w in row]
    return _mean([min(1.0, (w + seqcalib.settings.sinks) / length) for w in windows])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""SeqCalib (HeadWiseKV; design section 3): which window each kv head needs, layer by layer.

For every global layer in execution order, with all lower layers already running their chosen
windows, each kv head takes the smallest codebook window whose mean cosine with the same layer's
full history reaches tau; full history always does. Exact per layer, greedy over depth.

Every tau follows its own trajectory, because it conditions on its own lower layers. Trajectories
are one until their choices differ, so what several taus have in common is computed once.

Pure bookkeeping: numbers in, decisions out. Workers do the work (``worker.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvpolicy.evidence import Evidence
from kvpolicy.geometry import LayerKind, ModelGeometry
from kvpolicy.windows import FULL, WindowPolicy


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``codebook``: finite candidate windows, ascending, in tokens; ``taus``: ascending, each in
    (0, 1]; ``sinks``: first tokens that every windowed global unit keeps."""

    codebook: tuple[int, ...]
    taus: tuple[float, ...]
    sinks: int


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trajectory after a layer: ``name``, the one it continues, what its taus chose there.

    ``windows`` of the layer's kv heads; None where the layer is not calibrated.
    """

    name: str
    parent: str
    taus: tuple[float, ...]
    windows: tuple[int, ...] | None


class LayerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happened at one layer: the state of a run is the list of its records.

    ``means`` maps each trajectory that was judged to its mean cosines [kv heads][codebook] (None
    where no query position binds); empty where the layer is not calibrated.
    """

    layer: int
    means: dict[str, list[list[float | None]]]
    branches: tuple[Branch, ...]


class Sums(msgspec.Struct, frozen=True):
    """Tallies of one trajectory over all prompts: ``sums`` float64 [Hkv, W], ``positions`` [W]
    (int64, one query head), ``group`` query heads a kv head."""

    sums: np.ndarray
    positions: np.ndarray
    group: int

    def means(self) -> np.ndarray:
        """float64 [Hkv, W]; NaN where no position binds."""
        counts = self.positions * self.group
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), np.nan)


def point_name(tau: float) -> str:
    """Name of the operating point of ``tau``: ``tau-0.99``."""
    return f"tau-{tau:g}"


def choose(means: np.ndarray, codebook: Sequence[int], tau: float) -> tuple[int, ...]:
    """Smallest window per kv head with mean cosine >= tau, else FULL. ``means`` [Hkv, W]."""
    reached = means >= tau  # NaN, a window without evidence, never is
    best = np.where(reached.any(1), reached.argmax(1), len(codebook))
    sizes = [*codebook, FULL]
    return tuple(sizes[j] for j in best)


class SeqCalib:
    """State of one calibration: trajectories and the records that led to them.

    Args:
        geometry: the model.
        settings: codebook, taus, sinks.
        lengths: tokens of every prompt.
    """

    def __init__(self, geometry: ModelGeometry, settings: Settings, lengths: Sequence[int]) -> None:
        self.geometry = geometry
        self.settings = settings
        self.records: list[LayerRecord] = []
        self.trajectories: dict[str, tuple[float, ...]] = {"tau0": settings.taus}
        binding = [[max(0, n - w - settings.sinks) for n in lengths] for w in settings.codebook]
        self.positions = np.array(binding, dtype=np.int64).sum(1)

    @property
    def next_layer(self) -> int:
        """The first layer without a record."""
        return len(self.records)

    @property
    def done(self) -> bool:
        """True once every layer has a record."""
        return self.next_layer == len(self.geometry.layers)

    def is_calibrated(self, layer: int) -> bool:
        """Only global attention layers get windows."""
        return self.geometry.layers[layer].kind is LayerKind.GLOBAL

    def decide(self, sums: Mapping[str, Sums]) -> LayerRecord:
        """Choose windows of ``next_layer`` for every tau.

        ``sums`` by trajectory name; empty for a layer that is not calibrated.
        """
        layer = self.next_layer
        if not self.is_calibrated(layer):
            kept = [Branch(n, n, taus, None) for n, taus in self.trajectories.items()]
            return LayerRecord(layer, {}, tuple(kept))
        means = {name: sums[name].means() for name in self.trajectories}
        branches = [b for name in self.trajectories for b in self._split(name, means[name])]
        plain = {name: _with_none(mean) for name, mean in means.items()}
        return LayerRecord(layer, plain, tuple(branches))

    def _split(self, parent: str, means: np.ndarray) -> list[Branch]:
        groups: dict[tuple[int, ...], list[float]] = {}
        for tau in self.trajectories[parent]:
            groups.setdefault(choose(means, self.settings.codebook, tau), []).append(tau)
        return [Branch(self._name(t), parent, tuple(t), w) for w, t in groups.items()]

    def _name(self, taus: Sequence[float]) -> str:
        return f"tau{self.settings.taus.index(taus[0])}"

    def record(self, record: LayerRecord) -> None:
        """Take over a layer's decisions: trajectories split as it says."""
        if record.layer != self.next_layer:
            raise ValueError(f"record of layer {record.layer}, expected {self.next_layer}")
        self.records.append(record)
        self.trajectories = {branch.name: branch.taus for branch in record.branches}

    def chosen_rows(self, tau: float) -> list[tuple[int, ...]]:
        """Windows chosen for ``tau``, one row per calibrated layer so far."""
        branches = (self._branch(record, tau) for record in self.records)
        return [branch.windows for branch in branches if branch.windows is not None]

    def policy(self, tau: float) -> WindowPolicy:
        """The windows chosen for ``tau``, in a geometry's matrix form."""
        windows = WindowPolicy.native(self.geometry).windows.copy()
        for record in self.records:
            if (chosen := self._branch(record, tau).windows) is not None:
                windows[self.geometry.attention_index(record.layer), : len(chosen)] = chosen
        return WindowPolicy(self.geometry, windows, self.settings.sinks)

    def evidence(self) -> Evidence:
        """Mean cosines of every tau, layer, kv head and candidate window."""
        shape = (
            len(self.settings.taus), len(self.geometry.attention_layers),
            self.geometry.max_kv_heads, len(self.settings.codebook),
        )  # fmt: skip
        cosine = np.full(shape, np.nan)
        for record in self.records:
            if not record.means:
                continue
            for i, tau in enumerate(self.settings.taus):
                rows = record.means[self._branch(record, tau).parent]
                row = self.geometry.attention_index(record.layer)
                cosine[i, row, : len(rows)] = np.array(rows, dtype=np.float64)
        return Evidence(self.settings.codebook, cosine, self.positions)

    def fidelity(self, tau: float) -> float:
        """Mean over calibrated units of the mean cosine at the chosen window (1 for full)."""
        scores = [
            1.0 if window == FULL else means[self.settings.codebook.index(window)]
            for record in self.records
            if record.means
            for branch in [self._branch(record, tau)]
            for window, means in zip(branch.windows, record.means[branch.parent], strict=True)
        ]
        return round(float(np.mean(scores)), 6)

    @staticmethod
    def _branch(record: LayerRecord, tau: float) -> Branch:
        return next(branch for branch in record.branches if tau in branch.taus)


def _with_none(means: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in row] for row in means]

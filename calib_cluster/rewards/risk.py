"""Risk cells: the bins of eq. 7's two coordinates."""

from __future__ import annotations

import msgspec
import numpy as np

from calib_cluster.errors import CalibrationError

ENTROPY_BINS, PERPLEXITY_BINS = 20, 4  # appendix C.7


class RiskGrid(msgspec.Struct, frozen=True):
    """E x P risk cells by their inner edges (E - 1 and P - 1, ascending, exact in float32).

    A value equal to an edge belongs to the bin above it, as in ``kvpolicy.retention.bin_of``.

    Raises:
        CalibrationError: edges that do not ascend or are not finite.
    """

    entropy_edges: tuple[float, ...] = ()
    perplexity_edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, edges in (("entropy", self.entropy_edges), ("perplexity", self.perplexity_edges)):
            if not np.isfinite(edges).all() or list(edges) != sorted(edges):
                raise CalibrationError(f"{name} edges must ascend, found {list(edges)}")

    @classmethod
    def quantiles(
        cls,
        entropies: np.ndarray,
        perplexities: np.ndarray,
        bins: tuple[int, int] = (ENTROPY_BINS, PERPLEXITY_BINS),
    ) -> RiskGrid:
        """Cells whose rows and columns hold equally many of the calibration prompts.

        ``entropies``, ``perplexities`` float32 [n], one a prompt. Raises CalibrationError if empty.
        """
        if not len(entropies) or not len(perplexities):
            raise CalibrationError("risk cells need the risks of at least one prompt")
        return cls(_inner(entropies, bins[0]), _inner(perplexities, bins[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """(E, P)."""
        return len(self.entropy_edges) + 1, len(self.perplexity_edges) + 1

    def bins(self, entropy: np.ndarray, perplexity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int16 bins of float32 values, each of the shape given."""
        return tuple(
            np.searchsorted(np.array(edges, np.float32), values, side="right").astype(np.int16)
            for edges, values in (
                (self.entropy_edges, entropy),
                (self.perplexity_edges, perplexity),
            )
        )


def _inner(values: np.ndarray, bins: int) -> tuple[float, ...]:
    edges = np.quantile(values.astype(np.float64), np.arange(1, bins) / bins)
    return tuple(edges.astype(np.float32).tolist())

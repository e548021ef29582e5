"""Blockwise attention of one layer under windows, without ever holding a [T, T] matrix.

Two uses, one rule (design section 3): the query at position t of a kv head with window w and s
sinks reads keys ``[0, s) U [max(0, t - w + 1), t]``. ``judge`` compares every candidate window of
every kv head with full history in one pass; ``attend`` computes the output with chosen windows.
Memory grows with T only through the inputs and the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvpolicy.windows import FULL

QUERY_BLOCK = 128
KEY_TILE = 2048


@dataclass(frozen=True)
class HeadInputs:
    """What attention receives, after RoPE and before any output gate.

    ``q`` [Hq, T, D], ``k`` [Hkv, T, D], ``v`` [Hkv, T, Dv], any float dtype; Hq is a multiple of
    Hkv and kv head h serves query heads [h * G, (h + 1) * G). ``softcap`` (or None) bounds logits
    to +-softcap through tanh, as Gemma 2 does.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float
    softcap: float | None = None

    @property
    def length(self) -> int:
        """T, in tokens."""
        return self.q.shape[1]

    def heads(self, chosen: torch.Tensor) -> HeadInputs:
        """The same inputs for kv heads ``chosen`` (int64 [n]) and their query heads only."""
        grouped = self.q.unflatten(0, (self.k.shape[0], -1))
        q = grouped[chosen].flatten(0, 1)
        return HeadInputs(q, self.k[chosen], self.v[chosen], self.scaling, self.softcap)


@dataclass(frozen=True)
class Tally:
    """Sums behind mean cosines of one prompt and layer.

    ``sums`` float64 [Hkv, W]: cosines summed over binding query positions and the group's query
    heads. ``positions`` int64 [W]: binding query positions; the mean of head h and window j is
    ``sums[h, j] / (positions[j] * group)``.
    """

    sums: torch.Tensor
    positions: torch.Tensor
    group: int


class _OnlineSoftmax:
    """Softmax-weighted values over keys that arrive in pieces, for one block of queries.

    ``q`` is float32 [Hkv, G, B, D], already scaled, at positions ``t`` int64 [B].
    """

    def __init__(self, q: torch.Tensor, t: torch.Tensor, inputs: HeadInputs) -> None:
        self._q, self._t, self._inputs = q, t, inputs
        heads, group, block, _ = q.shape
        self._top = q.new_full((heads, group, block), float("-inf"))
        self._mass = q.new_zeros((heads, group, block))
        self._values = q.new_zeros((heads, group, block, inputs.v.shape[-1]))

    def add(self, start: int, stop: int, nearest: int = 0, farthest: int = FULL) -> None:
        """Add keys [start, stop) whose distance t - key lies in [nearest, farthest)."""
        for tile in range(start, stop, KEY_TILE):
            self._add_tile(tile, min(tile + KEY_TILE, stop), nearest, farthest)

    def _add_tile(self, start: int, stop: int, nearest: int, farthest: int) -> None:
        keys = self._inputs.k[:, None, start:stop].float()
        logits = self._q @ keys.transpose(-1, -2)
        if self._inputs.softcap is not None:
            logits = torch.tanh(logits / self._inputs.softcap) * self._inputs.softcap
        distance = self._t[:, None] - torch.arange(start, stop, device=self._t.device)
        logits.masked_fill_((distance < nearest) | (distance >= farthest), float("-inf"))
        top = torch.maximum(self._top, logits.amax(-1))
        floor = top.masked_fill(top == float("-inf"), 0.0)  # no key yet: every weight is 0
        weights = logits.sub_(floor[..., None]).exp_()
        decay = (self._top - floor).exp_()
        self._top = top
        self._mass = self._mass * decay + weights.sum(-1)
        fresh = weights @ self._inputs.v[:, None, start:stop].float()
        self._values = self._values * decay[..., None] + fresh

    def output(self) -> torch.Tensor:
        """float32 [Hkv, G, B, Dv] over the keys added so far; each query must have had one."""
        return self._values / self._mass[..., None]


def _blocks(inputs: HeadInputs, first: int = 0) -> Iterator[tuple[int, int, _OnlineSoftmax]]:
    """(start, stop, softmax) of query blocks that reach position ``first`` or beyond."""
    grouped = inputs.q.unflatten(0, (inputs.k.shape[0], -1))
    begin = first // QUERY_BLOCK * QUERY_BLOCK
    for start in range(begin, inputs.length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, inputs.length)
        t = torch.arange(start, stop, device=inputs.q.device)
        q = grouped[:, :, start:stop].float() * inputs.scaling
        yield start, stop, _OnlineSoftmax(q, t, inputs)


def judge(inputs: HeadInputs, codebook: Sequence[int], sinks: int) -> Tally:
    """Cosine of every windowed output with the full-history output, summed (SeqCalib's test).

    A window binds at position t if it hides a key there: t >= w + sinks.

    Args:
        inputs: one prompt's layer inputs, T tokens.
        codebook: finite windows, ascending, in tokens (the current one counted).
        sinks: first tokens that every window keeps.
    """
    heads, group = inputs.k.shape[0], inputs.q.shape[0] // inputs.k.shape[0]
    sums = torch.zeros(heads, len(codebook), dtype=torch.float64)
    for start, stop, softmax in _blocks(inputs, codebook[0] + sinks):
        binding = [w for w in codebook if stop - 1 >= w + sinks]
        outputs = _nested_outputs(softmax, start, stop, binding, sinks)
        reference = next(outputs)
        t = torch.arange(start, stop, device=inputs.q.device)
        for j, windowed in enumerate(outputs):
            cosine = torch.cosine_similarity(windowed, reference, dim=-1)
            cosine = cosine[..., t >= binding[j] + sinks]
            sums[:, j] += cosine.double().sum((1, 2)).cpu()
    counts = [max(0, inputs.length - w - sinks) for w in codebook]
    return Tally(sums, torch.tensor(counts), group)


def _nested_outputs(
    softmax: _OnlineSoftmax, start: int, stop: int, windows: Sequence[int], sinks: int
) -> Iterator[torch.Tensor]:
    """The full-history output of a query block, then that of each window.

    Windows are nested, so each adds only the keys between it and the one before it.
    """
    softmax.add(0, min(sinks, stop))
    kept, nearer = [], 0
    for window in windows:
        first = max(sinks, start - window + 1)
        softmax.add(first, max(first, stop - nearer), nearer, window)
        kept.append(softmax.output())
        nearer = window
    softmax.add(sinks, max(sinks, stop - nearer), nearer)
    yield softmax.output()
    yield from kept


def attend(inputs: HeadInputs, windows: torch.Tensor, sinks: int) -> torch.Tensor:
    """Attention output with one window per kv head.

    Args:
        inputs: one prompt's layer inputs.
        windows: int [Hkv], in tokens; ``FULL`` means all history.
        sinks: first tokens kept by every head that is not full.

    Returns:
        [T, Hq, Dv] in ``inputs.q``'s dtype.
    """
    heads, group = inputs.k.shape[0], inputs.q.shape[0] // inputs.k.shape[0]
    shape = (heads, group, inputs.length, inputs.v.shape[-1])
    out = torch.empty(shape, dtype=inputs.q.dtype, device=inputs.q.device)
    for window in windows.unique().tolist():
        chosen = torch.nonzero(windows == window)[:, 0].to(inputs.q.device)
        for start, stop, softmax in _blocks(inputs.heads(chosen)):
            first = 0 if window == FULL else max(0, start - window + 1)
            softmax.add(0, min(sinks, first))
            softmax.add(first, stop, 0, window)
            # sinks in the block's key range, for queries whose window has passed them
            softmax.add(first, max(first, min(sinks, stop)), window)
            out[chosen, :, start:stop] = softmax.output().to(out.dtype)
    return out.flatten(0, 1).transpose(0, 1)

"""Token scores of the freeze: window mass, value ratio, utility, layer maximum (eq. 4 and 6).

U is the number of frozen units, one unit being a KV head of a layer. All functions are pure, run
on the device of their arguments and never make a GPU wait for the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.retention.rule import RetentionRule

_EPSILON = 1e-12


def window_mass(
    q: Tensor,
    k: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    logit_cap: float = 0.0,
    block: int = 4096,
) -> Tensor:
    """Attention that observation queries pay to each key of one layer: the sum over j of eq. 4.

    ``mass[h, s] = sum_i mean_g softmax_s(scale * q[i, h, g] . k[h, s])``. Additive over rows, so
    a window that spans several chunks is the sum of its parts.

    Args:
        q: [n, H, G, D], rotated queries: n observation rows, H KV heads, G query heads a group.
        k: [H, S, D], rotated keys, any layout of slots.
        query_positions: int64 [n], positions in the prompt.
        key_positions: int64 [S]; query i reads key s iff ``0 <= key_positions[s] <=
            query_positions[i]``. Below 0 marks an empty slot, whose bytes may be anything.
        scale: factor of the logits, before the cap.
        logit_cap: ``c * tanh(logit / c)`` if above 0.
        block: keys a step; at most [H, n * G, block] logits are held. More keys take two passes.

    Returns:
        float32 [H, S], accumulated in float32 whatever the dtypes; rows without any visible key
        add nothing.
    """
    _, heads, group, _ = q.shape
    logits = _Logits(q, k, query_positions, key_positions, scale, logit_cap, block)
    if len(logits.starts) == 1:
        first = key_positions.masked_fill(key_positions < 0, torch.iinfo(torch.int64).max).min()
        sees = (logits.row_positions >= first).T.float()
        weights = logits.block(0, torch.finfo(torch.float32).min).softmax(-1)
        return torch.matmul(sees, weights)[:, 0] / group
    mass = logits.rows.new_zeros((heads, k.shape[1]))
    for start, weights in logits.weights():
        mass[:, start : start + block] = weights.sum(1) / group
    return mass


def focus_mass(
    q: Tensor,
    k: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    logit_cap: float = 0.0,
    block: int = 4096,
) -> Tensor:
    """Squared attention that queries pay to each key, one sum for every query head.

    ``focus[h, g, s] = sum_i softmax_s(scale * q[i, h, g] . k[h, s])^2``: where a query looks hard
    at one key, that key stands out more than in the plain sum. Additive over rows.

    Args: as ``window_mass``. Returns float32 [H, G, S].
    """
    n, heads, group, _ = q.shape
    logits = _Logits(q, k, query_positions, key_positions, scale, logit_cap, block)
    focus = logits.rows.new_zeros((heads, group, k.shape[1]))
    for start, weights in logits.weights():
        focus[..., start : start + block] = weights.square().unflatten(1, (n, group)).sum(1)
    return focus


class _Logits:
    """Logits of observation rows against keys, a block of keys at a time.

    ``rows`` float32 [H, n * G, D], scaled; ``row_positions`` int64 [n * G, 1].
    """

    def __init__(self, q, k, query_positions, key_positions, scale, logit_cap, block) -> None:
        n, heads, group, _ = q.shape
        self.rows = q.permute(1, 0, 2, 3).reshape(heads, n * group, -1).float() * scale
        self.row_positions = query_positions[:, None].expand(n, group).reshape(-1, 1)
        self.starts = range(0, k.shape[1], block)
        self._k, self._key_positions = k, key_positions
        self._cap, self._size = logit_cap, block

    def block(self, start: int, nothing: float = -torch.inf) -> Tensor:
        """[H, n * G, block], ``nothing`` where a row does not see the key."""
        part = slice(start, start + self._size)
        found = torch.matmul(self.rows, self._k[:, part].float().transpose(1, 2))
        if self._cap > 0:
            found = self._cap * torch.tanh(found / self._cap)
        positions = self._key_positions[part]
        hidden = (positions < 0) | (positions > self.row_positions)
        return found.masked_fill_(hidden, nothing)

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """(start, softmax weights [H, n * G, block]) of every block; 0 for rows that see none."""
        norm = self.rows.new_full(self.rows.shape[:2], -torch.inf)
        for start in self.starts:
            norm = torch.logaddexp(norm, torch.logsumexp(self.block(start), dim=-1))
        norm = norm.masked_fill(norm == -torch.inf, 0.0)[..., None]
        for start in self.starts:
            yield start, torch.exp(self.block(start) - norm)


def value_ratio(norms: Tensor) -> Tensor:
    """rho of eq. 4: each token's value norm over the mean of its unit.

    Args:
        norms: float32 [U, T], L2 norms of the cached values.

    Returns:
        float32 [U, T].
    """
    return norms / (norms.mean(dim=1, keepdim=True) + _EPSILON)


def pooled(mass: Tensor, kernel: int) -> Tensor:
    """Average of ``mass`` [N, T] over ``kernel`` neighbours along T; edges average what exists.

    ``kernel`` is odd; 1 returns ``mass`` unchanged. float32 [N, T].
    """
    if kernel == 1:
        return mass
    half = kernel // 2
    padded = functional.avg_pool1d(
        mass[:, None], kernel, stride=1, padding=half, count_include_pad=False
    )
    return padded[:, 0]


def alpha(mass: Tensor, layers: Tensor, rule: RetentionRule, window: int) -> Tensor:
    """alpha of eq. 4: ``T / W`` times the window mass, averaged over the rule's scope and pooled.

    The mean over T is 1 whatever T is, because every query's attention sums to 1.

    Args:
        mass: float32 [U, T], ``window_mass`` of each unit.
        layers: int64 [U], layer of each unit.
        rule: ``alpha_scope`` (global: over all U, as in the paper; layer; head) and ``pool``.
        window: W, the number of observation queries behind ``mass``.

    Returns:
        float32 [U, T].
    """
    averaged = mass
    if rule.alpha_scope == "global":
        averaged = mass.mean(dim=0, keepdim=True)
    elif rule.alpha_scope == "layer":
        # a product, not index_add: atomics would make sums depend on the run
        same = _same_layer(layers).to(mass.dtype)
        averaged = (same / same.sum(dim=1, keepdim=True)) @ mass
    scaled = pooled(averaged, rule.pool) * (mass.shape[1] / window)
    return scaled.expand_as(mass)


def utility(
    mass: Tensor, value_norms: Tensor, layers: Tensor, rule: RetentionRule, window: int
) -> Tensor:
    """u of eq. 4, ``alpha * rho``: a token's score before head weights.

    Args:
        mass, value_norms: float32 [U, T].
        layers: int64 [U].
        window: W, the number of observation queries behind ``mass``.

    Returns:
        float32 [U, T].
    """
    return alpha(mass, layers, rule, window) * value_ratio(value_norms)


def layer_max(scores: Tensor, layers: Tensor) -> Tensor:
    """Eq. 6: the maximum over the units of a layer, given back to each of them.

    Args:
        scores: float32 [U, T], head-weighted utilities.
        layers: int64 [U].

    Returns:
        float32 [U, T], equal rows within a layer.
    """
    first = _same_layer(layers).int().argmax(dim=1)  # each layer is named by its first unit
    index = first[:, None].expand_as(scores)
    best = torch.full_like(scores, -torch.inf).scatter_reduce(0, index, scores, "amax")
    return best.index_select(0, first)


def _same_layer(layers: Tensor) -> Tensor:
    return layers[:, None] == layers[None, :]

"""Retention tables for a model that none were compiled for, taken from another model's.

A rule of thumb, not a measurement: layers at the same relative depth, and heads (KV and query) at
the same place in their layer, get the same numbers. Risk bins and budgets stay the source's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvpolicy.errors import PolicyError
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.retention.mix_tables import MixTables
from kvpolicy.retention.tables import RetentionTables

METHOD = "relative depth and head order"
_UNREAD_WEIGHT = 1.0


class TransferRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where transferred tables come from.

    Fields: ``policy`` (``name@version``), and the folder name, geometry and config hashes of the
    ``model`` it was made for; ``method`` of the mapping; layer ``target_layers[i]`` has the numbers
    of the source's ``source_layers[i]``, and its KV head h those of head ``source_heads[i][h]``
    there (layer ids count all layers of a model). ``measured_on_target`` is False: nothing was.
    """

    policy: str
    model: str
    geometry_hash: str
    config_hash: str
    target_layers: tuple[int, ...]
    source_layers: tuple[int, ...]
    source_heads: tuple[tuple[int, ...], ...]
    method: str = METHOD
    measured_on_target: bool = False

    def __post_init__(self) -> None:
        if len({len(self.target_layers), len(self.source_layers), len(self.source_heads)}) != 1:
            raise PolicyError("a transfer needs one source layer and its heads for each layer")

    @property
    def text(self) -> str:
        """One clause for people."""
        return f"transferred from {self.policy} ({self.model}) by {self.method}"

    @property
    def identity(self) -> dict[str, object]:
        """What a content version covers: all but the model's folder name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items()
                if name != "model"}  # fmt: skip

    def check_fits(self, geometry: ModelGeometry) -> None:
        """Raise PolicyError unless it maps every global layer and KV head of ``geometry``."""
        wanted = {layer.layer_id: layer.num_kv_heads for layer in _global_layers(geometry)}
        heads = zip(self.target_layers, map(len, self.source_heads), strict=True)
        if dict(heads) != wanted or list(self.target_layers) != sorted(wanted):
            raise PolicyError("the recorded transfer does not map this model's layers and heads")


def nearest(place: int, count: int, places: Sequence[int], of: int) -> int:
    """The element of ``places`` whose relative position is nearest; of two, the lower.

    Element i of n stands at (i + 1/2) / n, compared exactly: ``place`` among ``count``, each of
    ``places`` (ascending) among ``of``.
    """
    return min(places, key=lambda other: abs((2 * place + 1) * of - (2 * other + 1) * count))


def map_layers(source: ModelGeometry, target: ModelGeometry) -> dict[int, int]:
    """Layer id of ``source`` for each global layer id of ``target``, ascending.

    Depth is relative to all layers of a model, of any kind; only global layers are mapped.

    Raises:
        PolicyError: one of them has no global layer.
    """
    ids = [layer.layer_id for layer in _global_layers(source)]
    wanted = [layer.layer_id for layer in _global_layers(target)]
    if not ids:
        raise PolicyError("the model of these tables has no global layer to take them from")
    if not wanted:
        raise PolicyError("no layer of this model is global, so nothing of it would be frozen")
    depth, of = len(target.layers), len(source.layers)
    return {layer: nearest(layer, depth, ids, of) for layer in wanted}


def map_heads(source: int, target: int) -> tuple[int, ...]:
    """Source head of each of ``target`` KV heads, for a layer with ``source`` of them.

    Ascending. With k times as many heads each is repeated k times in a row; with 1/k of them,
    head i takes the lower middle one of the source's i-th k, ``i * k + (k - 1) // 2``.
    """
    return tuple(nearest(head, target, range(source), source) for head in range(target))


def transfer_record(
    policy_id: str, model: str, source: ModelGeometry, target: ModelGeometry
) -> TransferRecord:
    """The mapping from ``source`` to ``target``. Raises PolicyError as ``map_layers``."""
    layers = map_layers(source, target)
    heads = (
        map_heads(source.layers[theirs].num_kv_heads, target.layers[ours].num_kv_heads)
        for ours, theirs in layers.items()
    )
    return TransferRecord(
        policy=policy_id,
        model=model,
        geometry_hash=source.fingerprint(),
        config_hash=source.config_hash,
        target_layers=tuple(layers),
        source_layers=tuple(layers.values()),
        source_heads=tuple(heads),
    )


def transfer_tables(
    tables: RetentionTables,
    source: ModelGeometry,
    target: ModelGeometry,
    record: TransferRecord,
) -> RetentionTables:
    """``tables`` of ``source`` for ``target``, as ``record`` maps them.

    Rule, budgets and bin edges are unchanged. Cells that no freeze reads (native layers, and past
    a layer's KV heads) get weight 1 and the lowest threshold. Of a mix, shares and quotas go with
    the KV heads, query weights by ``map_heads`` from query heads to query heads.
    """
    shape = len(target.attention_layers), target.max_kv_heads
    weights = np.full(shape, _UNREAD_WEIGHT, dtype=np.float32)
    rows, _, *bins = tables.gate.shape
    lowest = tables.gate.min() if tables.gate.size else 0.0
    gate = np.full((rows, shape[0], *bins), lowest, dtype=np.float32)
    mapped = zip(record.target_layers, record.source_layers, record.source_heads, strict=True)
    for ours, theirs, heads in mapped:
        row, other = target.attention_index(ours), source.attention_index(theirs)
        weights[row, : len(heads)] = tables.head_weights[other, list(heads)]
        gate[:, row] = tables.gate[:, other]
    edges = tables.entropy_edges, tables.perplexity_edges
    mix = None if tables.mix is None else _transfer_mix(tables.mix, source, target, record)
    return RetentionTables(tables.rule, weights, tables.budgets, gate, *edges, mix)


def _transfer_mix(
    mix: MixTables, source: ModelGeometry, target: ModelGeometry, record: TransferRecord
) -> MixTables:
    """Unread cells get share 1, equal quotas and query weight 0. If none of the query heads taken
    over retrieves, every one that a freeze reads counts alike, as where nothing was measured."""
    found = MixTables.uniform(target, len(mix.shares))
    shares, quotas = found.shares.copy(), found.quotas.copy()
    weights, read = np.zeros_like(found.query_weights), np.zeros(found.query_weights.shape, bool)
    mapped = zip(record.target_layers, record.source_layers, record.source_heads, strict=True)
    for ours, theirs, heads in mapped:
        row, other = target.attention_index(ours), source.attention_index(theirs)
        shares[:, row, : len(heads)] = mix.shares[:, other, list(heads)]
        quotas[:, row, : len(heads)] = mix.quotas[:, other, list(heads)]
        count = target.layers[ours].num_q_heads
        queries = map_heads(source.layers[theirs].num_q_heads, count)
        weights[row, :count] = mix.query_weights[other, list(queries)]
        read[row, :count] = True
    if not weights.any():
        weights[read] = 1.0
    return MixTables(shares, quotas, weights)


def _global_layers(geometry: ModelGeometry) -> list[LayerGeometry]:
    return [layer for layer in geometry.layers if layer.kind is LayerKind.GLOBAL]

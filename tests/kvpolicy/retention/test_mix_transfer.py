"""A mix for another model: shares and quotas go with kv heads, query weights with query heads."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
from hypothesis import given, settings

from kvpolicy.geometry import LayerGeometry, LayerKind
from kvpolicy.transfer import map_heads, transfer_record, transfer_tables
from tests.kvpolicy.retention.tables import compiled_mix
from tests.kvpolicy.retention.test_transfer import decoder, decoders


@settings(deadline=None)
@given(decoders(), decoders())
def test_of_a_mix_too_every_number_is_that_of_its_source(source, target):
    tables = compiled_mix(source)
    record = transfer_record("p@v", "m", source, target)
    found = transfer_tables(tables, source, target, record)
    found.check_fits(target)
    assert (found.rule, found.budgets) == (tables.rule, tables.budgets)
    layers = dict(zip(record.target_layers, record.source_layers, strict=True))
    for row, layer in enumerate(target.attention_layers):
        shares, quotas = found.mix.shares[:, row], found.mix.quotas[:, row]
        weights = found.mix.query_weights[row]
        if layer.layer_id not in layers:
            assert set(shares.flat) == {1} == set(quotas.flat) and not weights.any()
            continue
        theirs = source.layers[layers[layer.layer_id]]
        other = source.attention_index(theirs.layer_id)
        for head, taken in enumerate(map_heads(theirs.num_kv_heads, layer.num_kv_heads)):
            assert (shares[:, head] == tables.mix.shares[:, other, taken]).all()
            assert (quotas[:, head] == tables.mix.quotas[:, other, taken]).all()
        for query, taken in enumerate(map_heads(theirs.num_q_heads, layer.num_q_heads)):
            assert weights[query] == tables.mix.query_weights[other, taken]


def test_query_heads_alone_may_differ():
    """As many kv heads, half the query heads: each takes the lower of its two."""
    layer = LayerGeometry(0, LayerKind.GLOBAL, 2, 2, 16, 16)
    source = decoder("g", 2)
    target = msgspec.structs.replace(source, layers=(layer,))
    tables = compiled_mix(source)
    record = transfer_record("p@v", "m", source, target)
    found = transfer_tables(tables, source, target, record)
    assert (found.mix.shares == tables.mix.shares).all()
    assert (found.mix.query_weights == tables.mix.query_weights[:, [0, 2]]).all()


def test_without_any_retrieving_head_all_count_alike(geometry):
    """SmolLM2's 9 query heads, of which only those at a quarter retrieve, to Gemma's 4."""
    source, target = geometry("smollm2"), geometry("gemma3")
    weights = np.zeros((30, 9), np.float32)
    weights[:, 0] = 1
    assert 0 not in map_heads(9, 4)
    mix = dataclasses.replace(compiled_mix(source).mix, query_weights=weights)
    tables = dataclasses.replace(compiled_mix(source), mix=mix)
    record = transfer_record("p@v", "m", source, target)
    found = transfer_tables(tables, source, target, record).mix.query_weights
    assert (found[[5, 11, 17]] == 1).all() and found.sum() == 12

"""The torch references against dense masked attention, and against the engine's own reference.

The dense side knows no pages: it takes every token of a request in order and a mask that says, key
by key, what design's rule lets a query read.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashinfer_ext import decode_reference, extend_reference, reference
from flashinfer_ext.contract import HeadWindow
from tests.flashinfer_ext.cases import (
    FULL,
    Case,
    ExtendCase,
    ExtendShape,
    Shape,
    make_case,
    make_extend_case,
    reads,
)

SCALE = 0.11
DECODES = {
    "full": Shape((5, 0, 33, 100), v_head_dim=32),
    "windows": Shape((90, 41, 17, 1), heads=3, windows=(FULL, 16, 40), layers=2, page=8),
    "sinks past the first": Shape((45, 46, 60), windows=(40,), sinks=(4, 16, 17), group=1),
    "frozen": Shape((90, 2, 50, 0, 1), heads=4, windows=(FULL, FULL, 30), frozen=True),
    "frozen pages of 32": Shape((70, 65), heads=3, page=32, frozen=True, layers=2),
    "half": Shape((40, 70), windows=(FULL, 33), dtype=torch.float16),
    "bfloat16": Shape((40, 70), windows=(FULL, 33), dtype=torch.bfloat16, group=4),
}
EXTENDS = {
    "first chunks": ExtendShape(((0, 5), (0, 33), (0, 0)), v_head_dim=32),
    "mid-page": ExtendShape(((37, 20), (5, 3), (64, 16)), windows=(FULL, 16, 40), layers=2),
    "window below the chunk": ExtendShape(((0, 70), (19, 50)), windows=(7, 20), page=8, heads=4),
    "sinks in both": ExtendShape(((10, 60), (3, 30)), windows=(12,), sinks=(16, 17), group=1),
    "bfloat16": ExtendShape(((20, 30),), windows=(FULL, 16), dtype=torch.bfloat16),
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of one kv head: q [T, G, D], k [L, D], v [L, Dv], mask bool [T, L]; out
    [T, G, Dv] and log-sum-exp [T, G]. Keys nobody reads may be NaN: they are cut out."""
    used = mask.any(0)
    q, k, v, mask = q.double(), k[used].double(), v[used].double(), mask[:, used]
    scores = torch.einsum("tgd,ld->gtl", q, k) * SCALE
    if cap:
        scores = cap * (scores / cap).tanh()
    hidden = scores.masked_fill(~mask, float("-inf"))
    if cap:
        out = hidden.softmax(-1) @ v
    else:
        groups = q.shape[1]
        keys, values = k.expand(groups, -1, -1), v.expand(groups, -1, -1)
        out = scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, attn_mask=mask, scale=SCALE
        )
    return out.transpose(0, 1), hidden.logsumexp(-1).transpose(0, 1)


def dense_decode(case: Case, layer: int, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) float64 of a decode case from its dense tokens."""
    group = case.q.shape[1] // case.heads.shape[1]
    out = torch.zeros(*case.q.shape[:2], case.layout.v_head_dim, dtype=torch.double)
    lse = torch.full(case.q.shape[:2], float("-inf"), dtype=torch.double)
    for (at, head, row), tokens in case.dense.items():
        if at != layer:
            continue
        mine = slice(head * group, (head + 1) * group)
        q, mask = case.q[row, mine][None], tokens.read[None]
        out[row, mine], lse[row, mine] = dense_attention(q, tokens.k, tokens.v, mask, cap)
    return out, lse


def dense_extend(case: ExtendCase, layer: int, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) float64 of an extend case from its dense history and fresh tokens."""
    group = case.q.shape[1] // case.k.shape[1]
    out = torch.zeros(*case.q.shape[:2], case.layout.v_head_dim, dtype=torch.double)
    lse = torch.zeros(case.q.shape[:2], dtype=torch.double)
    for (at, head, request), tokens in case.dense.items():
        rows = slice(*case.batch.offsets[request : request + 2].tolist())
        if at != layer or rows.start == rows.stop:
            continue
        k = torch.cat([tokens.k, case.k[rows, head]])
        v = torch.cat([tokens.v, case.v[rows, head]])
        window, sinks = int(case.heads.windows[layer, head]), int(case.heads.sinks[layer, head])
        queries = range(len(tokens.k), len(k))
        mask = torch.stack([reads(t, window, sinks, len(k)) for t in queries])
        mine = slice(head * group, (head + 1) * group)
        out[rows, mine], lse[rows, mine] = dense_attention(case.q[rows, mine], k, v, mask, cap)
    return out, lse


def assert_close(given, expected, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    close = torch.testing.assert_close
    close(given[0].double(), expected[0], atol=tolerance, rtol=tolerance)
    close(given[1].double(), expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DECODES)
def test_decode_is_dense_attention_of_what_the_rule_lets_it_read(name, seed, cap):
    shape = DECODES[name]
    case = make_case(shape, seed)
    for layer in range(shape.layers):
        given = decode_reference.decode(
            case.q, case.arena, case.layout, case.table, case.heads, layer, case.batch, SCALE, cap,
            case.frozen,
        )  # fmt: skip
        assert given[0].dtype == shape.dtype
        assert_close(given, dense_decode(case, layer, cap), shape.dtype)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EXTENDS)
def test_extend_is_dense_attention_of_what_the_rule_lets_it_read(name, seed, cap):
    shape = EXTENDS[name]
    case = make_extend_case(shape, seed)
    for layer in range(shape.layers):
        given = extend_reference.extend(
            case.q, case.k, case.v, case.arena, case.layout, case.heads, layer, case.batch, SCALE,
            cap,
        )  # fmt: skip
        assert given[0].dtype == shape.dtype
        assert_close(given, dense_extend(case, layer, cap), shape.dtype)


def engine_decode(case: Case, layer: int, cap: float) -> torch.Tensor:
    """The engine's per-level reference on a case without padded rows, one head at a time."""
    size, count = case.layout.page_size, case.heads.shape[1]
    q = case.q.unflatten(1, (count, -1))
    out = []
    for head in range(count):
        unit = int(case.heads.units[layer, head])
        rule = HeadWindow(int(case.heads.windows[layer, head]), int(case.heads.sinks[layer, head]))
        pages, positions = [], []
        for request, length in zip(case.batch.requests, case.batch.lengths, strict=True):
            prompt = int(case.frozen.prompts[request]) if case.frozen else 0
            prompt = prompt if rule.window == FULL else 0
            kept = int(case.frozen.counts[request, unit]) if prompt else 0
            logical = case.table.slots[request, : int(length) : size] // size
            held = case.table.pages[unit, logical.long()].tolist()
            own = [t if prompt <= t < length else -1 for t in range(len(held) * size)]
            first = int(case.frozen.starts[request, unit]) if prompt else 0
            compact = case.frozen.pages[first : first - (-kept // size)].tolist() if kept else []
            frozen = [t if t < kept else -1 for t in range(len(compact) * size)]
            pages.append(torch.tensor([*compact, *held]))
            positions.append(torch.tensor([*frozen, *own]))
        pad = torch.nn.utils.rnn.pad_sequence
        out.append(reference.decode(
            q[:, head : head + 1], case.layout.keys(case.arena), case.layout.values(case.arena),
            pad(pages, batch_first=True)[None], pad(positions, True, -1), case.batch.lengths - 1,
            rule, SCALE, cap,
        ))  # fmt: skip
    return torch.cat(out, dim=1).flatten(1, 2)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("name", DECODES)
def test_decode_is_the_engines_reference(name, cap):
    shape = DECODES[name]
    shape = dataclasses.replace(shape, lengths=tuple(n for n in shape.lengths if n))
    case = make_case(shape, 7)
    for layer in range(shape.layers):
        given, _ = decode_reference.decode(
            case.q, case.arena, case.layout, case.table, case.heads, layer, case.batch, SCALE, cap,
            case.frozen,
        )  # fmt: skip
        tolerance = TOLERANCE[shape.dtype]
        torch.testing.assert_close(
            engine_decode(case, layer, cap), given, atol=tolerance, rtol=tolerance
        )


def engine_extend(case: ExtendCase, layer: int, cap: float) -> torch.Tensor:
    """The engine's reference, one request and head at a time."""
    count, size = case.heads.shape[1], case.layout.page_size
    q, batch = case.q.unflatten(1, (count, -1)), case.batch
    out = q.new_zeros(*q.shape[:3], case.layout.v_head_dim)
    for request in range(batch.requests):
        rows = slice(*batch.offsets[request : request + 2].tolist())
        for head in range(count if rows.start < rows.stop else 0):
            unit = int(case.heads.units[layer, head])
            rule = HeadWindow(
                int(case.heads.windows[layer, head]), int(case.heads.sinks[layer, head])
            )
            slots, first = int(batch.counts[unit, request]), int(batch.page_starts[unit, request])
            start = int(batch.position_starts[unit, request])
            pages = batch.pages[first : first + slots // size].long()
            out[rows, head : head + 1] = reference.extend(
                q[rows, head : head + 1],
                case.layout.keys(case.arena)[pages].flatten(0, 1)[None],
                case.layout.values(case.arena)[pages].flatten(0, 1)[None],
                batch.positions[start : start + slots].long(),
                case.k[rows, head : head + 1], case.v[rows, head : head + 1],
                int(batch.begins[request]), rule, SCALE, cap,
            )  # fmt: skip
    return out.flatten(1, 2)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("name", EXTENDS)
def test_extend_is_the_engines_reference(name, cap):
    shape = EXTENDS[name]
    case = make_extend_case(shape, 7)
    for layer in range(shape.layers):
        given, _ = extend_reference.extend(
            case.q, case.k, case.v, case.arena, case.layout, case.heads, layer, case.batch, SCALE,
            cap,
        )  # fmt: skip
        tolerance = TOLERANCE[shape.dtype]
        torch.testing.assert_close(
            engine_extend(case, layer, cap), given, atol=tolerance, rtol=tolerance
        )


def test_a_read_slot_is_what_the_poison_spares():
    """The control of every NaN test: one slot more or less would show."""
    case = make_case(Shape((50,), heads=1, windows=(20,), sinks=(4,)), 0)
    assert int(case.written.sum()) == 24
    one_more = dataclasses.replace(case.heads, windows=case.heads.windows + 1)
    out, _ = decode_reference.decode(
        case.q, case.arena, case.layout, case.table, one_more, 0, case.batch, SCALE
    )
    assert out.isnan().any()

"""The Triton store kernel against plain indexing: the whole arena, not only what changed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from flashinfer_ext.contract import ArenaLayout, LayerHeads
from flashinfer_ext.triton_store import store

SINK = 0


@dataclass(frozen=True)
class Sizes:
    """Of a case. ``unmapped``: logical pages that a unit has no page for."""

    tokens: int = 17
    layers: int = 2
    heads: int = 3
    page: int = 16
    head_dim: int = 64
    v_head_dim: int = 64
    pages: int = 6
    unmapped: int = 0
    fresh: torch.dtype = torch.float32
    kept: torch.dtype = torch.float32
    slots: torch.dtype = torch.int32
    strided: bool = False


@dataclass
class Stored:
    """Arguments of ``store``."""

    k: torch.Tensor
    v: torch.Tensor
    arena: torch.Tensor
    layout: ArenaLayout
    pages: torch.Tensor
    heads: LayerHeads
    slots: torch.Tensor


def make(sizes: Sizes, seed: int, device: str) -> Stored:
    """Random pages and slots; units are dealt to heads at random, the arena starts at random."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    units = sizes.layers * sizes.heads
    layout = ArenaLayout(1 + units * sizes.pages, sizes.page, sizes.head_dim, sizes.v_head_dim)
    arena = torch.randn(layout.num_pages, layout.page_elements, generator=gen).to(sizes.kept)
    order = torch.randperm(units * sizes.pages, generator=gen).view(units, sizes.pages) + 1
    for unit in range(units):
        order[unit, rng.sample(range(sizes.pages), sizes.unmapped)] = SINK
    drawn = rng.sample(range(sizes.pages * sizes.page), sizes.tokens)
    dealt = torch.tensor(rng.sample(range(units), units), dtype=torch.int32)
    dealt = dealt.view(sizes.layers, sizes.heads).to(device)
    other = torch.full_like(dealt, 10**6)  # nobody may look at windows or sinks here

    def fresh(dim: int) -> torch.Tensor:
        room = 5 if sizes.strided else 0
        whole = torch.randn(sizes.tokens + room, sizes.heads + room, dim + room, generator=gen)
        return whole.to(sizes.fresh).to(device)[: sizes.tokens, : sizes.heads, :dim]

    return Stored(
        fresh(sizes.head_dim), fresh(sizes.v_head_dim), arena.to(device), layout,
        order.int().to(device), LayerHeads(dealt, other, other),
        torch.tensor(drawn, dtype=sizes.slots, device=device),
    )  # fmt: skip


def run(case: Stored, layer: int) -> None:
    store(
        case.k, case.v, case.arena, case.layout, case.pages, case.heads, layer, case.slots
    )  # fmt: skip


def expected(case: Stored, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the arena as it should be, bool [NP, P]: slots of the sink that were written)."""
    arena, size = case.arena.clone(), case.layout.page_size
    in_sink = torch.zeros(case.layout.num_pages, size, dtype=torch.bool, device=arena.device)
    for token, slot in enumerate(case.slots.tolist()):
        for head in range(case.k.shape[1]):
            unit = int(case.heads.units[layer, head])
            page, offset = int(case.pages[unit, slot // size]), slot % size
            case.layout.keys(arena)[page, offset] = case.k[token, head].to(arena.dtype)
            case.layout.values(arena)[page, offset] = case.v[token, head].to(arena.dtype)
            in_sink[page, offset] |= page == SINK
    return arena, in_sink


def check(sizes: Sizes, seed: int, device: str) -> Stored:
    """Every layer's store leaves the arena as plain indexing does. Who wins a slot of the sink that
    several write is not settled: those are left out, and all others of the sink are not."""
    case = make(sizes, seed, device)
    for layer in range(sizes.layers):
        want, in_sink = expected(case, layer)
        run(case, layer)
        for part in (case.layout.keys, case.layout.values):
            assert torch.equal(part(case.arena)[~in_sink], part(want)[~in_sink])
    return case


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(device, seed):
    rng = random.Random(seed)
    pages = rng.randint(2, 5)
    sizes = Sizes(
        tokens=rng.choice((1, 2, 15, 16, 17)), layers=rng.randint(1, 3), heads=rng.randint(1, 4),
        page=rng.choice((8, 16, 32)), head_dim=rng.choice((16, 64, 72, 128)),
        v_head_dim=rng.choice((16, 40, 64)), pages=pages + 1, unmapped=rng.randint(0, pages),
        strided=rng.random() < 0.5, slots=rng.choice((torch.int32, torch.int64)),
    )  # fmt: skip
    check(sizes, seed, device)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_numbers_of_tokens(device, tokens):
    """One token, and around the tokens of one program."""
    check(Sizes(tokens), tokens, device)


def test_nothing_is_launched_without_tokens(device):
    case = make(Sizes(tokens=0), 0, device)
    before = case.arena.clone()
    run(case, 0)
    assert torch.equal(case.arena, before)


@pytest.mark.parametrize("page", [8, 16, 32])
def test_page_sizes(device, page):
    check(Sizes(page=page, tokens=20), page, device)


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 16), (72, 40), (256, 256)], ids=str)
def test_head_dims(device, dims):
    """V's dim may differ, and neither need be a power of two."""
    check(Sizes(head_dim=dims[0], v_head_dim=dims[1], layers=1), sum(dims), device)


@pytest.mark.parametrize(
    ("fresh", "kept"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_conversion_to_the_arenas_dtype(device, fresh, kept):
    """Rounded to nearest even, as torch rounds, bit for bit."""
    check(Sizes(fresh=fresh, kept=kept), 3, device)


@pytest.mark.parametrize("strided", [False, True])
def test_strides(device, strided):
    """K and V may be slices of larger tensors, as of one fused projection."""
    check(Sizes(strided=strided, v_head_dim=32), 4, device)


def test_units_without_a_page_write_the_sink(device):
    """And nothing else: a windowed head whose page was dropped may still be stored to."""
    sizes = Sizes(tokens=9, layers=1, heads=2, pages=3, unmapped=3)
    case = make(sizes, 5, device)
    before = case.arena.clone()
    run(case, 0)
    assert torch.equal(case.arena[1:], before[1:])
    offsets = {slot % sizes.page for slot in case.slots.tolist()}
    changed = (case.layout.keys(case.arena)[SINK] != case.layout.keys(before)[SINK]).any(-1)
    assert set(changed.nonzero().flatten().tolist()) == offsets


def test_layers_are_told_apart(device):
    """One layer's store leaves the pages of all other layers' units alone."""
    case = make(Sizes(layers=3), 6, device)
    before = case.arena.clone()
    run(case, 1)
    changed = (case.arena != before).any(-1).nonzero().flatten().tolist()
    own = case.pages[case.heads.units[1].long()].flatten().tolist()
    assert changed
    assert set(changed) <= set(own)

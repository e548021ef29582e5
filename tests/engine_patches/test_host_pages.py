"""The host's copy of the prefix tree and of what is freed, beside brute force and seeded faults."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from engine_patches.counters import Counters
from engine_patches.host_pages import HostPages, HostPagesError
from engine_patches.host_tree import HostTree
from kvpolicy.windows import FULL, Level
from tests.engine_patches.model import Engine
from tests.engine_patches.model_memory import Setup, slots_of

SIZE = 4


class Plain:
    """A prefix tree as a dictionary from whole token prefixes to pages."""

    def __init__(self) -> None:
        self.pages: dict[tuple, int] = {}

    def keys(self, space: str, tokens: list[int]) -> list[tuple]:
        ends = range(SIZE, len(tokens) + 1, SIZE)
        return [(space, *tokens[:end]) for end in ends]

    def insert(self, space: str, tokens: list[int], pages: list[int]) -> list[int]:
        keys = self.keys(space, tokens)
        return [self.pages.setdefault(key, page) for key, page in zip(keys, pages, strict=True)]

    def path(self, space: str, tokens: list[int]) -> list[int]:
        found = [self.pages.get(key) for key in self.keys(space, tokens)]
        return found[: found.index(None)] if None in found else found

    def leaves(self) -> list[tuple]:
        inner = {key[:-SIZE] for key in self.pages}
        return [key for key in self.pages if key not in inner]


PROMPTS = st.lists(st.integers(0, 1), max_size=5 * SIZE)
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "evict"]), st.sampled_from("ab"), PROMPTS, st.integers(0)),
    max_size=30,
)


@given(STEPS)
def test_the_tree_keeps_what_a_dictionary_of_prefixes_keeps(steps):
    tree, plain, free = HostTree(SIZE), Plain(), list(range(1, 400))
    for act, space, tokens, pick in steps:
        if act == "insert":
            own = [free.pop() for _ in range(len(tokens) // SIZE)]
            own[: len(plain.path(space, tokens))] = plain.path(space, tokens)
            kept = tree.insert(space, array("q", tokens), own)
            assert kept == plain.insert(space, tokens, own)
        elif plain.pages:
            leaves = plain.leaves()
            page = plain.pages.pop(leaves[pick % len(leaves)])
            tree.forget([page])
            free.append(page)
        assert tree.path(space, array("q", tokens)) == plain.path(space, tokens)
        assert len(tree) == len(plain.pages)


def test_the_tree_keeps_its_page_where_it_has_the_tokens():
    tree = HostTree(SIZE)
    assert tree.insert("a", array("q", range(9)), [5, 6]) == [5, 6]
    assert tree.insert("a", array("q", [0, 1, 2, 3, 9, 9, 9, 9]), [7, 8]) == [5, 8]
    assert tree.insert("b", array("q", range(4)), [9]) == [9]
    tree.forget([7])  # the second request's copy of the first page
    assert tree.path("a", array("q", range(8))) == [5, 6]
    tree.forget([6])
    assert tree.path("a", array("q", range(8))) == [5]


@pytest.fixture
def host() -> HostPages:
    return HostPages(SIZE, 40, False, Counters(), compare=True)


def test_what_is_foreseen_is_not_read(host):
    host.foresee([[3, 4], [9]])
    host.tell(2)
    host.tell(1)
    assert host.freed([torch.tensor([3, 4, 9])]) == [3, 4, 9]
    assert host._counters.page_reads == 0


@pytest.mark.parametrize("parts", [[[3, 4]], [[3, 4], [9, 8]], []])
def test_what_is_not_wholly_foreseen_is_read(host, parts):
    host.foresee(parts)
    host.tell(2)
    host.tell(1)
    assert host.freed([torch.tensor([3, 4]), torch.tensor([9])]) == [3, 4, 9]
    assert host._counters.page_reads == 1


def test_a_free_of_slots_leaves_the_group_that_waits_alone(host):
    host.foresee([[3, 4]])
    host.tell(2)
    with host.untold():
        assert host.freed([torch.tensor([7])]) == [7]
    assert host.freed([torch.tensor([3, 4])]) == [3, 4]
    assert host._counters.page_reads == 1


def test_a_wrong_page_is_seen_on_a_cpu(host):
    tokens, row = array("q", range(8)), slots_of([5, 7], SIZE)
    with pytest.raises(HostPagesError, match=r"\[5, 6\].*\[5, 7\]"):
        host.inserted("a", tokens, [5, 6], row)
    with pytest.raises(HostPagesError):
        host.pages("a", tokens, lambda: row)
    host.foresee([[1]])
    host.tell(1)
    with pytest.raises(HostPagesError):
        host.freed([torch.tensor([2])])


def test_a_device_that_is_not_compared_is_not_asked():
    def ask() -> torch.Tensor:
        raise AssertionError("the device was asked")

    host = HostPages(SIZE, 40, False, Counters(), compare=False)
    tokens = array("q", range(8))
    assert host.inserted("a", tokens, [5, 6], torch.empty(0)) == [5, 6]
    assert host.pages("a", tokens, ask) == [5, 6]
    with pytest.raises(AssertionError, match="asked"):
        host.pages("b", tokens, ask)


def test_another_number_of_pages_than_was_told_is_seen_on_any_device():
    host = HostPages(SIZE, 40, False, Counters(), compare=False)
    host.foresee([[3, 4]])
    host.tell(2)
    with pytest.raises(HostPagesError, match="expected 2 freed pages, not 3"):
        host.freed([torch.tensor([3, 4, 9])])


def test_an_empty_path_reads_nothing(host):
    assert host.pages("a", array("q"), lambda: torch.empty(0)) == []
    assert host._counters.page_reads == 0


def test_hits_and_finished_requests_need_no_read():
    levels = (Level(0, 8, 4, (0, 2)), Level(1, FULL, 0, (1,)))
    engine = Engine(Setup(levels, SIZE, capacity=600, logical=200, overlap=True))
    for turn in range(4):
        engine.ask(turn, 30, 9, turn, 7)  # each goes on from an earlier one
        while engine.step(16):
            engine.check()
        engine.process_results()
        engine.check()
    assert engine.events["hit"] == 3 and engine.events["done"] == 4 and not engine.events["dedup"]
    assert engine.allocator.counters.page_reads == 0
    engine.tree.evict(EvictParams(num_tokens=SIZE))
    assert engine.allocator.counters.page_reads == 1

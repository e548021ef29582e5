"""What a query reads, as the contract computes it, against the rule told key by key."""

import pytest
import torch

from flashinfer_ext.contract import HeadWindow, read_range
from tests.flashinfer_ext.cases import FULL, reads

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies


@given(st.integers(1, 80), st.integers(1, 90) | st.just(FULL), st.integers(0, 40))
def test_a_read_range_is_the_rule(length, window, sinks):
    span = read_range(length, window, sinks)
    index = range(span.gap_at + span.rest)
    listed = [u + (span.gap if u >= span.gap_at else 0) for u in index]
    assert listed == reads(length - 1, window, sinks, length).nonzero().flatten().tolist()
    assert (span.frozen, span.length) == (0, len(listed))


@given(st.integers(2, 80), st.data())
def test_the_read_range_of_a_frozen_prompt_skips_it(length, data):
    prompt = data.draw(st.integers(1, length - 1))
    kept = data.draw(st.integers(0, prompt))
    span = read_range(length, FULL, data.draw(st.integers(0, 20)), prompt, kept)
    listed = [u + (span.gap if u >= span.gap_at else 0) for u in range(span.gap_at + span.rest)]
    assert listed == list(range(prompt, length))
    assert (span.frozen, span.length) == (kept, kept + length - prompt)


@given(st.integers(0, 60), st.integers(1, 70) | st.just(FULL), st.integers(0, 40))
def test_a_head_windows_visibility_is_the_rule(query, window, sinks):
    keys = torch.arange(80)
    seen = HeadWindow(window, sinks).visible(torch.tensor(query), keys)
    assert torch.equal(seen, reads(query, window, sinks, 80))

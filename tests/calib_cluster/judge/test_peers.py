"""What peers keep against kvpress's own run: its hooks on transformers' forward and cache."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calib_cluster.errors import CalibrationError
from calib_cluster.judge import PEERS, Case, PeerArm, peers
from calib_cluster.judge.options import PEER_NAMES
from calib_cluster.judge.peers import load_kvpress
from tests.calib_cluster.judge.hooked import kvpress_positions
from tests.calib_cluster.tiny_models import VOCAB

LENGTH = 150
FAMILIES = ("llama", "qwen3", "phi3")


def a_case(length: int = LENGTH, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length + 5,), generator=generator).tolist()
    return Case(tuple(ids[:length]), tuple(ids[length:]), 0)


@pytest.mark.parametrize("budget", [30, 100])
@pytest.mark.parametrize("name", [n for n in PEERS if n != "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_positions_are_those_of_kvpress_itself(both, tiny, family, name, budget):
    model, case = both(family).model, a_case()
    found = PeerArm(name, model)(model.judge_case(case), budget)
    sets = [{p for p in row if p >= 0} for row in found.tolist()]
    press = PEERS[name].make(load_kvpress())
    if name == "chunkkv":  # one chunk of 10 and seven of 20: whole ones within the budget
        press.compression_ratio = 1 - (len(sets[0]) // 20 + len(sets[0]) % 20 // 10 + 0.5) / 8
    else:
        press.compression_ratio = 1 - (budget + 0.5) / LENGTH
    plain = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
    assert sets == kvpress_positions(plain, case, press)
    assert len(set(map(frozenset, sets))) > 1 or name in ("streamingllm", "tova", "chunkkv")


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("length", [LENGTH, 141, 160])
def test_every_layer_keeps_the_budget(both, name, length):
    """On average over its heads; chunks fill as much of it as whole ones can."""
    model = both("llama").model
    judged, arm = model.judge_case(a_case(length)), PeerArm(name, model)
    for budget in (20, 64, 90, length - 1):
        counts = (arm(judged, budget) >= 0).sum(1).view(-1, 2)  # two kv heads a layer
        if name != "chunkkv":
            assert (counts.sum(1) == 2 * budget).all()
            continue
        assert (counts[:, 0] == counts[:, 1]).all() and int(counts.max()) <= budget
        last = length % 20 or 20  # the shortest chunk
        assert int(counts.min()) > budget - 20 - (20 - last)


def test_random_follows_from_the_cases_seed_alone(both):
    model = both("llama").model
    arm, case = PeerArm("random", model), a_case()
    first, again = (arm(model.judge_case(case, seed=1), 30) for _ in range(2))
    other = arm(model.judge_case(case, seed=2), 30)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == len(model.units)


def test_nothing_is_left_on_the_model_or_in_transformers(both):
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    model = both("llama").model
    judged = model.judge_case(a_case())
    for name in PEERS:
        PeerArm(name, model)(judged, 30)
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before
    for layer in model.layers:
        assert not hasattr(layer.self_attn, "masked_key_indices")
        assert not hasattr(layer.self_attn, "rotary_emb")


def test_importing_kvpress_does_not_patch_attention(monkeypatch):
    """Its import replaces every attention function; what we get must be undone."""
    for name in [n for n in sys.modules if n == "kvpress" or n.startswith("kvpress.")]:
        monkeypatch.delitem(sys.modules, name)
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    load_kvpress()
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before


def test_without_kvpress_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(CalibrationError, match=r"needs kvpress .*pip install --no-deps kvpress=="):
        load_kvpress()


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "VERSION", "9.9")
    with pytest.raises(CalibrationError, match=r"needs kvpress 9\.9, found 0"):
        load_kvpress()


def test_what_a_press_cannot_do_is_one_line(both):
    llama, gemma = both("llama").model, both("gemma3").model
    with pytest.raises(
        CalibrationError, match="snapkv cannot compress 50 tokens of LlamaAttention"
    ):
        PeerArm("snapkv", llama)(llama.judge_case(a_case(50)), 20)
    with pytest.raises(
        CalibrationError, match="expected_attention cannot compress 150 tokens of Gem"
    ):
        PeerArm("expected_attention", gemma)(gemma.judge_case(a_case()), 20)
    with pytest.raises(CalibrationError, match="chunks of 20 tokens: give budgets of at least 20"):
        PeerArm("chunkkv", llama)(llama.judge_case(a_case()), 19)
    with pytest.raises(CalibrationError, match="no peer 'nothing'; there are snapkv"):
        PeerArm("nothing", llama)


def test_names_on_the_command_line_are_all_there_are():
    assert set(PEER_NAMES) == {*PEERS, "recency"}

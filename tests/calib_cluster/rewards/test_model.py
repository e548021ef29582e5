"""Losses under kept sets against transformers with a per-head mask; what a prefill observes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards import model as reward_model
from calib_cluster.rewards.model import RewardModel
from kvpolicy.geometry import read_geometry
from kvpolicy.retention import RULES
from tests.calib_cluster.rewards.frozen import LENGTH, padded, random_sets, text
from tests.calib_cluster.tiny_models import NATIVE_WINDOW, save_tiny

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "phi3", "qwen3_next", "qwen3_5")


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_model_with_a_dense_mask_per_head(pair, family, rng):
    """Kept sets of every unit differ in size, draws are mixed with copies of each other."""
    both = pair(family)
    prompt, continuation = text(rng)
    units = len(both.model.units)
    draws = [random_sets(rng, units, LENGTH) for _ in range(4)]
    draws += [draws[1], [*draws[0][:-1], draws[2][-1]], draws[0]]
    found = both.model.continuation_losses(both.model.prefill(prompt, continuation), padded(draws))
    for losses, kept in zip(found.numpy(), draws, strict=True):
        expected = both.masked_losses(prompt, continuation, kept)
        np.testing.assert_allclose(losses, expected, atol=3e-5)
    assert float((found[0] - found[1]).abs().max()) > 0.01  # the sets do matter


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_sets_lose_nothing_and_the_first_token_never_does(pair, family, rng):
    model = pair(family).model
    prompt, continuation = text(rng)
    prefill = model.prefill(prompt, continuation)
    everything = torch.arange(LENGTH).expand(1, len(model.units), LENGTH)
    found = model.continuation_losses(prefill, everything)
    torch.testing.assert_close(found[0], prefill.losses, atol=3e-5, rtol=0)
    last = torch.full((1, len(model.units), 1), LENGTH - 1)
    assert float(model.continuation_losses(prefill, last)[0, 0]) == float(prefill.losses[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_full_losses_are_the_models_own(pair, family, rng):
    both = pair(family)
    prompt, continuation = text(rng)
    expected = -both.reference.token_logprobs([*prompt, *continuation])[LENGTH - 1 :]
    found = both.model.prefill(prompt, continuation).losses
    np.testing.assert_allclose(found.numpy(), expected, atol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [LENGTH, 40])
def test_a_prefill_observes_the_models_own_attention(pair, family, length, rng):
    """Mass, value norms and loss of the observed queries; also of a prompt shorter than W."""
    both = pair(family)
    prompt, continuation = text(rng, length)
    prefill = both.model.prefill(prompt, continuation, RULES["paper"].observe)
    seen = both.reference.observe(prompt)
    assert prefill.window == min(64, length)
    np.testing.assert_allclose(prefill.mass.numpy(), seen.mass, atol=1e-4)
    np.testing.assert_allclose(prefill.value_norms.numpy(), seen.norms, rtol=1e-4)
    assert prefill.nll_count == len(seen.nlls)
    assert float(prefill.nll_sum) == pytest.approx(sum(seen.nlls), rel=1e-5)


@pytest.mark.parametrize("length", [NATIVE_WINDOW - 3, NATIVE_WINDOW - 1, NATIVE_WINDOW + 1])
def test_prompts_about_as_long_as_a_native_window(pair, length, rng):
    both = pair("gemma2")
    prompt, continuation = text(rng, length, continuation=NATIVE_WINDOW + 3)
    kept = [[0, length - 1]] * len(both.model.units)
    found = both.model.continuation_losses(both.model.prefill(prompt, continuation), padded([kept]))
    expected = both.masked_losses(prompt, continuation, kept)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=3e-5)


def test_two_tokens_are_a_continuation(pair, rng):
    both = pair("llama")
    prompt, continuation = text(rng, continuation=2)
    kept = random_sets(rng, len(both.model.units), LENGTH)
    found = both.model.continuation_losses(both.model.prefill(prompt, continuation), padded([kept]))
    expected = both.masked_losses(prompt, continuation, kept)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=3e-5)


def test_rows_are_as_many_as_kept_sets_so_far(pair, rng, monkeypatch):
    """Draws run together up to the layer where what they keep parts them, and duplicates never."""
    model = pair("llama").model
    prompt, continuation = text(rng)
    a, b = (random_sets(rng, len(model.units), LENGTH) for _ in range(2))
    third = model.units.slices[2].start
    draws = [a, b, a, [*a[:third], *b[third:]], b]
    rows = []
    plain = reward_model.attend_continuation

    def counting(inputs, visible):
        rows.append(inputs.q.shape[1] / (len(continuation) - 1))
        assert visible.keys.shape[2] == padded(draws).shape[2]  # gathered, not masked
        return plain(inputs, visible)

    monkeypatch.setattr(reward_model, "attend_continuation", counting)
    model.continuation_losses(model.prefill(prompt, continuation), padded(draws))
    assert rows == [2, 2, 3, 3]


@pytest.mark.parametrize(("prompt", "continuation"), [(0, 5), (5, 1), (5, 0)])
def test_too_few_tokens_are_refused(pair, prompt, continuation):
    with pytest.raises(CalibrationError, match=f"found {prompt} and {continuation}"):
        pair("llama").model.prefill([1] * prompt, [1] * continuation)


def test_models_without_a_global_layer_are_refused(tmp_path):
    folder = save_tiny("mistral_native", tmp_path / "native")
    with pytest.raises(CalibrationError, match="nothing to freeze"):
        RewardModel(folder, read_geometry(folder))


def test_a_loss_that_is_no_number_is_refused(tmp_path):
    folder = save_tiny("llama", tmp_path / "model")
    model = RewardModel(folder, read_geometry(folder))
    with torch.no_grad():
        model.model.get_output_embeddings().weight.fill_(float("inf"))
    with pytest.raises(CalibrationError, match="not finite"):
        model.prefill([1, 2, 3], [4, 5])

"""Copy scores against attention weights that transformers itself returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from calib_cluster.rewards.copies import MOST, Copied, CopyScores, query_weights


def by_hand(folder, prompt, continuation, scored) -> tuple[np.ndarray, int]:
    """Sums [layers, Hq] and count, from eager attention and a loop over tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[*prompt, *continuation]])
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True).attentions
    sums, count = np.zeros((len(attentions), attentions[0].shape[1])), 0
    for i in range(scored, len(continuation)):
        places = [j for j, token in enumerate(prompt) if token == continuation[i]]
        if not 1 <= len(places) <= MOST:
            continue
        count += 1
        for layer, weights in enumerate(attentions):
            sums[layer] += weights[0, :, len(prompt) + i - 1, places].sum(-1).numpy()
    return sums, count


@pytest.mark.parametrize("scored", [0, 3])
def test_copy_scores_are_the_models_own_attention(pair, rng, scored, tmp_path):
    model = pair("llama").model
    folder = tmp_path / "llama"
    prompt = rng.integers(0, 40, 50).tolist()
    continuation = [prompt[3], prompt[4], prompt[5], 41, prompt[20], prompt[21], prompt[22]]
    found = model.copies(prompt, continuation, scored)
    model.model.save_pretrained(folder)
    sums, count = by_hand(folder, prompt, continuation, scored)
    assert found.count == count > 0
    units = model.units
    group = found.sums.shape[1]
    for u, (layer, head) in enumerate(zip(units.layers, units.heads, strict=True)):
        wanted = sums[layer, head * group : (head + 1) * group]
        np.testing.assert_allclose(found.sums[u], wanted, atol=1e-5)


def test_tokens_said_too_often_are_no_copies():
    prompt = [1] * (MOST + 1) + [2, 3, 2]
    copied = Copied(prompt, [1, 2, 9, 3], 0)
    assert copied.rows.tolist() == [0, 2]
    assert copied.places.sum(1).tolist() == [2, 1]


def test_weights_are_squares_of_the_best():
    sums = np.array([[2.0, 1.0], [0.5, 0.0]])
    assert query_weights(CopyScores(sums, 4)).tolist() == [[1.0, 0.25], [0.0625, 0.0]]
    both = CopyScores(sums, 4) + CopyScores(sums, 4)
    assert both.count == 8 and query_weights(both).tolist() == [[1.0, 0.25], [0.0625, 0.0]]
    assert (query_weights(CopyScores(sums, 0)) == 1).all()

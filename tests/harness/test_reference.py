"""The masked reference itself: equal to stock transformers, and masking what it says it masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from tests.harness import corpora
from tests.harness.reference import MaskedReference

FULL = 2**31 - 1
LENGTH = 700  # beyond Gemma's native window of 512


def stock_logprobs(model_dir, ids: list[int], attention: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation=attention
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)


FAST_ON_SMOLLM2 = pytest.mark.parametrize(
    "model_dir", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)], indirect=True,
    scope="module",
)  # fmt: skip


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def model_dir(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def prompt(model_dir, tokenizer):
    (ids,) = corpora.prompts(tokenizer(model_dir), [LENGTH])
    return ids


def test_without_windows_it_is_stock_transformers(model_dir, prompt):
    """fp32 rounding alone moves these models' logprobs by 1e-4 over all of the vocabulary."""
    ours = MaskedReference(model_dir)
    all_logprobs = ours.logprobs(prompt)
    stock = stock_logprobs(model_dir, prompt, "sdpa")
    assert all_logprobs.shape == stock.shape
    targets = torch.tensor(prompt[1:])[:, None]
    torch.testing.assert_close(all_logprobs, stock, rtol=0, atol=2e-4)
    torch.testing.assert_close(
        torch.from_numpy(ours.token_logprobs(prompt)), stock.gather(1, targets)[:, 0],
        rtol=0, atol=1e-4,
    )  # fmt: skip


@FAST_ON_SMOLLM2
def test_full_windows_change_nothing_and_small_ones_do(model_dir, prompt):
    plain = MaskedReference(model_dir)
    shape = (len(plain._layers), plain.model.config.num_key_value_heads)
    expected = plain.token_logprobs(prompt)
    full = MaskedReference(model_dir, np.full(shape, FULL), sinks=4).token_logprobs(prompt)
    np.testing.assert_array_equal(full, expected)
    small = MaskedReference(model_dir, np.full(shape, 32), sinks=4).token_logprobs(prompt)
    assert np.abs(small - expected).max() > 0.1


@FAST_ON_SMOLLM2
def test_greedy_decoding_agrees_with_one_teacher_forced_pass(model_dir, prompt):
    plain = MaskedReference(model_dir)
    windows = np.full((len(plain._layers), plain.model.config.num_key_value_heads), 48)
    masked = MaskedReference(model_dir, windows, sinks=4)
    tokens, logprobs = masked.greedy(prompt, 8)
    assert masked.check_greedy(prompt, tokens, logprobs, atol=1e-4) < 1e-4
    with pytest.raises(AssertionError, match="differ from the masked reference"):
        plain.check_greedy(prompt, tokens, logprobs, atol=1e-4)
    wrong = [*tokens[:-1], tokens[-1] + 1]
    rescored = masked.token_logprobs(prompt + wrong)[len(prompt) - 1 :]
    with pytest.raises(AssertionError, match="not the argmax"):
        masked.check_greedy(prompt, wrong, rescored, atol=1e-4)


def tiny(config_class, tmp_path, **kwargs):
    """A random model saved to a folder: hidden 32, 4 query heads, 2 KV heads, vocabulary 64."""
    torch.manual_seed(0)
    config = config_class(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, **kwargs,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


IDS = torch.randint(64, (96,), generator=torch.Generator().manual_seed(1)).tolist()


def changed_queries(reference: MaskedReference, position: int) -> set[int]:
    """Positions whose logits move when the token at ``position`` is replaced."""
    other = list(IDS)
    other[position] = (other[position] + 1) % 64
    moved = (reference.logprobs(IDS) - reference.logprobs(other)).abs().amax(1) > 1e-6
    return set(moved.nonzero()[:, 0].tolist())


def test_one_layer_reads_exactly_sinks_and_window(tmp_path):
    """Head 0 sees 5 tokens, head 1 sees 9: token p moves exactly queries p .. p+8."""
    folder = tiny(LlamaConfig, tmp_path, num_hidden_layers=1)
    reference = MaskedReference(folder, np.array([[5, 9]]), sinks=2)
    everything = set(range(len(IDS) - 1))
    assert changed_queries(reference, 40) == set(range(40, 49))
    assert changed_queries(reference, 2) == set(range(2, 11))
    assert changed_queries(reference, 1) == everything - {0}
    assert changed_queries(MaskedReference(folder, np.array([[5, FULL]]), 0), 40) == {
        t for t in everything if t >= 40
    }


def test_receptive_field_adds_up_over_layers(tmp_path):
    """Layers of 5 and 9 tokens reach 4 + 8 tokens back, and never further."""
    folder = tiny(LlamaConfig, tmp_path, num_hidden_layers=2)
    reference = MaskedReference(folder, np.array([[5, 3], [2, 9]]), sinks=0)
    assert changed_queries(reference, 40) == set(range(40, 53))


def attend_by_loops(query, key, value, windows, sinks: int, native: int | None, softcap: float):
    """[T, Hq, D] one query and head at a time, straight from the definition."""
    heads, length, dim = query.shape
    group = heads // key.shape[0]
    out = torch.zeros(length, heads, dim)
    for t in range(length):
        for head in range(heads):
            kv = head // group
            seen = set(range(sinks)) | set(range(t - windows[kv] + 1, t + 1))
            seen = {j for j in seen if 0 <= j <= t and (native is None or t - j < native)}
            keys = sorted(seen)
            logits = softcap * torch.tanh(key[kv, keys] @ query[head, t] / dim**0.5 / softcap)
            out[t, head] = logits.softmax(0) @ value[kv, keys]
    return out


@pytest.mark.parametrize("native", [None, 6], ids=["global", "native-sliding"])
def test_attention_equals_the_definition_written_as_loops(native):
    """GQA grouping, sinks, softcap and the native mask, with queries that continue a cache."""
    from types import SimpleNamespace

    from tests.harness.reference import KeyRule, _masked_attention

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 40, 8, generator=generator) * 3
    key, value = torch.randn(2, 2, 40, 8, generator=generator)
    rule = KeyRule(torch.tensor([5, 11])[:, None, None], sinks=3)
    module = SimpleNamespace(head_dim=8, key_rule=rule, observer=None)
    distance = torch.arange(40)[:, None] - torch.arange(40)[None, :]
    mask = (distance >= 0) & (distance < (native or 40))
    expected = attend_by_loops(query, key, value, [5, 11], 3, native, softcap=2.0)
    for first in (0, 25):
        got, _ = _masked_attention(
            module, query[None, :, first:], key[None], value[None], mask[None, None, first:],
            softcap=2.0,
        )  # fmt: skip
        torch.testing.assert_close(got[0], expected[first:], rtol=1e-5, atol=1e-5)


def test_softcaps_of_gemma2_are_honoured(tmp_path):
    """Logits large enough that both caps bite: equal to transformers' eager, unlike no caps."""
    caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
    kwargs = {"num_hidden_layers": 2, "sliding_window": 16, "query_pre_attn_scalar": 1}
    folder = tiny(Gemma2Config, tmp_path / "capped", **caps, **kwargs)
    ours = MaskedReference(folder).logprobs(IDS)
    torch.testing.assert_close(ours, stock_logprobs(folder, IDS, "eager"), rtol=0, atol=1e-5)
    none = dict.fromkeys(caps)
    uncapped = tiny(Gemma2Config, tmp_path / "uncapped", **none, **kwargs)
    assert (ours - MaskedReference(uncapped).logprobs(IDS)).abs().max() > 0.1

"""SeqCalib as one would write it down: dense masks, one tau, the whole model for every layer.

Independent of the project's own code on purpose: it shares no rule, geometry, attention or
bookkeeping with it. Slow on purpose: L layers take L forward passes per prompt, each with a
[T, T] matrix per head, and nothing is shared between taus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

FULL = 2**31 - 1
IMPLEMENTATION = "brute_force"


def allowed_keys(length: int, windows: Sequence[int], sinks: int) -> torch.Tensor:
    """bool [kv heads, T, T]: may the query (row) read the key (column)?"""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    in_window = [(key <= query) & (key >= query - window + 1) for window in windows]
    return torch.stack(in_window) | ((key <= query) & (key < sinks))


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    softcap: float | None,
    allowed: torch.Tensor,
) -> torch.Tensor:
    """float64 [Hq, T, Dv] from q [Hq, T, D], k, v [Hkv, T, D|Dv] and ``allowed`` [Hkv, T, T]."""
    outputs = []
    for head in range(len(q)):
        kv_head = head // (len(q) // len(k))
        logits = q[head].double() @ k[kv_head].double().T * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        weights = logits.masked_fill(~allowed[kv_head], -math.inf).softmax(-1)
        outputs.append(weights @ v[kv_head].double())
    return torch.stack(outputs)


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine of the vectors along the last dimension."""
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


@dataclass
class Seen:
    """What an attention layer received: q [Hq, T, D], k [Hkv, T, D], v [Hkv, T, Dv], its scaling
    and softcap, and the keys that the model's own mask lets it read, bool [T, T]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float
    softcap: float | None
    own_mask: torch.Tensor

    def attend(self, windows: Sequence[int], sinks: int) -> torch.Tensor:
        """float64 [Hq, T, Dv] with a window per kv head, within the model's own mask."""
        allowed = allowed_keys(self.q.shape[1], windows, sinks) & self.own_mask
        return dense_attention(self.q, self.k, self.v, self.scaling, self.softcap, allowed)

    def mean_cosines(self, codebook: Sequence[int], sinks: int) -> tuple[torch.Tensor, list[int]]:
        """Sums of cosines [Hkv, W] over binding queries and query heads, and how many they are."""
        heads, length = len(self.k), self.q.shape[1]
        reference = self.attend([FULL] * heads, sinks)
        sums, counts = [], []
        for window in codebook:
            windowed = self.attend([window] * heads, sinks)
            scores = cosines(windowed, reference).unflatten(0, (heads, -1))
            binding = torch.arange(length) >= window + sinks
            sums.append(scores[:, :, binding].sum((1, 2)))
            counts.append(int(binding.sum()) * (len(self.q) // heads))
        return torch.stack(sums, 1), counts


def _brute_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, **_
) -> tuple[torch.Tensor, None]:
    seen = Seen(query[0], key[0], value[0], scaling, softcap, attention_mask[0, 0])
    module.seen = seen
    windows, sinks = module.rule or ([FULL] * key.shape[1], 0)
    out = seen.attend(windows, sinks).to(query.dtype)
    return out.transpose(0, 1)[None], None


def _own_mask(*args, **kwargs) -> torch.Tensor:
    return sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))


AttentionInterface.register(IMPLEMENTATION, _brute_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _own_mask)


class DenseModel:
    """A transformers model that attends with dense per-head masks. float32; attention float64.

    Args:
        model_dir: Hugging Face folder.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.model.set_attn_implementation(IMPLEMENTATION)
        # attention layers by their number among all layers
        self.attention = {
            module.layer_idx: module
            for module in self.model.modules()
            if hasattr(module, "num_key_value_groups")
        }

    @torch.inference_mode()
    def logits(
        self, ids: Sequence[int], rules: dict[int, tuple[Sequence[int], int]] | None = None
    ) -> torch.Tensor:
        """[T, vocab] with ``rules`` layer -> (windows, sinks); other layers are the model's own."""
        for index, module in self.attention.items():
            module.rule = (rules or {}).get(index)
        return self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]

    def loss(
        self, ids: Sequence[int], rules: dict[int, tuple[Sequence[int], int]] | None = None
    ) -> float:
        """Summed -log p (nats) of ``ids[1:]``."""
        logprobs = self.logits(ids, rules)[:-1].double().log_softmax(-1)
        return float(-logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum())


@dataclass
class Answer:
    """Windows and float64 mean cosines [Hkv, W] of every calibrated layer, for one tau."""

    windows: dict[int, list[int]]
    means: dict[int, torch.Tensor]


def brute_force(
    model: DenseModel,
    layers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    codebook: Sequence[int],
    tau: float,
    sinks: int,
) -> Answer:
    """SeqCalib of ``layers`` (global ones, ascending) for one tau."""
    answer = Answer({}, {})
    for layer in layers:
        rules = {lower: (windows, sinks) for lower, windows in answer.windows.items()}
        sums, counts = 0, [0] * len(codebook)
        for ids in prompts:
            model.logits(ids, rules)
            here, there = model.attention[layer].seen.mean_cosines(codebook, sinks)
            sums, counts = sums + here, [a + b for a, b in zip(counts, there, strict=True)]
        means = sums / torch.tensor(counts, dtype=torch.float64)  # 0 / 0 is NaN: no evidence
        answer.means[layer] = means
        answer.windows[layer] = [_smallest(row, codebook, tau) for row in means.tolist()]
    return answer


def _smallest(means: Sequence[float], codebook: Sequence[int], tau: float) -> int:
    for window, mean in zip(codebook, means, strict=True):
        if mean >= tau:
            return window
    return FULL

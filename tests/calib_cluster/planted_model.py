"""A Llama whose one layer has a kv head that carries the answer and one that carries noise.

Tokens are of two kinds that lie in orthogonal halves of the hidden space: ``answers`` and
``fillers``. The answer head has values of answers only, and its first query head looks back exactly
``BACK`` tokens (see ``known_model``); what it finds there is what the model predicts next. Its
second query head looks less far back and its output goes nowhere: during a prompt's last 64 queries
it rests on the very span that the continuation will copy, so that the span is observed before it is
needed. The noise head has values of fillers only and attends to all tokens alike.

A continuation copies the span's first tokens. So it can be predicted only if the answer head still
has them, and nothing that the noise head keeps is of any use.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calib_cluster.rewards.collect import Task
from tests.calib_cluster.known_model import (
    BUSY,
    GROUP,
    HEAD_DIM,
    HIDDEN,
    ROPE_THETA,
    Query,
    fill_query,
    pairs,
)

ANSWER, NOISE = 0, 1  # kv heads
LENGTH, CONTINUATION = 256, 32
OBSERVED = 64  # W of the rules; as long as the copied span
BACK = 100
SPAN = LENGTH - 1 - BACK  # where the copied span begins
KIND = 150  # tokens of each kind
HALF = 31  # dimensions of each kind; the last two only fill a token up to its length
GAIN, SHARPNESS = 4.0, 30.0


def save_planted(folder: Path) -> Path:
    """Write the model; returns ``folder``."""
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2 * GROUP, num_key_value_heads=2, head_dim=HEAD_DIM,
        vocab_size=2 * KIND, max_position_embeddings=2 * LENGTH, attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    content, filled = _tokens()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(filled)
        model.lm_head.weight.copy_(SHARPNESS * content / HIDDEN**0.5)
        layer = model.model.layers[0]
        layer.mlp.down_proj.weight.zero_()
        _fill(layer.self_attn)
    model.save_pretrained(folder)
    return folder


def planted_task(seed: int, corpus: str = "planted") -> Task:
    """Half answers, half fillers, none twice: the span is all answers, the tokens before it that
    are observed too are all fillers."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randperm(KIND, generator=generator)[: LENGTH // 2].tolist()
    fillers = (torch.randperm(KIND, generator=generator)[: LENGTH // 2] + KIND).tolist()
    span, rest = answers[:OBSERVED], answers[OBSERVED:]
    before = fillers[:OBSERVED]
    others = [*rest, *fillers[OBSERVED:]]
    order = torch.randperm(len(others), generator=generator).tolist()
    others = [others[place] for place in order]
    head = SPAN - OBSERVED
    prompt = (*others[:head], *before, *span, *others[head:])
    return Task(prompt, tuple(span[:CONTINUATION]), corpus)


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """[2 * KIND, HIDDEN]: what each token means, of length 1, and its embedding.

    In an embedding the meaning has a length of .6 to 1 times that of the whole, so that heads have
    values of different norms.
    """
    generator = torch.Generator().manual_seed(7)
    content = torch.zeros(2 * KIND, HIDDEN)
    for kind in range(2):
        part = slice(kind * HALF, (kind + 1) * HALF)
        rows = slice(kind * KIND, (kind + 1) * KIND)
        content[rows, part] = torch.randn(KIND, HALF, generator=generator)
    content /= content.norm(dim=1, keepdim=True)
    strength = 0.6 + 0.4 * torch.rand(2 * KIND, 1, generator=generator)
    filled = content * strength
    filled[:, -1:] = (1 - strength**2).sqrt()
    return content, filled * HIDDEN**0.5


def _fill(attention: torch.nn.Module) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attention, name).weight.zero_()
        if getattr(attention, name).bias is not None:
            getattr(attention, name).bias.zero_()
    kinds = [torch.zeros(HIDDEN), torch.zeros(HIDDEN)]
    kinds[0][:HALF] = kinds[1][HALF : 2 * HALF] = 1
    for head, kind in ((ANSWER, kinds[0]), (NOISE, kinds[1])):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        attention.k_proj.bias[rows] = pairs(range(BUSY))
        attention.v_proj.weight[rows] = torch.diag(kind)
        columns = slice(head * GROUP * HEAD_DIM, (head * GROUP + 1) * HEAD_DIM)
        attention.o_proj.weight[:, columns] = GAIN * torch.diag(kind)
    fill_query(attention.q_proj, ANSWER * GROUP, Query(back=BACK))
    fill_query(attention.q_proj, ANSWER * GROUP + 1, Query(back=BACK - OBSERVED))

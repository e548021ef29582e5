"""Llama models made by hand, so that the right window of every kv head is known.

How a head is made to look back exactly d tokens: q and k do not depend on the token (zero weights,
only biases), and q is k turned back by d positions of RoPE. Then the logit of a key at distance
``delta`` is ``SHARPNESS * sum_i cos(theta_i * (delta - d))``: a peak at d that takes all of the
attention. Values are the embeddings themselves, random and so nearly orthogonal: whoever misses
the right token has a cosine near 0 with full history, whoever sees it has 1.

The first token of every prompt (``FIRST``) is of another kind: only it carries the flag channel,
its key carries nothing but a constant in a pair of dimensions that RoPE hardly turns, and no head
that looks back by distance finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 64
HIDDEN = 64
FLAG = HIDDEN - 1  # the channel that only the first token carries; the others are content
VOCAB = 700
FIRST = 0
LENGTH = 512
ROPE_THETA = 1e6
PAIRS = HEAD_DIM // 2
BUSY = 16  # pairs of dimensions that tell distances: theta from 1 to 10^-3 radians a token
STILL = PAIRS - 1  # the pair that RoPE turns by less than 10^-3 radians in 512 tokens
SHARPNESS = 20.0
GROUP = 2  # query heads a kv head


@dataclass(frozen=True)
class Query:
    """What one query head looks for: the sum of its parts, as logits after scaling.

    ``back``: the token this many positions ago (0 is the current one); None finds nothing there.
    ``first``: logit of the first token, in units of the peak of ``back``; ``first_bonus`` is added
    to it (nats). ``flagged``: where the layer's input has the flag, look that far back instead.
    """

    back: int | None = None
    first: float = 0.0
    first_bonus: float = 0.0
    flagged: int | None = None


UNIFORM = Query()
ONLY_FIRST = Query(first=1.0)


@dataclass(frozen=True)
class Layer:
    """One decoder layer; its feed-forward adds nothing.

    ``heads``: the two queries of each kv head. ``first_key``: the first token has a key of its
    own. ``carries_flag``: values have the flag channel. ``passes_flag``: the layer adds the flag
    channel of its first query head's output, times this, to the residual stream; nothing else.
    """

    heads: Sequence[tuple[Query, Query]]
    first_key: bool = True
    carries_flag: bool = True
    passes_flag: float = 0.0


def save_known(folder: Path, layers: Sequence[Layer]) -> Path:
    """Write the model; the same number of kv heads in each layer. Returns ``folder``."""
    kv_heads = len(layers[0].heads)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=len(layers),
        num_attention_heads=kv_heads * GROUP, num_key_value_heads=kv_heads, head_dim=HEAD_DIM,
        vocab_size=VOCAB, max_position_embeddings=2 * LENGTH, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(_embeddings())
        for made, layer in zip(model.model.layers, layers, strict=True):
            made.mlp.down_proj.weight.zero_()
            _fill(made.self_attn, layer)
    model.save_pretrained(folder)
    return folder


def known_prompt(seed: int) -> list[int]:
    """The first token, then others, none of them twice."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(VOCAB - 1, generator=generator)[: LENGTH - 1] + 1
    return [FIRST, *others.tolist()]


def _embeddings() -> torch.Tensor:
    """[VOCAB, HIDDEN], each of root mean square 1, so that RMSNorm leaves them as they are."""
    rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    rows[:, FLAG] = 0
    rows[FIRST] = 0
    rows[FIRST, FLAG] = 1
    return rows * (HIDDEN**0.5 / rows.norm(dim=-1, keepdim=True))


def _fill(attention: torch.nn.Module, layer: Layer) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attention, name).weight.zero_()
        getattr(attention, name).bias.zero_()
    flag = HIDDEN**0.5  # of the first token after RMSNorm
    key = pairs(range(BUSY))
    for head, queries in enumerate(layer.heads):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        attention.k_proj.bias[rows] = key
        if layer.first_key:
            attention.k_proj.weight[rows, FLAG] = (pairs([STILL]) - key) / flag
        attention.v_proj.weight[rows] = torch.eye(HIDDEN)
        if not layer.carries_flag:
            attention.v_proj.weight[rows, FLAG] = 0
        for i, query in enumerate(queries):
            fill_query(attention.q_proj, head * GROUP + i, query)
    attention.o_proj.weight[FLAG, FLAG] = layer.passes_flag


def fill_query(projection: torch.nn.Linear, head: int, query: Query) -> None:
    """Make query head ``head`` look for what ``query`` says."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    unit = HEAD_DIM**0.5  # undoes the scaling of logits
    if query.back is not None:
        projection.bias[rows] += unit * SHARPNESS * pairs(range(BUSY), -query.back)
    first = query.first * BUSY * SHARPNESS + query.first_bonus
    projection.bias[rows] += unit * first * pairs([STILL])
    if query.flagged is not None:
        # the flag is at least 1 where it is set: five times the unflagged part
        projection.weight[rows, FLAG] = 5 * unit * SHARPNESS * pairs(range(BUSY), -query.flagged)


def pairs(which: Sequence[int], position: int = 0) -> torch.Tensor:
    """[HEAD_DIM]: unit vectors in these RoPE pairs (i, i + HEAD_DIM / 2), turned to a position."""
    vector = torch.zeros(HEAD_DIM)
    for pair in which:
        angle = position * ROPE_THETA ** (-pair / PAIRS)
        vector[pair], vector[pair + PAIRS] = math.cos(angle), math.sin(angle)
    return vector

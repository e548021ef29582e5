"""What a policy must answer: Hugging Face transformers with a per-KV-head mask, dense and fp32.

Independent of the project's own code on purpose: it shares no rule, geometry or kernel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "masked_reference"
TIE = 1e-4
"""Nats within which two next tokens count as a tie of the argmax."""
QUERY_BLOCK = 256
VOCAB_ROWS = 256  # positions per lm_head call: 256 x 262k x 4 bytes = 268 MB on Gemma


class Mismatch(AssertionError):
    """An answer is not the reference's; the message names the first bad token."""


@dataclass(frozen=True)
class Comparison:
    """A greedy answer of n tokens beside the reference, teacher-forced. Both fp32 [n], nats.

    ``difference`` is |logprob - reference|; ``regret`` is how much likelier the reference's best
    token is than the answer's (0 where they agree).
    """

    difference: np.ndarray
    regret: np.ndarray

    def equal(self, atol: float = 1e-4) -> np.ndarray:
        """bool [n]: logprob within ``atol`` and the token is the argmax (NaN is never equal)."""
        return (self.difference <= atol) & (self.regret <= TIE)


@dataclass(frozen=True)
class KeyRule:
    """Which keys each KV head of one layer may read, on top of the layer's native mask.

    ``windows`` int64 [kv heads, 1, 1], counting the current token; ``sinks`` first tokens.
    """

    windows: torch.Tensor
    sinks: int

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool [kv heads, queries, keys] for the positions ``queries`` and ``keys``."""
        distance = queries[:, None] - keys[None, :]
        return (distance < self.windows) | (keys < self.sinks)


def _native_mask(*args, **kwargs) -> torch.Tensor:
    """The model's own mask (causal, sliding where the layer slides), always written out."""
    return sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))


def _masked_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, **_
) -> tuple[torch.Tensor, None]:
    """Dense softmax attention in blocks of queries.

    query [1, Hq, T, D]; key, value [1, Hkv, S, D] with S >= T (the queries are the last T
    positions); attention_mask bool [1, 1, T, S]. Returns [1, T, Hq, Dv].
    """
    heads, length, total = key.shape[1], query.shape[2], key.shape[2]
    grouped = query[0].unflatten(0, (heads, -1)) * (scaling or module.head_dim**-0.5)
    positions = torch.arange(total)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, length))
        seen = total - length + rows.stop  # later keys are in nobody's past
        logits = grouped[:, :, rows] @ key[0, :, None, :seen].transpose(-1, -2)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        allowed = attention_mask[0, :, rows, :seen]
        if module.key_rule is not None:
            queries = positions[total - length :][rows]
            allowed = allowed & module.key_rule.allowed(queries, positions[:seen])
        logits.masked_fill_(~allowed[:, None], float("-inf"))
        weights = logits.softmax(-1)
        if module.observer is not None:
            module.observer(positions[total - length :][rows], weights, value[0])
        blocks.append(weights @ value[0, :, None, :seen])
    return torch.cat(blocks, dim=2).flatten(0, 1).transpose(0, 1)[None], None


AttentionInterface.register(IMPLEMENTATION, _masked_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _native_mask)


@lru_cache(maxsize=2)
def _load(model_dir: Path):
    """One copy of the weights per model folder, whatever the number of references to it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.set_attn_implementation(IMPLEMENTATION)
    return model


class MaskedReference:
    """A model whose every (attention layer, KV head) sees only its window and the sinks.

    The query at position t reads keys ``[0, sinks)`` and ``[max(0, t - w + 1), t]``; a native
    sliding layer additionally keeps its native mask, which has no sinks.

    Args:
        model_dir: a Hugging Face folder; loaded as fp32 and shared between references.
        windows: integers [attention layers, kv heads], or None for the unchanged model.
        sinks: first tokens that every window keeps.

    Not thread-safe: references to the same folder share one model.
    """

    def __init__(self, model_dir: Path | str, windows: np.ndarray | None = None, sinks: int = 0):
        self.model = _load(Path(model_dir).resolve())
        self._layers = [m for m in self.model.modules() if hasattr(m, "num_key_value_groups")]
        self._rules: list[KeyRule | None] = [None] * len(self._layers)
        if windows is not None:
            if len(windows) != len(self._layers):
                raise ValueError(f"{len(windows)} rows of windows, {len(self._layers)} layers")
            self._rules = [self._rule(row, sinks) for row in windows]

    def _rule(self, row: np.ndarray, sinks: int) -> KeyRule:
        heads = self.model.config.get_text_config().num_key_value_heads
        if row.shape != (heads,):
            raise ValueError(f"a row of windows has shape {row.shape}, the model {heads} KV heads")
        windows = torch.from_numpy(row.astype(np.int64))[:, None, None]
        return KeyRule(windows, sinks)

    def _observer(self, layer: int) -> Callable | None:
        """Called with each block's query positions, weights and values; for subclasses."""
        return None

    @torch.inference_mode()
    def _hidden(self, ids: Sequence[int], cache: DynamicCache | None = None) -> torch.Tensor:
        """Final hidden states [T, hidden] of ``ids``, which follow what ``cache`` holds."""
        for i, (layer, rule) in enumerate(zip(self._layers, self._rules, strict=True)):
            layer.key_rule, layer.observer = rule, self._observer(i)
        output = self.model.base_model(
            input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=cache is not None
        )
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def _logprob_blocks(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """log_softmax of the logits after each hidden state, as blocks of [rows, vocab]."""
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        for rows in hidden.split(VOCAB_ROWS):
            logits = self.model.get_output_embeddings()(rows)
            yield (logits if cap is None else torch.tanh(logits / cap) * cap).log_softmax(-1)

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 [T-1, vocab]: row t is log p(. | token_ids[: t + 1])."""
        return torch.cat(list(self._logprob_blocks(self._hidden(token_ids[:-1]))))

    def token_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """fp32 [T-1]: log p(token_ids[t + 1] | token_ids[: t + 1])."""
        return self._score(token_ids, 1)[0]

    def _score(self, token_ids: Sequence[int], first: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the tokens from index ``first`` on, and of the best ones there."""
        hidden = self._hidden(token_ids[:-1])[first - 1 :]
        targets = torch.tensor(list(token_ids[first:])).split(VOCAB_ROWS)
        chosen, best = [], []
        for block, target in zip(self._logprob_blocks(hidden), targets, strict=True):
            chosen.append(block.gather(1, target[:, None])[:, 0])
            best.append(block.amax(1))
        return torch.cat(chosen).numpy(), torch.cat(best).numpy()

    def greedy(self, prompt_ids: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
        """``count`` greedy tokens after the prompt (no stop token), and their logprobs [count].

        Decodes through a full-length cache: native layers keep every key and mask it.
        """
        cache, ids, tokens, logprobs = DynamicCache(), list(prompt_ids), [], []
        for _ in range(count):
            (row,) = self._logprob_blocks(self._hidden(ids, cache)[-1:])
            best = row[0].max(0)
            ids = [int(best.indices)]
            tokens += ids
            logprobs.append(float(best.values))
        return tokens, np.array(logprobs, dtype=np.float32)

    def compare_greedy(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        output_logprobs: Sequence[float],
    ) -> Comparison:
        """Compare a greedy answer with one teacher-forced forward of prompt + output.

        Raises Mismatch if there is no token, or not one logprob a token.
        """
        if not output_ids or len(output_ids) != len(output_logprobs):
            raise Mismatch(f"{len(output_ids)} tokens, {len(output_logprobs)} logprobs")
        chosen, best = self._score([*prompt_ids, *output_ids], len(prompt_ids))
        given = np.asarray(output_logprobs, dtype=np.float32)
        return Comparison(np.abs(chosen - given), best - chosen)

    def check_greedy(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        output_logprobs: Sequence[float],
        atol: float = 1e-4,
    ) -> float:
        """``compare_greedy``, returning the largest difference (nats).

        Raises Mismatch, naming the first bad token, if a logprob is off by more than ``atol`` or
        a token is not the reference's argmax (ties within ``TIE``).
        """
        compared = self.compare_greedy(prompt_ids, output_ids, output_logprobs)
        _require(compared.difference <= atol, "logprob off by", compared.difference)
        _require(compared.regret <= TIE, "not the argmax, which is likelier by", compared.regret)
        return float(compared.difference.max())


def _require(good: np.ndarray, what: str, amount: np.ndarray) -> None:
    if not good.all():  # NaN is never good
        bad = np.flatnonzero(~good)
        raise Mismatch(
            f"{len(bad)} of {len(good)} output tokens differ from the masked reference; "
            f"first at index {bad[0]}: {what} {amount[bad[0]]:.2e} nats (worst {amount.max():.2e})"
        )

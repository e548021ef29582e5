"""Recurrent layers when rewards are measured: the prompt's state, from which every row goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig


@dataclass(frozen=True, eq=False)
class State:
    """One layer's state after a prompt: ``conv`` [1, channels, K], ``recurrent`` [1, heads, ...].

    No policy touches it: a freeze drops keys and values only.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor


class RecurrentLayer:
    """A decoder layer of transformers that keeps a state instead of keys and values.

    Args:
        module: the decoder layer; takes hidden states and ``past_key_values``.
        index: its place among all layers.
        config: of the text model, which says what each layer caches.
    """

    def __init__(self, module: torch.nn.Module, index: int, config: PreTrainedConfig) -> None:
        self._module, self._index, self._config = module, index, config

    def prefill(
        self, hidden: torch.Tensor, length: int, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, State]:
        """Run ``length`` prompt tokens, then the rest of ``hidden`` [1, T, hidden].

        Returns:
            output [1, T, hidden], and the state after the prompt.
        """
        cache = DynamicCache(config=self._config)
        prompt = self._run(hidden[:, :length], arguments, cache)
        kept = cache.layers[self._index]
        state = State(kept.conv_states[0].clone(), kept.recurrent_states[0].clone())
        rest = self._run(hidden[:, length:], arguments, cache)
        return torch.cat([prompt, rest], dim=1), state

    def resume(
        self, hidden: torch.Tensor, state: State, arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """Output [n, C, hidden] of n continuations [n, C, hidden] that all follow one prompt."""
        rows, cache = len(hidden), DynamicCache(config=self._config)
        conv, recurrent = (
            x.expand(rows, *x.shape[1:]).clone() for x in (state.conv, state.recurrent)
        )
        cache.update_conv_state(conv, self._index, conv_kernel_size=conv.shape[-1])
        cache.update_recurrent_state(recurrent, self._index)
        return self._run(hidden, arguments, cache)

    def _run(self, hidden, arguments: Mapping[str, Any], cache: DynamicCache) -> torch.Tensor:
        output = self._module(hidden, **{**arguments, "past_key_values": cache})
        return output[0] if isinstance(output, tuple) else output

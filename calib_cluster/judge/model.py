"""A model that is prefilled once per case and then continues under what any arm keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from calib_cluster.attention import HeadInputs
from calib_cluster.capture import VOCAB_ROWS
from calib_cluster.judge.items import Case
from calib_cluster.rewards.model import Prefill, RewardModel
from kvpolicy.retention import RetentionRule


@dataclass(frozen=True, eq=False)
class LayerSeen:
    """What one attention layer got and made of a prompt of T tokens.

    ``hidden`` [1, T, hidden], the input of ``module``, the attention; ``queries`` [1, Hq, T, D]
    and ``keys`` [1, H, T, D] after RoPE, ``values`` [1, H, T, Dv]; ``rotary`` (cos, sin) [1, T, D]
    of the prompt's positions, or None where the layer is given none. ``scores`` remembers what
    peers' scorers gave for this layer.
    """

    module: torch.nn.Module
    hidden: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    scores: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def places(self) -> list[dict[bytes, int]]:
        """Position of every key by its bytes, a dictionary for each kv head."""
        return [
            {row.tobytes(): at for at, row in enumerate(head)}
            for head in self.keys[0].cpu().numpy()
        ]


@dataclass(frozen=True)
class View:
    """How our own rules look at a prompt's end: ``observe`` last queries (``RetentionRule``), and
    of a rule that mixes its ``focus`` (0: none does)."""

    observe: int = 64
    focus: int = 0

    @classmethod
    def wanted(cls, rule: RetentionRule, given: View) -> View:
        """What ``rule`` needs; a focus it does not need is as ``given``."""
        return cls(rule.observe, rule.focus if rule.mixes else given.focus)

    def of(self, length: int) -> tuple[int, int]:
        """Queries of a prompt of ``length`` that are looked at."""
        return min(self.observe, length), min(self.focus, length)


@dataclass(frozen=True, eq=False)
class Judged:
    """One case after its prefill: all that arms may look at.

    ``prefill`` is what a freeze of our own sees; ``layers`` what each freezing layer saw, in
    order; ``full`` [C, hidden], the last layer's output that predicts each continuation token
    with the full cache; ``seed``, for arms that draw at random; ``view``, how the prompt's end was
    looked at.
    """

    case: Case
    prefill: Prefill
    layers: tuple[LayerSeen, ...]
    full: torch.Tensor
    seed: int
    view: View

    @property
    def length(self) -> int:
        """T, tokens of the prompt."""
        return self.prefill.length


DEFAULT_VIEW = View()


@dataclass
class _Recording:
    """What ``JudgedModel`` notes down while a prompt of ``length`` tokens is prefilled."""

    length: int
    seen: dict[int, LayerSeen] = field(default_factory=dict)
    output: torch.Tensor | None = None


class JudgedModel(RewardModel):
    """A ``RewardModel`` that also shows what peers' own code wants to see. Not thread-safe."""

    _recording: _Recording | None = None

    @torch.inference_mode()
    def judge_case(self, case: Case, seed: int = 0, view: View = DEFAULT_VIEW) -> Judged:
        """Prefill ``case`` once with the full cache. Raises CalibrationError as ``prefill``."""
        length = len(case.prompt)
        self._recording = recording = _Recording(length)
        try:
            prefill = self.prefill(case.prompt, case.continuation, view.observe, view.focus)
        finally:
            self._recording = None
        layers = tuple(recording.seen[layer] for layer in self.units.layer_ids)
        return Judged(case, prefill, layers, recording.output[0, length - 1 :], seed, view)

    def _watched(self, layer: int, hidden: torch.Tensor, seen: list[HeadInputs]) -> torch.Tensor:
        """As ``RewardModel``'s, noting down what the layer's attention got."""
        recording, calls = self._recording, []
        if recording is None:
            return super()._watched(layer, hidden, seen)
        attention = getattr(self.layers[layer], "self_attn", self.layers[layer])
        hook = attention.register_forward_pre_hook(
            lambda _module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        try:
            recording.output = super()._watched(layer, hidden, seen)
        finally:
            hook.remove()
        if layer in self.units.slices:
            part = _layer_seen(attention, *calls[0], seen[0], recording.length)
            recording.seen[layer] = part
        return recording.output

    @torch.inference_mode()
    def log_probs(self, judged: Judged, hidden: torch.Tensor, scored: slice) -> torch.Tensor:
        """float32 [n, vocab], log-probabilities for continuation tokens ``scored``.

        ``hidden`` [n, hidden] is the last layer's output before each of them.
        """
        ids = judged.case.continuation[scored]
        blocks = [
            self._logits(ids[i : i + VOCAB_ROWS], hidden[None, i : i + VOCAB_ROWS])
            for i in range(0, len(ids), VOCAB_ROWS)
        ]
        return torch.cat(blocks).log_softmax(-1)


def _layer_seen(
    module: torch.nn.Module, args: tuple, kwargs: dict, inputs: HeadInputs, length: int
) -> LayerSeen:
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    rotary = kwargs.get("position_embeddings")
    if rotary is not None:
        rotary = tuple(part[:, :length] for part in rotary)
    queries, keys, values = (x[None, :, :length] for x in (inputs.q, inputs.k, inputs.v))
    return LayerSeen(module, hidden[:, :length], queries, keys, values, rotary)

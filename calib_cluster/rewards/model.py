"""A model that is prefilled once and then scores a continuation under many kept sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from calib_cluster.attention import HeadInputs
from calib_cluster.capture import VOCAB_ROWS, LayerArguments, SteppedModel, _attention_task
from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.attention import History, attend_continuation
from calib_cluster.rewards.sharing import branches, set_keys
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import semantic_risk, structural_risk, window_mass

MIN_CONTINUATION = 2  # the first token is predicted by the prompt alone, whatever is kept


@dataclass(frozen=True, eq=False)
class Prefill:
    """A prompt of T tokens whose cache is whole, and its continuation of C tokens.

    Fields: ``length`` T; ``continuation`` C token ids; ``window`` W observed queries; ``mass`` and
    ``value_norms`` float32 [U, T] as ``kvpolicy.retention`` takes them; ``nll_sum`` (float32 0-d)
    and ``nll_count`` of the observed tokens; ``losses`` float32 [C], nats of each continuation
    token with the full cache; ``history`` by layer id.
    """

    length: int
    continuation: tuple[int, ...]
    window: int
    mass: torch.Tensor
    value_norms: torch.Tensor
    nll_sum: torch.Tensor
    nll_count: int
    losses: torch.Tensor
    history: dict[int, History]

    @property
    def entropy(self) -> float:
        """R_struct of eq. 7 over ln T."""
        return float(structural_risk(self.mass, self.window))

    @property
    def perplexity(self) -> float:
        """R_sem of eq. 7."""
        return float(semantic_risk(self.nll_sum, self.nll_count))


class RewardModel(SteppedModel):
    """A model in float32 whose continuation may be given any kept sets. Not thread-safe.

    Attributes: ``units``, the units that freeze.

    Raises:
        CalibrationError: as SteppedModel, or recurrent layers, or nothing that could freeze.
    """

    def __init__(self, model_dir: str | Path, geometry: ModelGeometry, device: str = "cpu") -> None:
        self.units = FreezingUnits.of(geometry)
        super().__init__(model_dir, geometry, torch.float32, device)

    @torch.inference_mode()
    def prefill(
        self, prompt: Sequence[int], continuation: Sequence[int], observe: int = 64
    ) -> Prefill:
        """Run prompt and continuation once with the full cache, keeping what a freeze needs.

        Args:
            prompt, continuation: T >= 1 and C >= 2 token ids.
            observe: observation window of the rule, W = min(observe, T).

        Raises:
            CalibrationError: too few tokens, or a loss that is not finite.
        """
        length, window = len(prompt), min(observe, len(prompt))
        if not length or len(continuation) < MIN_CONTINUATION:
            raise CalibrationError(
                f"a reward needs a prompt and {MIN_CONTINUATION} more tokens, found {length} and "
                f"{len(continuation)}"
            )
        ids = [*prompt, *continuation]
        hidden, history, masses, norms = self.embed(ids[:-1]), {}, [], []
        for layer in self.geometry.layers:
            seen: list[HeadInputs] = []
            hidden = self._watched(layer.layer_id, hidden, seen)
            kept = History.of(seen[0], length, layer.native_window)
            history[layer.layer_id] = kept
            if layer.layer_id in self.units.slices:
                masses.append(_mass(seen[0], length, window))
                norms.append(torch.linalg.vector_norm(kept.values, dim=-1, dtype=torch.float32))
        first = max(1, length - window)
        losses = self._losses(hidden[:, first - 1 :], ids[first:])
        if not torch.isfinite(losses).all():
            raise CalibrationError("a prompt's loss is not finite in float32")
        observed = losses[: length - first]
        return Prefill(
            length, tuple(continuation), window, torch.cat(masses), torch.cat(norms),
            observed.sum(), len(observed), losses[length - first :], history,
        )  # fmt: skip

    def _watched(self, layer: int, hidden: torch.Tensor, seen: list[HeadInputs]) -> torch.Tensor:
        rule = self._rule(self.geometry.layers[layer], None, 0)

        def task(module, inputs: HeadInputs) -> torch.Tensor:
            seen.append(inputs)
            return rule(module, inputs)

        with _attention_task(task):
            output = self._call(layer, hidden)
        return self._checked(layer, seen, output)

    @staticmethod
    def _checked(layer: int, called: list, output: torch.Tensor) -> torch.Tensor:
        if not called:  # kept sets would be ignored silently
            raise CalibrationError(
                f"attention of layer {layer} does not go through transformers' attention interface"
            )
        return output

    @torch.inference_mode()
    def continuation_losses(self, prefill: Prefill, positions: torch.Tensor) -> torch.Tensor:
        """Losses of the continuation when it reads only kept prompt tokens, and itself.

        The prompt's own queries have read everything, as in an engine that freezes at the end of
        prefill; so the continuation's first token costs the same whatever is kept.

        Args:
            positions: int64 [N, U, width], kept positions of every unit for each of N draws, -1
                where there is none, in any order.

        Returns:
            float32 [N, C] in nats. Time and memory grow with the distinct kept sets and with
            ``width``, not with T.
        """
        keys = set_keys(positions.cpu().numpy(), self.units.slices.values())
        steps, last = branches(keys)
        ahead = dict(zip(self.units.layer_ids, steps, strict=True))
        count, rows = len(prefill.continuation) - 1, 1
        arguments: dict[int, LayerArguments] = {}
        hidden, arguments[1] = self._embed_rows(prefill, 1)
        for layer in range(len(self.layers)):
            visible = prefill.history[layer].whole(count)
            if layer in ahead:
                branch, rows = ahead[layer], len(ahead[layer].draws)
                hidden = hidden.unflatten(1, (-1, count))[:, branch.parents].flatten(1, 2)
                chosen = positions[branch.draws][:, self.units.slices[layer]]
                visible = prefill.history[layer].frozen(chosen, count)
            if rows not in arguments:
                arguments[rows] = self._embed_rows(prefill, rows)[1]
            hidden = self._continue(layer, hidden, arguments[rows], visible)
        losses = self._losses(hidden, list(prefill.continuation[1:]) * rows).unflatten(
            0, (-1, count)
        )
        first = prefill.losses[:1].expand(len(positions), 1)
        return torch.cat([first, losses[torch.from_numpy(last).to(losses.device)]], dim=1)

    def _embed_rows(self, prefill: Prefill, rows: int) -> tuple[torch.Tensor, LayerArguments]:
        """Embedding [1, rows * (C - 1), hidden] of the continuation, repeated, and what layers get.

        Rows lie one after another along the tokens, each at the positions that follow the prompt.
        """
        ids = list(prefill.continuation[:-1])
        positions = torch.arange(prefill.length, prefill.length + len(ids)).repeat(rows)[None]
        recorded: list[dict] = []
        first: list[torch.Tensor] = []

        def record(hidden: torch.Tensor, **arguments) -> torch.Tensor:
            first.append(hidden)
            recorded.append(arguments)
            return hidden

        with self._layers_replaced([record] * len(self.layers)):
            tokens = self._tensor(ids * rows)
            self.model.base_model(
                input_ids=tokens, position_ids=positions.to(tokens.device), use_cache=False
            )
        return first[0], LayerArguments(tuple(recorded))

    def _continue(self, layer, hidden, arguments: LayerArguments, visible) -> torch.Tensor:
        called: list[torch.nn.Module] = []

        def task(module, inputs: HeadInputs) -> torch.Tensor:
            called.append(module)
            return attend_continuation(inputs, visible)

        with _attention_task(task):
            output = self.layers[layer](hidden, **arguments.of_layer[layer])
        output = output[0] if isinstance(output, tuple) else output
        return self._checked(layer, called, output)

    def _losses(self, hidden: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
        """float32 [n], nats of ``targets`` [n], from the last layer's output [1, n, hidden]."""
        blocks = []
        for start in range(0, len(targets), VOCAB_ROWS):
            rows = slice(start, start + VOCAB_ROWS)
            # the ids matter to nothing but their number: the hidden states replace them
            logits = self._logits(targets[rows], hidden[:, rows])
            wanted = torch.tensor(targets[rows], device=logits.device)
            blocks.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        return torch.cat(blocks)


def _mass(inputs: HeadInputs, length: int, window: int) -> torch.Tensor:
    """float32 [H, T]: window mass of a layer's prompt."""
    heads = inputs.k.shape[0]
    q = inputs.q[:, length - window : length].unflatten(0, (heads, -1)).permute(2, 0, 1, 3)
    at = torch.arange(length, device=q.device)
    cap = inputs.softcap or 0.0
    return window_mass(q, inputs.k[:, :length], at[length - window :], at, inputs.scaling, cap)

"""A model that is prefilled once and then scores a continuation under many kept sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from calib_cluster.attention import HeadInputs
from calib_cluster.capture import VOCAB_ROWS, LayerArguments, SteppedModel, _attention_task
from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.attention import History, Visible, attend_continuation
from calib_cluster.rewards.copies import Copied, CopyScores
from calib_cluster.rewards.recurrent import RecurrentLayer, State
from calib_cluster.rewards.sharing import branches, set_keys
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import Focus, focus_mass, semantic_risk, structural_risk, window_mass

MIN_CONTINUATION = 2  # the first token is predicted by the prompt alone, whatever is kept


@dataclass(frozen=True, eq=False)
class Prefill:
    """A prompt of T tokens whose cache is whole, and its continuation of C tokens.

    Fields: ``length`` T; ``continuation`` C token ids; ``window`` W observed queries; ``mass`` and
    ``value_norms`` float32 [U, T] as ``kvpolicy.retention`` takes them; ``nll_sum`` (float32 0-d)
    and ``nll_count`` of the observed tokens; ``losses`` float32 [C], nats of each continuation
    token with the full cache; ``history`` by layer id; ``outputs`` [C - 1, hidden], the last
    layer's output that predicts each continuation token but the first; ``squares`` float32
    [U, G, T], ``focus_mass`` of the last queries (None unless asked for).
    """

    length: int
    continuation: tuple[int, ...]
    window: int
    mass: torch.Tensor
    value_norms: torch.Tensor
    nll_sum: torch.Tensor
    nll_count: int
    losses: torch.Tensor
    history: dict[int, History | State]
    outputs: torch.Tensor
    squares: torch.Tensor | None = None

    def focus(self, query_weights: torch.Tensor) -> Focus:
        """What a rule that mixes looks at, given a weight [U, G] of every query head."""
        weights = query_weights.to(self.squares)[..., None]
        return Focus(self.squares.mean(dim=1), (self.squares * weights).sum(dim=(0, 1)))

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
        CalibrationError: as SteppedModel, or nothing that could freeze.
    """

    def __init__(self, model_dir: str | Path, geometry: ModelGeometry, device: str = "cpu") -> None:
        self.units = FreezingUnits.of(geometry)
        super().__init__(model_dir, geometry, torch.float32, device)

    @torch.inference_mode()
    def prefill(
        self,
        prompt: Sequence[int],
        continuation: Sequence[int],
        observe: int = 64,
        focus: int = 0,
    ) -> Prefill:
        """Run prompt and continuation once with the full cache, keeping what a freeze needs.

        Args:
            prompt, continuation: T >= 1 and C >= 2 token ids.
            observe: observation window of the rule, W = min(observe, T).
            focus: of a rule that mixes, its last queries; 0 for other rules.

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
        hidden, history, masses, norms, squares = self.embed(ids[:-1]), {}, [], [], []
        for layer in self.geometry.layers:
            if not layer.is_attention:
                hidden, history[layer.layer_id] = self._recurrent(layer.layer_id).prefill(
                    hidden, length, self._arguments[len(ids) - 1].of_layer[layer.layer_id]
                )
                continue
            seen: list[HeadInputs] = []
            hidden = self._watched(layer.layer_id, hidden, seen)
            kept = History.of(seen[0], length, layer.native_window)
            history[layer.layer_id] = kept
            if layer.layer_id in self.units.slices:
                masses.append(_observed(window_mass, seen[0], length, window))
                norms.append(torch.linalg.vector_norm(kept.values, dim=-1, dtype=torch.float32))
                if focus:
                    squares.append(_observed(focus_mass, seen[0], length, min(focus, window)))
        first = max(1, length - window)
        losses = self._losses(hidden[:, first - 1 :], ids[first:])
        if not torch.isfinite(losses).all():
            raise CalibrationError("a prompt's loss is not finite in float32")
        observed = losses[: length - first]
        return Prefill(
            length, tuple(continuation), window, torch.cat(masses), torch.cat(norms),
            observed.sum(), len(observed), losses[length - first :], history,
            hidden[0, length:].clone(), torch.cat(squares) if focus else None,
        )  # fmt: skip

    @torch.inference_mode()
    def copies(
        self, prompt: Sequence[int], continuation: Sequence[int], scored: int = 0
    ) -> CopyScores:
        """Copy scores of every query head of the freezing units, on one prompt run in full.

        ``scored``: the first continuation token that counts.
        """
        copied = Copied(prompt, continuation, scored)
        hidden, found = self.embed([*prompt, *continuation][:-1]), []
        for layer in self.geometry.layers:
            if not layer.is_attention:
                hidden = self._call(layer.layer_id, hidden)
                continue
            seen: list[HeadInputs] = []
            hidden = self._watched(layer.layer_id, hidden, seen)
            if layer.layer_id in self.units.slices:
                found.append(copied.scores(seen[0]).cpu().numpy())
        return CopyScores(np.concatenate(found), len(copied.rows))

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
        return self.continuation_scores(prefill, positions)[0]

    @torch.inference_mode()
    def continuation_scores(
        self, prefill: Prefill, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses as ``continuation_losses``, and how far the predictions move.

        Returns:
            (losses, KL(full || kept) in nats): float32 [N, C] both; the first token's divergence
            is 0.
        """
        hidden, last = self.continuation_hidden(prefill, positions)
        rows, count = hidden.shape[:2]
        targets = torch.tensor(prefill.continuation[1:], device=hidden.device)
        losses, moved = hidden.new_empty(rows, count), hidden.new_empty(rows, count)
        for start in range(0, count, VOCAB_ROWS):
            part = slice(start, start + VOCAB_ROWS)
            ids, wanted = prefill.continuation[:-1][part], targets[part, None]
            full = self._logits(ids, prefill.outputs[None, part]).log_softmax(-1)
            for row in range(rows):
                found = self._logits(ids, hidden[row, part][None]).log_softmax(-1)
                losses[row, part] = -found.gather(1, wanted)[:, 0]
                moved[row, part] = (full.exp() * (full - found)).sum(-1)
        first = prefill.losses[:1].expand(len(positions), 1)
        still = torch.zeros_like(first)
        return torch.cat([first, losses[last]], dim=1), torch.cat([still, moved[last]], dim=1)

    @torch.inference_mode()
    def continuation_hidden(
        self, prefill: Prefill, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last layer's output for the continuation's tokens but the last one.

        Args:
            positions: as ``continuation_losses`` takes them.

        Returns:
            ([n, C - 1, hidden], int64 [N]): a row of each distinct kept set, and each draw's row.
        """
        keys = set_keys(positions.cpu().numpy(), self.units.slices.values())
        steps, last = branches(keys)
        ahead = dict(zip(self.units.layer_ids, steps, strict=True))
        count, rows = len(prefill.continuation) - 1, 1
        arguments: dict[int, LayerArguments] = {}
        hidden, arguments[1] = self._embed_rows(prefill, 1)
        for layer in range(len(self.layers)):
            if layer in ahead:
                branch, rows = ahead[layer], len(ahead[layer].draws)
                hidden = hidden.unflatten(1, (-1, count))[:, branch.parents].flatten(1, 2)
            if rows not in arguments:
                arguments[rows] = self._embed_rows(prefill, rows)[1]
            given, before = arguments[rows].of_layer[layer], prefill.history[layer]
            if isinstance(before, State):
                each = hidden[0].unflatten(0, (rows, count))
                each = self._recurrent(layer).resume(each, before, given)
                hidden = each.flatten(0, 1)[None]
                continue
            visible = before.whole(count)
            if layer in ahead:
                chosen = positions[branch.draws][:, self.units.slices[layer]]
                visible = before.frozen(chosen, count)
            hidden = self._continue(layer, hidden, given, visible)
        return hidden[0].unflatten(0, (-1, count)), torch.from_numpy(last).to(hidden.device)

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

    def _recurrent(self, layer: int) -> RecurrentLayer:
        return RecurrentLayer(self.layers[layer], layer, self.model.config.get_text_config())

    def _continue(self, layer: int, hidden, arguments: dict, visible: Visible) -> torch.Tensor:
        called: list[torch.nn.Module] = []

        def task(module, inputs: HeadInputs) -> torch.Tensor:
            called.append(module)
            return attend_continuation(inputs, visible)

        with _attention_task(task):
            output = self.layers[layer](hidden, **arguments)
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


def _observed(mass: Callable, inputs: HeadInputs, length: int, window: int) -> torch.Tensor:
    """``mass`` (``window_mass`` or ``focus_mass``) of a prompt's last ``window`` queries."""
    heads = inputs.k.shape[0]
    q = inputs.q[:, length - window : length].unflatten(0, (heads, -1)).permute(2, 0, 1, 3)
    at = torch.arange(length, device=q.device)
    cap = inputs.softcap or 0.0
    return mass(q, inputs.k[:, :length], at[length - window :], at, inputs.scaling, cap)

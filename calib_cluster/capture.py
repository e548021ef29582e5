"""A transformers model stepped one decoder layer at a time, with our attention in every layer.

The model's own forward is run once per prompt with its layers replaced by recorders: it yields
the embedding and exactly the arguments that each layer would get (rotary embeddings, position
ids). Layers are then called one by one. Attention reaches us through transformers' own
``AttentionInterface``, after RoPE and before any output gate, for every architecture alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from calib_cluster.attention import HeadInputs, Tally, attend, judge
from calib_cluster.errors import CalibrationError
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.windows import FULL

IMPLEMENTATION = "raggedkv_calibration"
VOCAB_ROWS = 256  # positions per output-head call: [256, 262144] float32 is 268 MB
CHECK_TOKENS = 64
_ACCEPTED = {"dropout", "scaling", "sliding_window", "softcap", "position_ids", "use_cache"}
_HARMLESS = {"cache_position", "is_causal", "output_attentions", "output_hidden_states"}

AttentionTask = Callable[[torch.nn.Module, HeadInputs], torch.Tensor]
_task: ContextVar[AttentionTask] = ContextVar("attention of the layer being stepped")


class _Judged(Exception):
    """Ends a layer's forward once its attention inputs have been judged."""


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **options):
    """transformers' attention function: query [1, Hq, T, D], key, value [1, Hkv, T, D]."""
    odd = {
        name
        for name, option in options.items()
        if option is not None and name not in _ACCEPTED | _HARMLESS
    }
    if odd:
        raise CalibrationError(
            f"attention of {type(module).__name__} takes {', '.join(sorted(odd))}, which is not "
            "supported: calibration knows softmax attention with scaling and softcap"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = _task.get()(module, HeadInputs(query[0], key[0], value[0], scale, softcap))
    return out[None], None


def _no_mask(*_args, **_kwargs) -> None:
    """Our attention masks by position itself, so no [T, T] mask is ever made."""


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


@contextlib.contextmanager
def _attention_task(task: AttentionTask) -> Iterator[None]:
    token = _task.set(task)
    try:
        yield
    finally:
        _task.reset(token)


@dataclass(frozen=True)
class LayerArguments:
    """Keyword arguments of every layer for prompts of one length, as the model passes them."""

    of_layer: tuple[dict[str, Any], ...]

    def same_as(self, other: LayerArguments) -> bool:
        """True if both would make every layer compute the same."""
        return _same(self.of_layer, other.of_layer)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or a == b


class SteppedModel:
    """A causal language model whose decoder layers are run one at a time. Not thread-safe.

    Args:
        model_dir: Hugging Face folder with weights.
        geometry: of that model.
        dtype: torch dtype of weights and hidden states; attention itself is float32.
        device: ``cpu``, ``cuda``, or ``auto`` to spread layers over this process's GPUs.

    Raises:
        CalibrationError: transformers cannot load it, or stepping does not reproduce its forward.
    """

    def __init__(
        self, model_dir: str | Path, geometry: ModelGeometry, dtype: torch.dtype, device: str
    ) -> None:
        self.geometry = geometry
        self.model = _load(model_dir, dtype, device)
        self.layers = _decoder_layers(self.model, len(geometry.layers))
        self._arguments: dict[int, LayerArguments] = {}
        self._check_stepping()
        self.model.set_attn_implementation(IMPLEMENTATION)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """Hidden states [1, T, hidden] before the first layer.

        Raises CalibrationError if layers get arguments that depend on more than the length.
        """
        recorded: list[dict[str, Any]] = []
        first: list[torch.Tensor] = []

        def record(hidden: torch.Tensor, *more: Any, **arguments: Any) -> torch.Tensor:
            if any(item is not None for item in more):
                raise self._cannot_be_stepped()
            first.append(hidden)
            recorded.append(arguments)
            return hidden

        with self._layers_replaced([record] * len(self.layers)):
            self._base_forward(ids)
        arguments = LayerArguments(tuple(recorded))
        known = self._arguments.setdefault(len(ids), arguments)
        if not known.same_as(arguments):
            raise self._cannot_be_stepped()
        return first[0]

    def _cannot_be_stepped(self) -> CalibrationError:
        return CalibrationError(
            f"{self.geometry.architecture} passes its layers more than hidden states and "
            "positions; it cannot be stepped layer by layer"
        )

    @torch.inference_mode()
    def judge(self, layer: int, hidden: torch.Tensor, codebook: Sequence[int], sinks: int) -> Tally:
        """Compare every candidate window of global layer ``layer`` with its full history.

        ``hidden`` [1, T, hidden] is the layer's input; nothing past attention is computed.
        """
        tallies: list[Tally] = []

        def task(_module, inputs: HeadInputs) -> torch.Tensor:
            tallies.append(judge(inputs, codebook, sinks))
            raise _Judged

        with _attention_task(task), contextlib.suppress(_Judged):
            self._call(layer, hidden)
        return tallies[0]

    @torch.inference_mode()
    def step(
        self, layer: int, hidden: torch.Tensor, windows: Sequence[int] | None, sinks: int
    ) -> torch.Tensor:
        """Output [1, T, hidden] of ``layer``.

        ``windows`` of its kv heads (global layers); None means full history. Native layers run
        their own window and recurrent layers run as they are, whatever is given.
        """
        geometry = self.geometry.layers[layer]
        rule, called = self._rule(geometry, windows, sinks), []

        def task(module, inputs: HeadInputs) -> torch.Tensor:
            called.append(module)
            return rule(module, inputs)

        with _attention_task(task):
            output = self._call(layer, hidden)
        if geometry.is_attention and not called:  # windows would be ignored silently
            raise CalibrationError(
                f"attention of layer {layer} does not go through transformers' attention interface"
            )
        return output

    @torch.inference_mode()
    def loss(self, hidden: torch.Tensor, ids: Sequence[int]) -> float:
        """Sum of -log p (nats) of ``ids[1:]``, from the last layer's output [1, T, hidden]."""
        total = 0.0
        for start in range(0, len(ids) - 1, VOCAB_ROWS):
            stop = min(start + VOCAB_ROWS, len(ids) - 1)
            logits = self._logits(ids[start:stop], hidden[:, start:stop])
            targets = torch.tensor(ids[start + 1 : stop + 1], device=logits.device)
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        return total

    def _logits(self, ids: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab], through the model's own tail (norm, scaling, softcap)."""
        given = [lambda _hidden, **_: hidden] + [_pass_on] * (len(self.layers) - 1)
        with self._layers_replaced(given):
            output = self.model(input_ids=self._tensor(ids), use_cache=False)
        return output.logits[0].float()

    def _rule(
        self, layer: LayerGeometry, windows: Sequence[int] | None, sinks: int
    ) -> AttentionTask:
        if layer.kind is LayerKind.NATIVE:
            windows, sinks = [layer.native_window] * layer.num_kv_heads, 0
        elif windows is None:
            windows = [FULL] * layer.num_kv_heads
        return lambda _module, inputs: attend(inputs, torch.tensor(windows), sinks)

    def _call(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        arguments = self._arguments[hidden.shape[1]].of_layer[layer]
        return _first(self.layers[layer](hidden, **arguments))

    def _base_forward(self, ids: Sequence[int]) -> torch.Tensor:
        output = self.model.base_model(input_ids=self._tensor(ids), use_cache=False)
        return output.last_hidden_state

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self.model.get_input_embeddings().weight.device)

    @contextlib.contextmanager
    def _layers_replaced(self, forwards: Sequence[Callable]) -> Iterator[None]:
        before = [layer.__dict__.get("forward") for layer in self.layers]
        for layer, forward in zip(self.layers, forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer, own in zip(self.layers, before, strict=True):
                del layer.forward
                if own is not None:  # accelerate wraps the forward of spread-out layers
                    layer.forward = own

    @torch.inference_mode()
    def _check_stepping(self) -> None:
        """Refuse a model that, stepped, does not say what its own eager forward says."""
        step = max(1, self.geometry.vocab_size // (CHECK_TOKENS + 1))
        ids = [i * step % self.geometry.vocab_size for i in range(CHECK_TOKENS)]
        self.model.set_attn_implementation("eager")
        expected = self.model(input_ids=self._tensor(ids), use_cache=False).logits[0].float()
        self.model.set_attn_implementation(IMPLEMENTATION)
        hidden = self.embed(ids)
        for layer in range(len(self.layers)):
            hidden = self.step(layer, hidden, None, 0)
        del self._arguments[CHECK_TOKENS]
        found = self._logits(ids, hidden)
        limit = 1e-3 if self.model.dtype == torch.float32 else 0.1
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= limit:  # NaN is never small
            raise CalibrationError(
                f"stepping {self.geometry.architecture} layer by layer gives other logits than its "
                f"own forward (relative error {error:.1e}, at most {limit:g}): not supported"
            )


def _pass_on(hidden: torch.Tensor, *_more: Any, **_arguments: Any) -> torch.Tensor:
    return hidden


def _first(output: torch.Tensor | tuple) -> torch.Tensor:
    """Some decoder layers return a tuple whose first item is the hidden states."""
    return output[0] if isinstance(output, tuple) else output


def _load(model_dir: str | Path, dtype: torch.dtype, device: str):
    try:
        config = AutoConfig.from_pretrained(model_dir)
        placed = {"auto": "auto", "cuda": {"": "cuda"}}  # never whole on the host first
        options = {"device_map": placed[device]} if device in placed else {}
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, config=config, dtype=dtype, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CalibrationError(f"--model {model_dir}: transformers cannot load it: {reason}") from (
            error
        )
    return model.eval()


def _decoder_layers(model, count: int) -> list[torch.nn.Module]:
    for module in model.base_model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count:
            return list(layers)
    raise CalibrationError(f"{type(model).__name__} has no list of {count} decoder layers")

"""Peers by kvpress's own code: its presses compress what one prefill gave them.

Nothing of their scores is written here. A press gets the attention module and the tensors that its
forward hook would get; what it kept is read from the keys it gives back, or from the mask that it
leaves on the module (AdaKV). kvpress is optional: ``python -m pip install --no-deps
kvpress==0.5.5`` and the extra ``judge``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calib_cluster.errors import CalibrationError
from calib_cluster.judge.model import Judged, JudgedModel, LayerSeen

VERSION = "0.5.5"
INSTALL = (
    f"pip install 'raggedkv[judge]' && pip install --no-deps kvpress=={VERSION} (its pin on "
    "transformers does not matter to its scores)"
)
CHUNK = 20  # ChunkKVPress's own default
SAME_AT_ANY_RATIO = ("SnapKVPress", "TOVAPress", "ExpectedAttentionPress")


@dataclass(frozen=True)
class Peer:
    """How a press is made from the module kvpress, and what is said of it."""

    make: Callable[[ModuleType], object]
    title: str


PEERS: dict[str, Peer] = {
    "snapkv": Peer(lambda k: k.SnapKVPress(), "SnapKV (window 64, kernel 5)"),
    "adakv": Peer(lambda k: k.AdaKVPress(k.SnapKVPress()), "AdaKV over SnapKV (safeguard .2)"),
    "chunkkv": Peer(lambda k: k.ChunkKVPress(k.SnapKVPress(), CHUNK), "ChunkKV over SnapKV (20)"),
    "tova": Peer(lambda k: k.TOVAPress(), "TOVA"),
    "expected_attention": Peer(
        lambda k: k.ExpectedAttentionPress(), "ExpectedAttention (512 future positions, 4 sinks)"
    ),
    "adakv_ea": Peer(
        lambda k: k.AdaKVPress(k.ExpectedAttentionPress()), "AdaKV over ExpectedAttention"
    ),
    "streamingllm": Peer(lambda k: k.StreamingLLMPress(), "StreamingLLM (4 sinks)"),
    "random": Peer(lambda k: k.RandomPress(), "random"),
}


def load_kvpress() -> ModuleType:
    """The module kvpress, its patches of transformers' attention functions undone.

    Importing it wraps every attention function of transformers for the whole process, which only
    decoding through its fake keys needs; nothing here decodes like that.

    Raises:
        CalibrationError: not installed, or another version than the one tested.
    """
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        import kvpress
    except ImportError as error:
        raise CalibrationError(f"--peers needs kvpress ({error}): {INSTALL}") from error
    finally:
        for name, function in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = function
    from importlib.metadata import version

    if (found := version("kvpress")) != VERSION:
        raise CalibrationError(f"--peers needs kvpress {VERSION}, found {found}: {INSTALL}")
    return kvpress


class PeerArm:
    """One press as an arm: it keeps as many tokens as the budget, averaged over a layer's heads.

    ChunkKV keeps whole chunks, so it is given the most of them that do not exceed the budget.

    Args:
        name: of ``PEERS``.
        model: what it compresses.

    Raises:
        CalibrationError: unknown name, or no kvpress.
    """

    def __init__(self, name: str, model: JudgedModel) -> None:
        if name not in PEERS:
            raise CalibrationError(f"no peer {name!r}; there are {', '.join(PEERS)}, recency")
        self.name = name
        self._kvpress = load_kvpress()
        self._press = PEERS[name].make(self._kvpress)
        self._press.post_init_from_model(model.model)
        self._rotary = getattr(model.model.base_model, "rotary_emb", None)

    @torch.inference_mode()
    def __call__(self, judged: Judged, budget: int) -> torch.Tensor:
        """int64 [U, width]. Raises CalibrationError if the press cannot handle model or prompt."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(judged.seed)  # RandomPress draws from the global generator
            rows = [row for layer in judged.layers for row in self._layer(layer, budget)]
        width = max(map(len, rows))
        padded = [torch.nn.functional.pad(row, (0, width - len(row)), value=-1) for row in rows]
        return torch.stack(padded)

    def _layer(self, layer: LayerSeen, budget: int) -> list[torch.Tensor]:
        """Kept positions of every kv head of one layer."""
        length = layer.keys.shape[2]
        if self.name != "chunkkv":
            return self._compressed(layer, budget, length)
        if budget < CHUNK:
            raise CalibrationError(
                f"chunkkv keeps whole chunks of {CHUNK} tokens: give budgets of at least {CHUNK}"
            )
        chunks = -(-length // CHUNK)
        # one more fits if the shorter chunk at the end is among them
        if budget // CHUNK + 1 < chunks:
            rows = self._compressed(layer, budget // CHUNK + 1, chunks)
            if len(rows[0]) <= budget:
                return rows
        return self._compressed(layer, budget // CHUNK, chunks)

    def _compressed(self, layer: LayerSeen, keep: int, of: int) -> list[torch.Tensor]:
        """What the press keeps at the ratio that keeps exactly ``keep`` of ``of``.

        The ratio aims half a token higher, because presses round ``of * (1 - ratio)`` down.
        """
        press, module = self._press, layer.module
        press.compression_ratio = 1 - (keep + 0.5) / of
        given = {"position_embeddings": layer.rotary}
        try:
            with self._as_hooked(module), self._scored_once(layer):
                keys, _ = press.compress(
                    module, layer.hidden, layer.keys, layer.values, None, given
                )
                masked = module.__dict__.pop("masked_key_indices", None)
        except Exception as error:  # whatever foreign code raises
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise CalibrationError(
                f"kvpress's {self.name} cannot compress {layer.keys.shape[2]} tokens of "
                f"{type(module).__name__}: {reason}"
            ) from error
        if masked is not None:
            return _unmasked(masked, layer.keys)
        return _matched(keys, layer, self.name)

    @contextlib.contextmanager
    def _scored_once(self, layer: LayerSeen) -> Iterator[None]:
        """Scores that do not depend on the ratio are computed once, by the press, for all budgets
        and for every press that is built on them."""
        scorer = getattr(self._press, "press", self._press)
        name = type(scorer).__name__
        if name not in SAME_AT_ANY_RATIO:
            yield
            return
        score = scorer.score  # the class's method: the attribute set here hides it for a while

        def remembered(*given) -> torch.Tensor:
            if name not in layer.scores:
                layer.scores[name] = score(*given)
            return layer.scores[name].clone()  # AdaKV writes into what it gets

        scorer.score = remembered
        try:
            yield
        finally:
            del scorer.score

    @contextlib.contextmanager
    def _as_hooked(self, module: torch.nn.Module) -> Iterator[None]:
        """What ``BasePress.__call__`` adds to an attention module, for the time of a call."""
        if self._rotary is None or hasattr(module, "rotary_emb"):
            yield
            return
        module.rotary_emb = self._rotary
        try:
            yield
        finally:
            del module.rotary_emb


def _unmasked(masked: tuple[torch.Tensor, ...], keys: torch.Tensor) -> list[torch.Tensor]:
    """Positions that AdaKV's mask (batch, head and position indices) leaves."""
    kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    kept[masked] = False
    return [row.nonzero()[:, 0] for row in kept[0]]


def _matched(found: torch.Tensor, layer: LayerSeen, name: str) -> list[torch.Tensor]:
    """Positions of the rows ``found`` [1, H, n, D] among the layer's keys, by their bytes."""
    rows = []
    for kept, places in zip(found[0].cpu().numpy(), layer.places, strict=True):
        at = [places.get(row.tobytes(), -1) for row in kept]
        if len(places) < layer.keys.shape[2] or -1 in at:
            raise CalibrationError(
                f"what kvpress's {name} kept cannot be told from its keys: two are the same, or "
                "one was changed"
            )
        rows.append(torch.tensor(sorted(at), device=found.device))
    return rows

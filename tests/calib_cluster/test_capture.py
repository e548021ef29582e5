"""Stepping a model layer by layer: every supported family against its own eager forward, against
dense per-head masks, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from calib_cluster import capture
from calib_cluster.capture import SteppedModel
from calib_cluster.errors import CalibrationError
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry, read_geometry
from kvpolicy.windows import FULL, WindowPolicy
from tests.calib_cluster.brute_force import DenseModel, cosines
from tests.calib_cluster.test_attention import bytes_of
from tests.calib_cluster.tiny_models import FAMILIES, VOCAB, save_model, save_tiny
from tests.harness.reference import MaskedReference

LENGTH = 150  # beyond a query block
SINKS = 3
ROWS = ([10, FULL], [FULL, 33], [70, 5], [17, 40])  # windows of the two kv heads of each layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[..., Path]:
    """``folder(family)``: a tiny random model of it, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def stepped_model(path: Path) -> SteppedModel:
    return SteppedModel(path, read_geometry(path), torch.float32, "cpu")


def prompt(seed: int = 0, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def stepped_loss(model: SteppedModel, ids: list[int], rows: dict[int, list[int]]) -> float:
    hidden = model.embed(ids)
    for layer in range(len(model.layers)):
        hidden = model.step(layer, hidden, rows.get(layer), SINKS)
    return model.loss(hidden, ids)


def eager_loss(path: Path, ids: list[int]) -> float:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))


def global_rows(geometry: ModelGeometry) -> dict[int, list[int]]:
    return {
        layer.layer_id: row
        for layer, row in zip(geometry.layers, ROWS, strict=True)
        if layer.kind is LayerKind.GLOBAL
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_stepped_in_full_it_is_the_eager_model(folder, family):
    model, ids = stepped_model(folder(family)), prompt()
    expected = eager_loss(folder(family), ids)
    assert stepped_loss(model, ids, {}) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_windows_it_is_the_model_with_dense_masks_per_head(folder, family):
    """Native layers keep their own mask, whatever is asked of them; recurrent ones have none."""
    model, ids = stepped_model(folder(family)), prompt()
    rows = global_rows(model.geometry)
    found = stepped_loss(model, ids, dict(enumerate(ROWS)))
    dense = DenseModel(folder(family))
    rules = {layer: (row, SINKS) for layer, row in rows.items()}
    assert found == pytest.approx(dense.loss(ids, rules), rel=2e-6)
    if rows:  # else there is nothing that windows could change
        assert abs(found - dense.loss(ids)) > 0.5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_with_windows_it_is_what_serving_is_held_to(folder, family):
    """The reference that served answers are compared with."""
    model, ids = stepped_model(folder(family)), prompt(1)
    windows = WindowPolicy.native(model.geometry).windows.copy()
    for layer, row in global_rows(model.geometry).items():
        windows[layer] = row
    reference = MaskedReference(folder(family), windows.astype(np.int64), SINKS)
    expected = -float(reference.token_logprobs(ids).sum())
    found = stepped_loss(model, ids, global_rows(model.geometry))
    assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_judged_cosines_are_those_of_dense_attention(folder, family):
    """With windows active in lower layers, as SeqCalib judges."""
    model, dense, ids = stepped_model(folder(family)), DenseModel(folder(family)), prompt(2)
    codebook, rules, hidden = [8, 32, 100], {}, model.embed(ids)
    for layer, row in enumerate(ROWS):
        if model.geometry.layers[layer].kind is LayerKind.GLOBAL:
            found = model.judge(layer, hidden, codebook, SINKS)
            dense.logits(ids, rules)
            sums, counts = dense.attention[layer].seen.mean_cosines(codebook, SINKS)
            assert (found.positions * found.group).tolist() == counts
            torch.testing.assert_close(found.sums, sums, rtol=1e-5, atol=0)
            rules[layer] = (row, SINKS)
        hidden = model.step(layer, hidden, row, SINKS)


def test_layers_of_every_kind_are_covered(folder):
    """The families above have global, native and recurrent layers, so each rule was exercised."""
    kinds = {
        family: [str(layer.kind) for layer in read_geometry(folder(family)).layers]
        for family in FAMILIES
    }
    assert kinds["mistral_native"] == ["native"] * 4
    assert kinds["gemma2"] == ["native", "global"] * 2
    assert kinds["gemma3"] == ["native"] * 3 + ["global"]
    assert kinds["qwen3_next"] == kinds["qwen3_5"] == ["recurrent"] * 3 + ["global"]
    assert kinds["llama"] == ["global"] * 4


def test_prompts_do_not_disturb_each_other(folder):
    """Two prompts of one length and one of another, stepped together, and judged in between."""
    model = stepped_model(folder("qwen3_next"))
    prompts = [prompt(0), prompt(1), prompt(2, 61)]
    rows = dict(enumerate(ROWS))
    alone = [stepped_loss(model, ids, rows) for ids in prompts]
    hidden = [model.embed(ids) for ids in prompts]
    for layer, row in rows.items():
        if layer == 3:
            [model.judge(layer, state, [8], SINKS) for state in hidden]
        hidden = [model.step(layer, state, row, SINKS) for state in hidden]
    assert [model.loss(h, ids) for h, ids in zip(hidden, prompts, strict=True)] == alone


def test_no_matrix_over_all_pairs_of_positions_is_made(folder):
    """Neither masks nor attention: 1500 tokens take no tensor of 1500 x 1500, even of one byte."""
    model, ids = stepped_model(folder("gemma3")), prompt(3, 1500)

    def calibrate() -> None:
        hidden = model.embed(ids)
        for layer in range(3):
            hidden = model.step(layer, hidden, None, SINKS)
        model.judge(3, hidden, [64, 128], SINKS)
        model.loss(model.step(3, hidden, [64, FULL], SINKS), ids)

    assert bytes_of(calibrate).largest < 4 * 4 * 128 * 1500 + 1  # heads, float32, query block


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def gates(request, tmp_path_factory) -> tuple[Path, Path]:
    """The same model with its output gate open everywhere, and shut for half of the dimensions.

    The gate is the second half of each query head's q_proj rows: its weights are 0 here and its
    bias +-10^4, so that sigmoid gives exactly 1 or 0 whatever the input.
    """
    folders = []
    for shut in (False, True):
        folder = tmp_path_factory.mktemp(f"{request.param}-{shut}")
        save_tiny(request.param, folder, attention_bias=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        projection = model.model.layers[3].self_attn.q_proj
        with torch.no_grad():
            weight, bias = (p.unflatten(0, (4, 32)) for p in (projection.weight, projection.bias))
            weight[:, 16:] = 0
            bias[:, 16:] = 1e4
            bias[:, 16:24] *= -1 if shut else 1
            values = model.model.layers[3].self_attn.v_proj.bias.unflatten(0, (2, 16))
            values[:, :8] = 3.0  # what is shut out hardly differs between tokens
        folders.append(save_model(model, folder))
    return folders[0], folders[1]


def gated_outputs(path: Path, ids: list[int], windows: list[int]) -> torch.Tensor:
    """What o_proj of the one attention layer receives, float64 [4, T, 16]: after the gate."""
    dense, received = DenseModel(path), []
    layer = dense.attention[3]
    hook = layer.o_proj.register_forward_pre_hook(lambda _module, args: received.append(args[0]))
    dense.logits(ids, {3: (windows, SINKS)})
    hook.remove()
    return received[0][0].double().unflatten(-1, (4, 16)).transpose(0, 1)


def test_gated_attention_is_judged_before_its_gate(gates):
    """With the gate open, o_proj receives the attention output itself: those are the cosines to
    find, although the judged model's gate lets only half of each vector through."""
    opened, shut = gates
    ids, codebook = prompt(4), [8, 32]
    model = stepped_model(shut)
    hidden = model.embed(ids)
    for layer in range(3):
        hidden = model.step(layer, hidden, None, SINKS)
    found = model.judge(3, hidden, codebook, SINKS)
    means = found.sums / (found.positions * found.group)

    def mean_cosines(path: Path) -> torch.Tensor:
        whole, columns = gated_outputs(path, ids, [FULL, FULL]), []
        for window in codebook:
            scores = cosines(gated_outputs(path, ids, [window, window]), whole)
            columns.append(scores.unflatten(0, (2, 2))[:, :, window + SINKS :].mean((1, 2)))
        return torch.stack(columns, 1)

    torch.testing.assert_close(means, mean_cosines(opened), rtol=0, atol=1e-5)
    assert (means - mean_cosines(shut)).min() > 0.01


def handmade_geometry(model: torch.nn.Module) -> ModelGeometry:
    """Of a model that ``read_geometry`` does not know: as if all of its layers were global."""
    config = model.config
    layers = [LayerGeometry(i, LayerKind.GLOBAL, 4, 2, 16, 16) for i in range(4)]
    return ModelGeometry(
        type(model).__name__, config.model_type, tuple(layers), 512, config.hidden_size, VOCAB, 4
    )


def refusal(folder: Path, model: torch.nn.Module) -> str:
    """The one line that stepping ``model`` is refused with."""
    model.save_pretrained(folder)
    with pytest.raises(CalibrationError) as error:
        SteppedModel(folder, handmade_geometry(model), torch.float32, "cpu")
    message = str(error.value)
    assert "\n" not in message
    return message


def from_config(name: str, **values: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(vocab_size=VOCAB, **values))


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_refuses_attention_with_learned_sinks(tmp_path):
    """gpt-oss adds a learned logit to every softmax, which blockwise attention does not know."""
    message = refusal(tmp_path, from_config("GptOssConfig", **SMALL, num_local_experts=4))
    assert "GptOssAttention takes s_aux" in message
    assert "softmax attention with scaling and softcap" in message


def test_refuses_layers_that_take_more_than_hidden_states(tmp_path):
    """Gemma 4 gives each layer an embedding of its own."""
    model = from_config(
        "Gemma4TextConfig", **SMALL, layer_types=["full_attention"] * 4, global_head_dim=16,
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    )  # fmt: skip
    assert "cannot be stepped layer by layer" in refusal(tmp_path, model)


def test_refuses_a_model_without_a_list_of_decoder_layers(tmp_path):
    model = from_config("GPT2Config", n_embd=64, n_layer=4, n_head=4)
    assert "GPT2LMHeadModel has no list of 4 decoder layers" in refusal(tmp_path, model)


def test_refuses_latent_attention(tmp_path):
    """DeepSeek's layers run, but stepped they do not say what the model says."""
    latent = SMALL | {"num_key_value_heads": 4, "head_dim": 8}
    model = from_config(
        "DeepseekV3Config", **latent, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1,
    )  # fmt: skip
    assert "gives other logits than its own forward" in refusal(tmp_path, model)


@pytest.fixture
def altered(monkeypatch) -> Callable[[Callable[[torch.nn.Module], None]], None]:
    """``altered(change)``: every model is changed by ``change`` once it is loaded."""
    load = capture._load

    def patch(change: Callable[[torch.nn.Module], None]) -> None:
        def load_changed(*args):
            model = load(*args)
            change(model)
            return model

        monkeypatch.setattr(capture, "_load", load_changed)

    return patch


def test_refuses_a_model_that_runs_its_layers_twice(folder, altered):
    def loop(model: torch.nn.Module) -> None:
        once = model.model.forward

        def twice(input_ids, **options):
            again = once(input_ids, **options).last_hidden_state
            return once(**(options | {"inputs_embeds": again}))

        model.model.forward = twice

    altered(loop)
    with pytest.raises(CalibrationError, match="gives other logits than its own"):
        stepped_model(folder("llama"))


def test_refuses_a_model_that_answers_nan(folder, altered):
    """NaN compares as false with every limit."""

    def spoil(model: torch.nn.Module) -> None:
        model.model.layers[2].mlp.down_proj.weight.data[0, 0] = float("nan")

    altered(spoil)
    with pytest.raises(CalibrationError, match="relative error nan"):
        stepped_model(folder("llama"))


def test_refuses_layer_arguments_that_depend_on_the_text(folder, altered):
    """Arguments are kept per length: two prompts of one length must give the same."""

    def depend(model: torch.nn.Module) -> None:
        rotary = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: tuple(
            part * (1 + x.mean()) for part in rotary(x, position_ids)
        )

    altered(depend)
    model = stepped_model(folder("llama"))
    model.embed(prompt(0))
    model.embed(prompt(0))
    with pytest.raises(CalibrationError, match="it cannot be stepped layer by"):
        model.embed(prompt(1))


def test_a_folder_without_weights_is_one_line(folder, tmp_path):
    config = (folder("llama") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CalibrationError, match="transformers cannot load it") as error:
        stepped_model(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | {"model_type": "llam"}))
    geometry = read_geometry(folder("llama"))
    with pytest.raises(CalibrationError, match="transformers cannot load it"):
        SteppedModel(tmp_path, geometry, torch.float32, "cpu")

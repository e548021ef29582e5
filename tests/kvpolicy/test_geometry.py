"""Geometry from config.json, against transformers' own configuration classes and by hand."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy.errors import GeometryError
from kvpolicy.geometry import LayerKind, geometry_from_config, read_geometry
from kvpolicy.hf_config import FAMILIES

FAMILY_NAMES = ["smollm2", "gemma3", "gemma3_nested", "gemma2", "qwen2", "qwen2_windowed"]
FAMILY_NAMES += ["qwen3", "mistral", "qwen3_next", "qwen3_6_27b"]
HF_KIND = {
    "full_attention": LayerKind.GLOBAL,
    "sliding_attention": LayerKind.NATIVE,
    "linear_attention": LayerKind.RECURRENT,
}


def transformers_text_config(raw: dict):
    """The same dictionary parsed by transformers, language-model part."""
    from transformers import AutoConfig

    raw = copy.deepcopy(raw)
    parsed = AutoConfig.for_model(raw.pop("model_type"), **raw)
    return parsed.get_text_config()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_geometry_agrees_with_transformers(name, config):
    raw = config(name)
    expected = transformers_text_config(raw)
    geom = geometry_from_config(raw)
    kinds = getattr(expected, "layer_types", None)
    if kinds is None:  # Llama and Mistral: every layer alike
        alike = "sliding_attention" if getattr(expected, "sliding_window", None) else None
        kinds = [alike or "full_attention"] * expected.num_hidden_layers
    assert [layer.kind for layer in geom.layers] == [HF_KIND[kind] for kind in kinds]
    assert geom.max_context == expected.max_position_embeddings
    assert (geom.hidden_size, geom.vocab_size) == (expected.hidden_size, expected.vocab_size)
    head_dim = getattr(expected, "head_dim", None)
    head_dim = head_dim or expected.hidden_size // expected.num_attention_heads
    for layer in geom.attention_layers:
        assert layer.num_q_heads == expected.num_attention_heads
        assert layer.num_kv_heads == expected.num_key_value_heads
        assert (layer.head_dim, layer.v_head_dim) == (head_dim, head_dim)
        windowed = layer.kind is LayerKind.NATIVE
        assert layer.native_window == (expected.sliding_window if windowed else 0)


def test_native_window_counts_the_current_token():
    from transformers.masking_utils import sliding_window_overlay

    keep = sliding_window_overlay(512)
    kept = [k for k in range(1001) if keep(0, 0, 1000, k)]
    assert kept == list(range(1000 - 512 + 1, 1001))


def test_gemma3_has_one_global_layer_in_six(geometry):
    geom = geometry("gemma3")
    is_global = [layer.layer_id for layer in geom.layers if layer.kind is LayerKind.GLOBAL]
    assert is_global == [5, 11, 17]
    assert geom.layers[0].native_window == 512


def test_gemma3_pattern_and_layer_types_override_the_default(geometry, config):
    every_third = geometry("gemma3", sliding_window_pattern=3)
    assert [x.layer_id for x in every_third.layers if x.kind is LayerKind.GLOBAL][:2] == [2, 5]
    listed = ["full_attention", *["sliding_attention"] * 17]
    assert geometry("gemma3", layer_types=listed).layers[0].kind is LayerKind.GLOBAL


def test_nested_text_config_takes_family_defaults(geometry):
    geom = geometry("gemma3_nested")
    assert geom.architecture == "Gemma3ForConditionalGeneration"
    assert (geom.num_units, geom.max_context, geom.vocab_size) == (34 * 4, 131072, 262208)
    assert geom.layers[0].head_dim == 256


def test_head_dim_falls_back_to_hidden_over_heads(geometry):
    assert geometry("smollm2").layers[0].head_dim == 64
    assert geometry("smollm2", head_dim=32).layers[0].head_dim == 32


def test_units_number_attention_layers_then_heads(geometry):
    geom = geometry("qwen3_6_27b")
    pairs = [(layer, head) for layer in range(3, 64, 4) for head in range(4)]
    assert geom.num_units == 64 == len(pairs)
    assert [geom.head_of(unit) for unit in range(64)] == pairs
    assert [geom.unit_of(*pair) for pair in pairs] == list(range(64))


@pytest.mark.parametrize("layer, head", [(0, 0), (64, 0), (3, 4), (3, -1)])
def test_unit_of_refuses_what_has_no_cache(layer, head, geometry):
    with pytest.raises(GeometryError):
        geometry("qwen3_6_27b").unit_of(layer, head)


def test_bytes_and_pages(geometry):
    geom = geometry("smollm2")
    assert geom.bytes_per_token_of_unit(0) == (64 + 64) * 2
    assert geom.bytes_per_token() == 30 * 3 * 256
    assert geom.page_bytes(16) == 16 * 256
    assert geom.with_kv_dtype_bytes(4).page_bytes(16) == 2 * geom.page_bytes(16)
    assert geometry("gemma2").kv_dtype_bytes == 4


def test_fingerprint_ignores_dtype_and_length_only(geometry):
    base = geometry("gemma3").fingerprint()
    assert geometry("gemma3", torch_dtype="float32").fingerprint() == base
    assert geometry("gemma3", max_position_embeddings=1024).fingerprint() == base
    changes = [{"sliding_window": 256}, {"num_hidden_layers": 12}, {"num_key_value_heads": 2}]
    changes += [{"head_dim": 128}, {"vocab_size": 7}, {"architectures": ["Other"]}]
    assert len({geometry("gemma3", **change).fingerprint() for change in changes} | {base}) == 7


def test_config_hash_ignores_resaving_only(geometry):
    base = geometry("qwen3").config_hash
    assert geometry("qwen3", transformers_version="9", torch_dtype="float16").config_hash == base
    assert geometry("qwen3", rope_theta=5.0).config_hash != base


@pytest.mark.parametrize(
    "name, millions",
    [
        ("smollm2", 134.5),
        ("gemma3", 268.1),
        ("gemma3_nested", 3880),
        ("gemma2", 2614),
        ("qwen2", 494),
        ("qwen3", 596),
        ("mistral", 7242),
        ("qwen3_next", 79_674),
    ],
)
def test_weight_estimate_is_near_the_published_size(name, millions, geometry):
    # published parameter counts of the language models; 1 % leaves room for norms and biases
    assert geometry(name).weight_parameters == pytest.approx(millions * 1e6, rel=0.01)


def test_weights_of_a_quantised_checkpoint_are_not_guessed(geometry):
    geom = geometry("smollm2", quantization_config={"quant_method": "awq"})
    with pytest.raises(GeometryError, match="--weights-bytes"):
        geom.estimated_weight_bytes()


REFUSALS = [
    ("smollm2", {"kv_lora_rank": 512}, "MLA"),
    ("smollm2", {"is_encoder_decoder": True}, "encoder-decoder"),
    ("gemma3", {"num_kv_shared_layers": 2}, "share"),
    ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
    ("smollm2", {"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported"),
    ("smollm2", {"model_type": "gemma3n_text"}, "not supported; accepted: .*llama"),
    ("smollm2", {"model_type": None}, "model_type"),
    ("smollm2", {"model_type": "llava", "text_config": {"model_type": "llama"}}, "llava"),
    ("smollm2", {"architectures": []}, "architectures"),
    ("smollm2", {"num_attention_heads": 10}, "not a multiple"),
    ("smollm2", {"hidden_size": 577}, "head_dim"),
    ("smollm2", {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
    ("smollm2", {"vocab_size": "many"}, "vocab_size must be a positive integer, found 'many'"),
    ("smollm2", {"torch_dtype": "int4"}, "accepted: .*bfloat16"),
    ("smollm2", {"layer_types": ["sliding_attention"] * 30}, "no sliding_attention layers"),
    ("gemma3", {"layer_types": ["full_attention"]}, "must list 18 layers"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 18}, "chunked_attention.*accepted"),
    ("gemma3", {"layer_types": ["linear_attention"] * 18}, "no linear_attention layers"),
    ("gemma3", {"sliding_window": None}, "sliding_window must be a positive integer"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is off"),
    ("qwen3_next", {"layer_types": ["full_attention"] * 48}, "contradicts full_attention"),
    ("qwen3_next", {"full_attention_interval": 49}, "no attention layer"),
    ("qwen3_6_27b", {"text_config": None}, "needs a text_config"),
]


@pytest.mark.parametrize("name, change, message", REFUSALS)
def test_unsupported_models_are_refused_in_one_line(name, change, message, geometry):
    with pytest.raises(GeometryError, match=message) as caught:
        geometry(name, **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff"])
def test_unreadable_config_is_one_error(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(GeometryError, match=r"config\.json"):
        read_geometry(tmp_path)


_JUNK = st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.text(max_size=3))
_JUNK |= st.lists(_JUNK, max_size=2) | st.dictionaries(st.text(max_size=2), _JUNK, max_size=1)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_configs_only_ever_raise_geometry_errors(data, config):
    raw = config(data.draw(st.sampled_from(FAMILY_NAMES)))
    for _ in range(data.draw(st.integers(1, 3))):
        target = raw
        if isinstance(raw.get("text_config"), dict) and data.draw(st.booleans()):
            target = raw["text_config"]
        extra = ["layer_types", "sliding_window_pattern", "dtype", "kv_lora_rank", "num_experts"]
        key = data.draw(st.sampled_from(sorted([*target, *extra])))
        target[key] = data.draw(_JUNK)
    try:
        geom = geometry_from_config(raw)
    except GeometryError as error:
        assert "\n" not in str(error)
    else:
        assert geom.num_units > 0


def test_read_geometry_reads_only_config_json(model_dir, geometry):
    folder = model_dir("gemma3")
    assert read_geometry(folder) == geometry("gemma3")
    assert json.loads((folder / "config.json").read_text())["model_type"] in FAMILIES

"""What is not served is refused in one line that names it and what to change instead."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_patches.backend_name import BACKEND
from engine_patches.errors import Refusal
from engine_patches.refusals import (
    REFUSED,
    check_arena,
    check_configurator,
    check_flags,
)
from kvpolicy.geometry import geometry_from_config
from tests.engine_patches import point_policies
from tests.engine_patches.launching import Outcome, launch, parse_many

# Command lines that must be refused, by the flag they are refused for.
BAD = {
    "tp_size": [["--tp-size", "2"], ["--tensor-parallel-size", "4"]],
    "pp_size": [["--pp-size", "2"]],
    "dp_size": [["--dp-size", "2"], ["--dp-size", "2", "--enable-dp-attention"]],
    "attn_dp_size": [["--attn-dp-size", "2"]],
    "nnodes": [["--nnodes", "2"]],
    "dcp_size": [["--dcp-size", "2"]],
    "attn_cp_size": [["--attn-cp-size", "2"]],
    "enable_prefill_cp": [["--enable-prefill-cp"]],
    "speculative_algorithm": [["--speculative-algorithm", "NGRAM"]],
    "decoupled_spec_role": [["--decoupled-spec-role", "verifier"]],
    "dllm_algorithm": [["--dllm-algorithm", "LowConfidence"]],
    "disaggregation_mode": [
        ["--disaggregation-mode", "prefill"],
        ["--disaggregation-mode", "decode"],
    ],
    "enable_hierarchical_cache": [["--enable-hierarchical-cache"], ["--enable-hicache"]],
    "hicache_storage_backend": [["--hicache-storage-backend", "file"]],
    "enable_lmcache": [["--enable-lmcache"]],
    "enable_flexkv": [["--enable-flexkv"]],
    "enable_hisparse": [["--enable-hisparse"]],
    "enable_unified_memory": [["--enable-unified-memory"]],
    "enable_unified_cache_external_linker": [["--enable-unified-cache-external-linker"]],
    "enable_page_major_kv_layout": [["--enable-page-major-kv-layout"]],
    "enable_kv_cache_sharding": [["--enable-kv-cache-sharding"]],
    "radix_cache_backend": [["--radix-cache-backend", "anything"]],
    "kv_canary": [["--kv-canary", "log"], ["--kv-canary", "raise"]],
    "enable_mixed_chunk": [["--enable-mixed-chunk"]],
    "enable_streaming_session": [["--enable-streaming-session"]],
    "enable_session_radix_cache": [["--enable-session-radix-cache"]],
    "enable_mis": [["--enable-mis"]],
    "enable_pdmux": [["--enable-pdmux"]],
    "enable_two_batch_overlap": [["--enable-two-batch-overlap"]],
    "prefill_only_disable_kv_cache": [["--prefill-only-disable-kv-cache"]],
    "encoder_only": [["--encoder-only"]],
    "use_ray": [["--use-ray"]],
    "kv_cache_dtype": [
        ["--kv-cache-dtype", name]
        for name in ("fp8_e5m2", "fp8_e4m3", "mxfp8", "nvfp4", "fp4_mx_block16")
    ],
    "page_size": [["--page-size", "1"], ["--page-size", "64"]],
    "attention_backend": [["--attention-backend", "torch_native"]],
    "cuda_graph_config": [["--cuda-graph-config", '{"decode": {"backend": "full"}}']],
    "prefill_attention_backend": [["--prefill-attention-backend", "fa3"]],
    "decode_attention_backend": [["--decode-attention-backend", "triton"]],
}

GOOD = [
    [],
    ["--tp-size", "1", "--pp-size", "1", "--dp-size", "1", "--dcp-size", "1"],
    ["--kv-cache-dtype", "auto"],
    ["--kv-cache-dtype", "bfloat16"],
    ["--page-size", "16"],
    ["--attention-backend", BACKEND],
    ["--disaggregation-mode", "null", "--kv-canary", "none"],
    ["--chunked-prefill-size", "128", "--schedule-policy", "lpm", "--enable-priority-scheduling"],
    ["--disable-radix-cache"],
    ["--disable-overlap-schedule", "--enable-metrics", "--disable-hybrid-swa-memory"],
    ["--kv-arena-bytes", "64MiB"],
]

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
_SIZES = {"num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 128}
TINY = _HEADS | _SIZES | {"max_position_embeddings": 512, "torch_dtype": "float32"}
LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODELS = {  # config.json, and what the refusal must say
    "deepseek": (
        TINY
        | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        "kv_lora_rank=16: latent attention",
    ),
    "deepseek_dsa": (
        TINY
        | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
        | {"kv_lora_rank": 16, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8},
        "kv_lora_rank=16: latent attention",
    ),
    "t5": (
        TINY
        | {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
        | {"is_encoder_decoder": True},
        "encoder-decoder models are not supported",
    ),
    "unknown": (
        TINY | {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"},
        "model_type 'mystery' is not supported; accepted: ",
    ),
}


def config_dir(folder: Path, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def label(argv: list[str]) -> str:
    return " ".join(argv) or "none"


POINTS = "{points}"
"""Stands for the folder of a policy with two points."""

BAD_CASES = [(flag, argv) for flag, lines in BAD.items() for argv in lines]
ODD_CASES = {  # flags of our own, and models: arguments, and what the refusal must say
    "arena_without_policy": (["--kv-arena-bytes", "1GiB"], "--kv-arena-bytes needs --kv-policy"),
    "arena_not_a_size": (["--kv-policy", "full", "--kv-arena-bytes", "lots"], "--kv-arena-bytes: "),
    "unknown_policy": (["--kv-policy", "no-such"], "no policy 'no-such'"),
    "missing_folder": (["--kv-policy", "/no/such/folder"], "/no/such/folder"),
    "point_without_policy": (["--kv-policy-point", "p"], "--kv-policy-point needs --kv-policy"),
    "share_without_policy": (["--kv-residency", "0.5"], "--kv-residency needs --kv-policy"),
    "context_without_policy": (
        ["--kv-residency-context", "64"],
        "--kv-residency-context needs --kv-policy",
    ),
    "context_without_share": (
        ["--kv-policy", POINTS, "--kv-residency-context", "64"],
        "--kv-residency-context needs --kv-residency",
    ),
    "point_and_share": (
        ["--kv-policy", POINTS, "--kv-policy-point", "tau-0.9", "--kv-residency", "0.5"],
        "--kv-residency chooses the point itself: drop it or --kv-policy-point",
    ),
    "share_of_native": (
        ["--kv-policy", "native", "--kv-residency", "0.5"],
        "--kv-residency does not work with the built-in policy native",
    ),
    "share_of_full": (
        ["--kv-policy", "full", "--kv-residency", "0.5"],
        "--kv-residency does not work with the built-in policy full",
    ),
    "point_of_full": (
        ["--kv-policy", "full", "--kv-policy-point", "p"],
        "--kv-policy-point does not work with the built-in policy full",
    ),
    "unknown_point": (
        ["--kv-policy", POINTS, "--kv-policy-point", "odd"],
        "has no point 'odd'; it has: tau-0.9, tau-0.99",
    ),
    "share_too_small": (
        ["--kv-policy", POINTS, "--kv-residency", "0.02"],
        "--kv-residency: no point of made@",
    ),
    "smallest_share": (
        ["--kv-policy", POINTS, "--kv-residency", "0.02"],
        "fits residency 0.02 at 512 tokens; the smallest is 0.031250 (point tau-0.9)",
    ),
    **{
        f"share_{share}": (
            ["--kv-policy", POINTS, "--kv-residency", share],
            f"--kv-residency: residency must be a number above 0 and at most 1, found {found}",
        )
        for share, found in {
            "0": "0.0", "-0.5": "-0.5", "1.01": "1.01", "50": "50.0", "nan": "nan", "inf": "inf",
        }.items()
    },
    **{
        f"share_text_{share}": (
            ["--kv-policy", POINTS, "--kv-residency", share],
            f"--kv-residency: {share!r} is not a share such as 0.5",
        )
        for share in ("half", "50%", "0,5")
    },
    **{
        f"context_{context}": (
            ["--kv-policy", POINTS, "--kv-residency", "0.5", "--kv-residency-context", context],
            f"--kv-residency-context: {context!r} is not a number of tokens such as 32768",
        )
        for context in ("0", "-1", "8k", "512.5", "1_00")
    },
    "budget_without_policy": (
        ["--kv-budget-tokens", "64"],
        "--kv-budget-tokens needs --kv-policy",
    ),
    "ratio_without_policy": (["--kv-budget-ratio", "0.5"], "--kv-budget-ratio needs --kv-policy"),
    "budget_text": (
        ["--kv-policy", POINTS, "--kv-budget-tokens", "8k"],
        "--kv-budget-tokens: '8k' is not a number of tokens such as 32768",
    ),
    "ratio_text": (
        ["--kv-policy", POINTS, "--kv-budget-ratio", "5%"],
        "--kv-budget-ratio: '5%' is not a share such as 0.5",
    ),
    "two_budgets": (
        ["--kv-policy", POINTS, "--kv-budget-tokens", "64", "--kv-budget-ratio", "0.5"],
        "give --kv-budget-tokens or --kv-budget-ratio, not both",
    ),
    "budget_without_tables": (
        ["--kv-policy", POINTS, "--kv-budget-tokens", "64"],
        "has no retention tables, so a budget of 64 tokens cannot be served; drop",
    ),
    "ratio_of_native": (
        ["--kv-policy", "native", "--kv-budget-ratio", "0.5"],
        "policy native has no retention tables, so a budget of 0.5 of a prompt cannot be served",
    ),
    "context_too_long": (
        ["--kv-policy", POINTS, "--kv-residency", "0.5", "--kv-residency-context", "513"],
        "--kv-residency-context: context must be 1 to 512 tokens (the model's longest), found 513",
    ),
}  # fmt: skip


CHOICES = {  # ways to choose a point that are accepted
    "point": ["--kv-policy-point", "tau-0.9"],
    "share": ["--kv-residency", "0.5"],
    "whole_share": ["--kv-residency", "1"],
    "share_at_context": ["--kv-residency=.25", "--kv-residency-context=512"],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return config_dir(tmp_path_factory.mktemp("llama") / "model", LLAMA)


@pytest.fixture(scope="module")
def parsed(llama, tmp_path_factory) -> dict[str, Outcome]:
    """What the launching process does with every command line of this file, by label."""
    folder = tmp_path_factory.mktemp("parsed")
    served = ["--model-path", llama, "--kv-policy", "full"]
    cases = {label(argv): [*served, *argv] for _, argv in BAD_CASES}
    cases |= {label(argv): [*served, *argv] for argv in GOOD}
    made = str(point_policies.two_points(llama, folder / "policies"))
    for name, (argv, _) in ODD_CASES.items():
        cases[name] = ["--model-path", llama, *(made if arg == POINTS else arg for arg in argv)]
    for name, argv in CHOICES.items():
        cases[name] = ["--model-path", llama, "--kv-policy", made, *argv]
    for name, (config, _) in MODELS.items():
        cases[name] = ["--model-path", config_dir(folder / name, config), "--kv-policy", "full"]
    weights = folder / "model.gguf"
    weights.write_bytes(b"GGUF")
    cases["gguf"] = ["--model-path", weights, "--kv-policy", "full"]
    cases["no_model"] = ["--model-path", folder / "nowhere", "--kv-policy", "full"]
    config = folder / "flags.yaml"
    config.write_text("kv-policy: full\ntp-size: 2\n")
    cases["config_file"] = ["--model-path", llama, "--config", config]
    shares = folder / "shares.yaml"
    shares.write_text(f"kv-policy: {made}\nkv-residency: 1.5\n")
    cases["config_file_share"] = ["--model-path", llama, "--config", shares]
    return dict(zip(cases, parse_many(list(cases.values()), folder), strict=True))


# -- flags -------------------------------------------------------------------------------------


def test_every_refused_flag_is_exercised():
    assert sorted(BAD) == sorted(rule.flag for rule in REFUSED)
    assert all(rule.remedy for rule in REFUSED)


@pytest.mark.parametrize(("flag", "argv"), BAD_CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_flag_is_refused_in_one_line_with_a_remedy(parsed, flag, argv):
    line = parsed[label(argv)].refused()
    (rule,) = [rule for rule in REFUSED if rule.flag == flag]
    assert line.startswith("--" + flag.replace("_", "-"))
    assert line.endswith(f" does not work with --kv-policy; {rule.remedy}")
    values = [word for word in argv[1:2] if not word.startswith("--")]
    assert all(value in line for value in values)


@pytest.mark.parametrize("argv", GOOD, ids=label)
def test_other_flags_are_accepted(parsed, argv):
    outcome = parsed[label(argv)]
    assert (outcome.returncode, outcome.refusals) == (0, []), outcome.stderr


def test_flags_sglang_does_not_have_are_not_refused():
    check_flags(SimpleNamespace())


@pytest.mark.parametrize("name", ODD_CASES)
def test_our_own_flags_are_checked(parsed, name):
    assert ODD_CASES[name][1] in parsed[name].refused()


@pytest.mark.parametrize("name", CHOICES)
def test_a_point_may_be_chosen(parsed, name):
    assert (parsed[name].returncode, parsed[name].refusals) == (0, []), parsed[name].stderr


def test_flags_of_a_config_file_are_checked(parsed):
    assert "--tp-size 2" in parsed["config_file"].refused()
    assert "--kv-residency: residency must be" in parsed["config_file_share"].refused()


# -- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_by_its_config(parsed, name):
    assert MODELS[name][1] in parsed[name].refused()


def test_a_weights_file_is_refused_for_want_of_a_config(parsed):
    line = parsed["gguf"].refused()
    assert "model.gguf" in line and "config.json" in line


def test_a_model_that_is_nowhere_is_refused(parsed):
    line = parsed["no_model"].refused()
    assert "nowhere" in line and "config.json" in line


@pytest.mark.parametrize("name", ["deepseek"])
def test_the_launcher_ends_with_one_line_and_leaves_nothing(name, tmp_path):
    config, expected = MODELS[name]
    model = config_dir(tmp_path / name, config)
    assert expected in launch("--model-path", str(model), "--kv-policy", "full").refused()


# -- what only SGLang can tell, where the pool is built ----------------------------------------


def configurator(**changes) -> SimpleNamespace:
    model = {"is_encoder_decoder": False, "is_multimodal": False}
    model |= {name: changes.pop(name) for name in tuple(changes) if name in model}
    plain = {
        "model_config": SimpleNamespace(**model),
        "post_capture_kv_active": False,
        "use_mla_backend": False,
        "mambaish_config": None,
        "is_hybrid_swa": False,
        "kv_cache_dtype": torch.bfloat16,
    }
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_plain_cache_passes(dtype):
    check_configurator(configurator(kv_cache_dtype=dtype), geometry_from_config(LLAMA))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_mla_backend": True}, "latent attention"),
        ({"mambaish_config": object()}, "config.json does not tell of"),
        ({"is_hybrid_swa": True}, "--disable-hybrid-swa-memory"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_multimodal": True}, "--enable-multimodal"),
        ({"post_capture_kv_active": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "float8_e4m3fn is not supported; use bf16"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "float8_e5m2 is not supported; use bf16"),
        ({"kv_cache_dtype": torch.uint8}, "uint8 is not supported; use bf16"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(iter(v)),
)
def test_another_kind_of_cache_is_refused(changes, expected):
    with pytest.raises(Refusal, match=expected.replace("(", r"\(")) as refusal:
        check_configurator(configurator(**changes), geometry_from_config(LLAMA))
    assert "\n" not in str(refusal.value)


def test_an_arena_must_hold_a_page_of_every_head_and_the_sink():
    geometry = geometry_from_config(LLAMA)  # 4 layers x 2 heads of 16 + 16 floats of 4 bytes
    page = 16 * 32 * 4
    check_arena(SimpleNamespace(geometry=geometry, arena_bytes=10 * page))
    with pytest.raises(Refusal, match=f"{10 * page - 1} bytes .* to {10 * page} bytes at least"):
        check_arena(SimpleNamespace(geometry=geometry, arena_bytes=10 * page - 1))


# -- requests: what a client asks for without any flag -----------------------------------------


def _answer(server, path: str, body: dict) -> tuple[int, str]:
    import httpx

    answer = httpx.post(server.url + path, json=body, timeout=60)
    return answer.status_code, answer.text


@pytest.mark.slow  # a server of its own
def test_sessions_and_beam_search_are_refused_per_request(server_factory, smollm2):
    server = server_factory(smollm2, "--kv-policy", "full", "--kv-arena-bytes", "128MiB")
    status, text = _answer(server, "/open_session", {"capacity_of_str_len": 1000})
    assert status == 400 and "sessions do not work with --kv-policy" in text
    status, text = _answer(
        server,
        "/generate",
        {"text": "The", "session_params": {"id": "mine"}, "sampling_params": {"max_new_tokens": 2}},
    )
    assert status == 400 and "session id mine does not exist" in text
    status, text = _answer(
        server,
        "/generate",
        {"text": "The", "sampling_params": {"max_new_tokens": 2, "beam_width": 2}},
    )
    assert status == 400 and "Beam search" in text and "--page-size" in text
    answer = server.generate("The capital of France is", 4)  # and it still serves
    assert len(answer.output_ids) == 4

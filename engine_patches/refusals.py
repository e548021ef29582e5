"""What RaggedKV does not serve yet, and what to change instead.

Checked on the flags as given, in the launching process, before anything is loaded; properties that
only SGLang can derive are checked again where the pool is built.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from engine_patches import recurrent
from engine_patches.backend_name import BACKEND
from engine_patches.errors import Refusal
from engine_patches.serving import PAGE_SIZE, Serving
from kvpolicy.geometry import ModelGeometry

KV_DTYPES = ("auto", "bf16", "bfloat16")
OWN_BACKENDS = (None, BACKEND)


@dataclass(frozen=True)
class Refused:
    """A flag that is refused while a policy is served: when, and what to do about it."""

    flag: str
    broken: Callable[[object], bool]
    remedy: str


def _set(value: object) -> bool:
    return bool(value)


def _above_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


REFUSED = (
    Refused("tp_size", _above_one, "serve on one GPU (--tp-size 1)"),
    Refused("pp_size", _above_one, "serve without pipeline parallelism (--pp-size 1)"),
    Refused("dp_size", _above_one, "start one server per replica (--dp-size 1)"),
    Refused("attn_dp_size", _above_one, "start one server per replica (--attn-dp-size 1)"),
    Refused("nnodes", _above_one, "serve on one machine (--nnodes 1)"),
    Refused("dcp_size", _above_one, "drop decode context parallelism (--dcp-size 1)"),
    Refused("attn_cp_size", _above_one, "drop context parallelism (--attn-cp-size 1)"),
    Refused("enable_prefill_cp", _set, "drop it: context parallelism is not supported"),
    Refused("speculative_algorithm", _set, "drop speculative decoding"),
    Refused("decoupled_spec_role", lambda v: v not in (None, "null"), "drop speculative decoding"),
    Refused("dllm_algorithm", _set, "drop it: diffusion models are not supported"),
    Refused(
        "disaggregation_mode", lambda v: v not in (None, "null"), "serve without disaggregation"
    ),
    Refused("enable_hierarchical_cache", _set, "drop it: the host cache copies dense pages"),
    Refused("hicache_storage_backend", _set, "drop it: it stores dense pages"),
    Refused("enable_lmcache", _set, "drop it: it copies dense pages"),
    Refused("enable_flexkv", _set, "drop it: it copies dense pages"),
    Refused("enable_hisparse", _set, "drop it: it has a KV pool of its own"),
    Refused("enable_unified_memory", _set, "drop it: it has a KV pool of its own"),
    Refused("enable_unified_cache_external_linker", _set, "drop it: it copies dense pages"),
    Refused("enable_page_major_kv_layout", _set, "drop it: it has a KV layout of its own"),
    Refused("enable_kv_cache_sharding", _set, "drop it: it has a KV layout of its own"),
    Refused("radix_cache_backend", _set, "use SGLang's default radix cache"),
    Refused("kv_canary", lambda v: v not in (None, "none"), "drop it: it reads dense pages"),
    Refused("enable_mixed_chunk", _set, "drop it: a batch either prefills or decodes"),
    Refused("enable_streaming_session", _set, "use ordinary requests, the radix cache still hits"),
    Refused("enable_session_radix_cache", _set, "use ordinary requests"),
    Refused("enable_mis", _set, "score one item per request: items hide from each other by a mask"),
    Refused("enable_pdmux", _set, "drop it"),
    Refused("enable_two_batch_overlap", _set, "drop it"),
    Refused("prefill_only_disable_kv_cache", _set, "drop it: there would be no cache to shrink"),
    Refused("encoder_only", _set, "drop it: an encoder has no KV cache"),
    Refused("use_ray", _set, "start the server without Ray"),
    Refused("kv_cache_dtype", lambda v: v not in (None, *KV_DTYPES), "use auto or bf16"),
    Refused("page_size", lambda v: v not in (None, PAGE_SIZE), f"use --page-size {PAGE_SIZE}"),
    Refused("attention_backend", lambda v: v not in OWN_BACKENDS, f"drop it, or {BACKEND}"),
    Refused("cuda_graph_config", _set, "use the --cuda-graph-* flags of the decode phase"),
    Refused("prefill_attention_backend", lambda v: v not in OWN_BACKENDS, "drop it"),
    Refused("decode_attention_backend", lambda v: v not in OWN_BACKENDS, "drop it"),
)


def check_flags(args: Namespace) -> None:
    """Refuse flags that a policy cannot be served with.

    Raises:
        Refusal: naming the first such flag, its value and the remedy.
    """
    for rule in REFUSED:
        value = getattr(args, rule.flag, None)
        if rule.broken(value):
            flag = "--" + rule.flag.replace("_", "-")
            text = json.dumps(value) if isinstance(value, dict) else value
            given = flag if value is True else f"{flag} {text}"
            raise Refusal(f"{given} does not work with --kv-policy; {rule.remedy}")


def check_arena(served: Serving) -> None:
    """Refuse an arena that cannot hold a page of every kv head beside the write sink.

    Raises:
        Refusal: naming the arena's bytes and what is needed.
    """
    units = served.geometry.num_units
    page = served.geometry.bytes_per_token() * PAGE_SIZE // units
    least = (units + 2) * page
    if (served.arena_bytes or 0) < least:
        raise Refusal(
            f"an arena of {served.arena_bytes} bytes is too small for {units} kv heads "
            f"and pages of {page} bytes; raise --kv-arena-bytes or "
            f"--mem-fraction-static, to {least} bytes at least"
        )


def check_configurator(configurator, geometry: ModelGeometry) -> None:
    """Refuse models whose cache SGLang would not build as plain per-head K and V.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        geometry: the served model's.

    Raises:
        Refusal: naming the property.
    """
    config = configurator.model_config
    if configurator.use_mla_backend:
        raise Refusal("this model has latent attention (MLA): there are no KV heads to keep apart")
    if configurator.mambaish_config is not None:
        if not geometry.recurrent_layers:
            raise Refusal("SGLang keeps a recurrent state that config.json does not tell of")
        recurrent.check_configurator(configurator, geometry)
    if configurator.is_hybrid_swa:
        raise Refusal(
            "SGLang would split this model's cache by sliding window; "
            "add --disable-hybrid-swa-memory, RaggedKV stores local layers by their window itself"
        )
    if configurator.post_capture_kv_active:
        raise Refusal(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING sizes a dense cache after graph capture; unset it"
        )
    if config.is_multimodal:
        raise Refusal(
            "image and audio input is not supported; serve it without --enable-multimodal, or "
            "with --language-model-only"
        )
    if config.is_encoder_decoder:
        raise Refusal("this is an encoder-decoder model: not supported")
    if configurator.kv_cache_dtype.itemsize < 2:
        raise Refusal(f"KV dtype {configurator.kv_cache_dtype} is not supported; use bf16 or fp16")

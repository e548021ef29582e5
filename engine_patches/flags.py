"""The command line: our flags, checked in the launching process before anything is loaded."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from engine_patches import register, serving
from engine_patches.backend_name import BACKEND
from engine_patches.budget import Budget
from engine_patches.errors import Refusal, exit_refused
from engine_patches.kernels.choice import KERNELS, choose_kernel, replays
from engine_patches.recurrent import check_launch
from engine_patches.refusals import check_flags
from kvpolicy.errors import KvPolicyError, PolicyError
from kvpolicy.plan import parse_bytes
from kvpolicy.select import check_budget
from kvpolicy.store import BUILT_IN

logger = logging.getLogger(__name__)


OPTIONS = (
    "kv_arena_bytes",
    "kv_policy_point",
    "kv_residency",
    "kv_residency_context",
    "kv_budget_tokens",
    "kv_budget_ratio",
    "kv_kernel",
)
"""Flags that say how to serve a policy, so each needs ``--kv-policy``."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add RaggedKV's flags to SGLang's parser.

    Numbers are taken as text: argparse would answer a malformed one with a page of usage.
    """
    group = parser.add_argument_group("RaggedKV")
    group.add_argument(
        "--kv-policy",
        metavar="DIR|NAME[@VERSION]|native|full",
        help="Serve with a KV cache whose size differs per layer and KV head, as this policy says.",
    )
    group.add_argument(
        "--kv-policy-point",
        metavar="NAME",
        help="Operating point of the policy (default: the policy's own default).",
    )
    group.add_argument(
        "--kv-residency",
        metavar="SHARE",
        help="Serve the point with the highest tau that keeps at most this share (0 to 1) of the "
        "global layers' dense cache.",
    )
    group.add_argument(
        "--kv-residency-context",
        metavar="TOKENS",
        help="Request length at which --kv-residency holds (default: the model's longest).",
    )
    group.add_argument(
        "--kv-budget-tokens",
        metavar="TOKENS",
        help="Freeze every longer prompt at the end of its prefill: each layer keeps at most this "
        "many of its tokens, by the policy's retention tables. A request may say otherwise.",
    )
    group.add_argument(
        "--kv-budget-ratio",
        metavar="SHARE",
        help="As --kv-budget-tokens, as a share (0 to 1) of each prompt.",
    )
    group.add_argument(
        "--kv-arena-bytes",
        metavar="BYTES",
        help="Bytes of the K and V arena, e.g. 24GiB (default: SGLang's own memory budget).",
    )
    group.add_argument(
        "--kv-kernel",
        metavar="|".join(KERNELS),
        help="Attention kernel (default: triton on a GPU, else reference).",
    )


def take_flags(args: argparse.Namespace) -> None:
    """Check the flags, load the policy and set up this process and its children to serve it.

    Without ``--kv-policy`` nothing is changed. Leaves the process with one line if the request
    cannot be served.
    """
    if getattr(args, "kv_policy", None) is None:
        serving.hand_down(None)
        for option in OPTIONS:
            if getattr(args, option, None) is not None:
                exit_refused(Refusal(f"{_flag(option)} needs --kv-policy"))
        return
    try:
        request = serving.settle(_request(args))
        check_flags(args)
        geometry = serving.start(request).geometry
        if geometry.recurrent_layers:
            check_launch(args, geometry, request.model)
        register.install_engine()
    except Refusal as refusal:
        exit_refused(refusal)
    serving.hand_down(request)
    args.attention_backend = BACKEND
    args.page_size = serving.PAGE_SIZE
    _turn_off_graphs(args, ("prefill",) if replays(request.kernel) else ("decode", "prefill"))


def _turn_off_graphs(args: argparse.Namespace, phases: tuple[str, ...]) -> None:
    """Steps that are planned on the host cannot be replayed from a captured graph."""
    for phase in phases:
        field = f"cuda_graph_backend_{phase}"
        if getattr(args, field, None) not in (None, "disabled"):
            logger.warning("RaggedKV serves %s without CUDA graphs: %s is ignored", phase, field)
        setattr(args, field, "disabled")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _request(args: argparse.Namespace) -> serving.ServeRequest:
    register.check_version()
    if not args.model_path:
        raise Refusal("--kv-policy needs --model-path")
    _check_choice(args)
    return serving.ServeRequest(
        policy=args.kv_policy,
        arena_bytes=_parsed(args, "kv_arena_bytes", parse_bytes),
        point=args.kv_policy_point,
        residency_budget=_parsed(args, "kv_residency", _share),
        residency_context=_parsed(args, "kv_residency_context", _tokens),
        budget=_budget(args),
        kernel=choose_kernel(args.kv_kernel, _device(args), _interpreted()),
        model=serving.model_folder(args.model_path, args.revision),
    )


def _device(args: argparse.Namespace) -> str:
    import torch

    if torch.version.hip:  # calls itself cuda, but orders forwards and allocations otherwise
        return "rocm"
    chosen = getattr(args, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    return chosen.partition(":")[0]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _budget(args: argparse.Namespace) -> Budget | None:
    tokens = _parsed(args, "kv_budget_tokens", _tokens)
    ratio = _parsed(args, "kv_budget_ratio", _prompt_share)
    if tokens is not None and ratio is not None:
        raise Refusal("give --kv-budget-tokens or --kv-budget-ratio, not both")
    return None if tokens is None and ratio is None else Budget(tokens, ratio)


def _check_choice(args: argparse.Namespace) -> None:
    """The flags that choose a point must agree with the policy and each other. Raises Refusal."""
    if args.kv_residency is not None and args.kv_policy_point is not None:
        raise Refusal("--kv-residency chooses the point itself: drop it or --kv-policy-point")
    if args.kv_residency_context is not None and args.kv_residency is None:
        raise Refusal("--kv-residency-context needs --kv-residency")
    for option in ("kv_residency", "kv_policy_point"):
        if args.kv_policy in BUILT_IN and getattr(args, option) is not None:
            raise Refusal(
                f"{_flag(option)} does not work with the built-in policy {args.kv_policy}, which "
                "has no points to choose from; drop it, or give a calibrated policy"
            )


def _parsed(args: argparse.Namespace, option: str, parse: Callable[[str], Any]) -> Any:
    """The option's value, None if not given. Raises Refusal naming the flag if malformed."""
    text = getattr(args, option)
    if text is None:
        return None
    try:
        return parse(text)
    except KvPolicyError as error:
        raise Refusal(f"{_flag(option)}: {error}") from error


def _share(text: str) -> float:
    return check_budget(_number(text))


def _prompt_share(text: str) -> float:
    share = _number(text)
    if not 0 < share <= 1:
        raise PolicyError(f"{text!r} is not a share of the prompt, above 0 up to 1")
    return share


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PolicyError(f"{text!r} is not a share such as 0.5") from None


def _tokens(text: str) -> int:
    # not int(): it would take 1_000 and other scripts' digits
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise PolicyError(f"{text!r} is not a number of tokens such as 32768")
    return int(text)

"""The command line: two flags, checked in the launching process before anything is loaded."""

from __future__ import annotations

import argparse
import logging

from engine_patches import register, serving
from engine_patches.backend_name import BACKEND
from engine_patches.errors import Refusal, exit_refused
from engine_patches.refusals import check_flags, check_geometry
from kvpolicy.errors import KvPolicyError
from kvpolicy.plan import parse_bytes
from kvpolicy.store import BUILT_IN

logger = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add RaggedKV's flags to SGLang's parser."""
    group = parser.add_argument_group("RaggedKV")
    group.add_argument(
        "--kv-policy",
        metavar="DIR|NAME[@VERSION]|native|full",
        help="Serve with a KV cache whose size differs per layer and KV head, as this policy says.",
    )
    group.add_argument(
        "--kv-arena-bytes",
        metavar="BYTES",
        help="Bytes of the K and V arena, e.g. 24GiB (default: SGLang's own memory budget).",
    )


def take_flags(args: argparse.Namespace) -> None:
    """Check the flags, load the policy and set up this process and its children to serve it.

    Without ``--kv-policy`` nothing is changed. Leaves the process with one line if the request
    cannot be served.
    """
    if getattr(args, "kv_policy", None) is None:
        serving.hand_down(None)
        if getattr(args, "kv_arena_bytes", None) is not None:
            exit_refused(Refusal("--kv-arena-bytes needs --kv-policy"))
        return
    try:
        request = _request(args)
        check_flags(args)
        check_geometry(serving.start(request).geometry)
        register.install_engine()
    except Refusal as refusal:
        exit_refused(refusal)
    serving.hand_down(request)
    args.attention_backend = BACKEND
    args.page_size = serving.PAGE_SIZE
    _turn_off_graphs(args)


def _turn_off_graphs(args: argparse.Namespace) -> None:
    """The reference backend plans every step on the host, which a captured graph cannot replay."""
    for phase in ("decode", "prefill"):
        field = f"cuda_graph_backend_{phase}"
        if getattr(args, field, None) not in (None, "disabled"):
            logger.warning("RaggedKV serves without CUDA graphs for now: %s is ignored", field)
        setattr(args, field, "disabled")


def _request(args: argparse.Namespace) -> serving.ServeRequest:
    register.check_version()
    if not args.model_path:
        raise Refusal("--kv-policy needs --model-path")
    try:
        size = None if args.kv_arena_bytes is None else parse_bytes(args.kv_arena_bytes)
    except KvPolicyError as error:
        raise Refusal(f"--kv-arena-bytes: {error}") from error
    return serving.ServeRequest(
        model=serving.model_folder(args.model_path, args.revision),
        policy=_absolute(args.kv_policy),
        arena_bytes=size,
    )


def _absolute(policy: str) -> str:
    """Child processes may run in another folder."""
    from pathlib import Path

    is_folder = policy not in BUILT_IN and Path(policy).is_dir()
    return str(Path(policy).resolve()) if is_folder else policy

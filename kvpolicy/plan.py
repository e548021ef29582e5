"""Predict capacity from a config and a policy alone: no GPU, no weights, no server.

Static windows make a request's memory a function of its length, so bytes per request, the largest
batch and the longest context are known before serving. All byte figures are whole pages at the
peak over the request's life (``residency.peak_bytes``).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.residency import DEFAULT_PAGE_SIZE, page_residency, peak_bytes, residency
from kvpolicy.windows import FULL, WindowPolicy

KV_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {"kB": 1000}  # as the SI and ``render.human_bytes`` write it
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
# where a search for the longest context stops when nothing grows any more
_LENGTH_LIMIT = FULL


class Prediction(msgspec.Struct, frozen=True):
    """What one way of storing the cache fits into the budget.

    ``bytes_per_request`` and ``max_batch`` are at the plan's context; ``max_context`` is the
    longest request alone, by memory only (None: unlimited, the cache stops growing);
    ``usable_context`` is that, capped at the model's own limit. Recurrent state is not in
    ``bytes_per_request`` but is charged to every request.
    """

    name: str
    bytes_per_request: int
    max_batch: int
    max_context: int | None
    usable_context: int
    residency: float
    page_residency: float


class Plan(msgspec.Struct, frozen=True):
    """A capacity plan: the budget, and one prediction per way of storing the cache.

    ``kv_budget_bytes`` = memory - weights - overhead, shared by KV pages and recurrent state.
    """

    policy_id: str
    memory_bytes: int
    weight_bytes: int
    weights_estimated: bool
    overhead_bytes: int
    kv_budget_bytes: int
    state_bytes_per_request: int
    context: int
    model_max_context: int
    page_size: int
    kv_dtype_bytes: int
    dense: Prediction
    native: Prediction
    policy: Prediction


def parse_bytes(text: str) -> int:
    """Bytes from ``80GB`` (decimal), ``80GiB`` (binary) or a plain number of bytes.

    Raises:
        PolicyError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or match.group(2) not in _UNITS:
        raise PolicyError(f"size {text!r} not understood; use e.g. 80GB, 80GiB or a byte count")
    value, unit = match.groups()
    return round(float(value) * _UNITS[unit]) if "." in value else int(value) * _UNITS[unit]


def with_served_dtype(geom: ModelGeometry, kv_dtype: str) -> ModelGeometry:
    """Geometry with the cache element size that serving uses.

    ``auto`` follows the checkpoint, except that SGLang serves float32 checkpoints in 16 bits
    unless told otherwise. Raises PolicyError for an unknown name.
    """
    if kv_dtype == "auto":
        return geom.with_kv_dtype_bytes(min(geom.kv_dtype_bytes, 2))
    if kv_dtype not in KV_DTYPE_BYTES:
        raise PolicyError(f"kv dtype {kv_dtype!r} unknown; accepted: auto, bf16, fp16, fp32")
    return geom.with_kv_dtype_bytes(KV_DTYPE_BYTES[kv_dtype])


def make_plan(
    policy: WindowPolicy,
    policy_id: str,
    *,
    memory_bytes: int,
    context: int | None = None,
    weight_bytes: int | None = None,
    overhead_bytes: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
) -> Plan:
    """Plan for ``policy`` (its geometry gives the model and the cache's element size).

    Args:
        policy: the windows.
        policy_id: shown in the result.
        memory_bytes: device memory.
        context: tokens per request (prompt and output); the model's limit if None.
        weight_bytes: estimated from the config if None.
        overhead_bytes: activations, workspaces, graphs, fragmentation; a tenth of the memory if
            None.
        page_size: tokens a page.

    Raises:
        KvPolicyError: context or page size out of range, weights unknown, or nothing left for KV.
    """
    geom = policy.geometry
    context = geom.max_context if context is None else context
    if context < 1 or page_size < 1:
        raise PolicyError(f"need context >= 1 and page size >= 1; found {context}, {page_size}")
    weights = geom.estimated_weight_bytes() if weight_bytes is None else weight_bytes
    overhead = memory_bytes // 10 if overhead_bytes is None else overhead_bytes
    budget = memory_bytes - weights - overhead
    if budget <= 0:
        raise PolicyError(
            f"no memory is left for KV: {memory_bytes} bytes - {weights} weights - {overhead} "
            "overhead; give more --memory, or --weights-bytes / --overhead-bytes"
        )

    def predict(name: str, windows: WindowPolicy) -> Prediction:
        return _predict(name, windows, budget, context, page_size)

    return Plan(
        policy_id=policy_id,
        memory_bytes=memory_bytes,
        weight_bytes=weights,
        weights_estimated=weight_bytes is None,
        overhead_bytes=overhead,
        kv_budget_bytes=budget,
        state_bytes_per_request=geom.state_bytes_per_request(),
        context=context,
        model_max_context=geom.max_context,
        page_size=page_size,
        kv_dtype_bytes=geom.kv_dtype_bytes,
        dense=predict("dense", WindowPolicy.full(geom)),
        native=predict("native", WindowPolicy.native(geom)),
        policy=predict(policy_id, policy),
    )


def _predict(
    name: str, policy: WindowPolicy, budget: int, context: int, page_size: int
) -> Prediction:
    geom = policy.geometry
    levels = policy.levels()
    state = geom.state_bytes_per_request()

    def kv_bytes(length: int) -> int:
        return peak_bytes(levels, geom, length, page_size)

    per_request = kv_bytes(context)
    longest = longest_context(kv_bytes, budget - state)
    return Prediction(
        name=name,
        bytes_per_request=per_request,
        max_batch=budget // (per_request + state),
        max_context=longest,
        usable_context=geom.max_context if longest is None else min(longest, geom.max_context),
        residency=residency(policy, geom, context),
        page_residency=page_residency(policy, geom, context, page_size),
    )


def longest_context(kv_bytes: Callable[[int], int], budget: int) -> int | None:
    """Largest length whose ``kv_bytes`` (non-decreasing) fits ``budget``; None if all do."""
    if kv_bytes(_LENGTH_LIMIT) <= budget:
        return None
    low, high = 0, _LENGTH_LIMIT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kv_bytes(middle) <= budget else (low, middle)
    return low

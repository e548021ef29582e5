"""What this process was asked to serve with, and what it built for it.

The launching process parses the flags, checks them and hands a ``ServeRequest`` to its child
processes through the environment; each process then has at most one ``Serving``.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine_patches.budget import Budget, Wish, wish_of
from engine_patches.errors import Refusal
from engine_patches.kernels.choice import REFERENCE
from kvpolicy.artifact import Artifact
from kvpolicy.errors import KvPolicyError
from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.residency import residency
from kvpolicy.retention import RetentionTables, retention_units
from kvpolicy.select import check_context, select_point
from kvpolicy.store import ResolvedPolicy, resolve
from kvpolicy.windows import Level

if TYPE_CHECKING:
    import numpy as np

    from engine_patches.allocator import RaggedAllocator
    from engine_patches.freeze import Freezer
    from engine_patches.frozen_store import FrozenStore
    from engine_patches.plan import DecodePlan, ExtendPlan
    from engine_patches.pool import RaggedKVPool
    from engine_patches.recurrent import StateSlots
    from kvpolicy.retention import DeviceTables

REQUEST_VARIABLE = "RAGGEDKV_SERVE"
"""JSON of a ServeRequest. Set by the launching process, read by the processes it starts."""

POISON_VARIABLE = "RAGGEDKV_POISON_FREED_PAGES"
"""Set to 1 to fill freed pages with NaN: a page that is read after its end shows at once."""

PAGE_SIZE = 16


class ServeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checked request to serve with a policy.

    Fields: ``model`` folder with config.json; ``policy`` as given or an absolute artifact folder;
    ``arena_bytes`` of the K and V arena, or None for SGLang's own memory budget; ``point`` of the
    policy, or None for its default; ``residency_budget`` (share of the dense cache of global
    layers) and ``residency_context`` (tokens) if a budget chooses, or has chosen, the point;
    ``budget`` of prompt tokens that a request keeps unless it says otherwise, None for all;
    ``kernel`` that attends, one of ``kernels.choice.KERNELS``.
    """

    model: str
    policy: str
    arena_bytes: int | None = None
    point: str | None = None
    residency_budget: float | None = None
    residency_context: int | None = None
    budget: Budget | None = None
    kernel: str = REFERENCE


class Serving:
    """One process's view of the policy being served.

    Args:
        request: what was asked for.

    Raises:
        Refusal: the policy is missing, damaged, made for another model, without that point, or
            without the retention tables that a budget needs.
    """

    def __init__(self, request: ServeRequest) -> None:
        self.request = request
        try:
            geometry = read_geometry(request.model)
            self.resolved: ResolvedPolicy = resolve(request.policy, geometry, point=request.point)
            self.residency_context = check_context(request.residency_context, geometry)
        except KvPolicyError as error:
            raise Refusal(str(error)) from error
        self.policy = self.resolved.policy
        self.retention: RetentionTables | None = _usable_tables(self.resolved, request)
        self.residency = residency(self.policy, geometry, self.residency_context)
        self.geometry = geometry
        self.pool: RaggedKVPool | None = None
        self.allocator: RaggedAllocator | None = None
        self.arena_bytes: int | None = request.arena_bytes
        self.states: StateSlots | None = None  # of a model with recurrent layers
        self.freezer: Freezer | None = None
        self.frozen_store: FrozenStore | None = None  # where decode reads the page table
        self.kernel = request.kernel  # what attends; a kernel may fall back to another
        self.plan: ExtendPlan | DecodePlan | None = None  # of the forward now running

    @property
    def policy_id(self) -> str:
        """``name@version``, or the built-in kind's name."""
        return self.resolved.policy_id

    @property
    def tau(self) -> float | None:
        """Tau that the served windows were calibrated for, or None."""
        artifact, point = self.resolved.artifact, self.resolved.point
        if artifact is None or point is None:
            return None
        return artifact.manifest.points[artifact.manifest.point_index(point)].tau

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the served policy."""
        return self.policy.levels()

    def wish(self, custom_params: Any) -> Wish:
        """What a request with these custom parameters gets. Raises BudgetError."""
        return wish_of(custom_params, self.request.budget, self.retention is not None)

    def kept_tokens(self, prompt: int) -> int | np.ndarray | None:
        """Tokens that each freezing unit keeps of a prompt by the server's own budget.

        Returns:
            one number for all units, int64 [units] where each has its own, None if a prompt of
            that length keeps everything.
        """
        budget = self.request.budget
        if budget is None or budget.of(prompt) >= prompt:
            return None
        if not self.retention.rule.mixes:
            return budget.of(prompt)
        return self._host_tables.unit_budgets(budget.of(prompt), prompt)

    @cached_property
    def _host_tables(self) -> DeviceTables:
        import torch

        from kvpolicy.retention import DeviceTables

        _, layers, heads = (torch.from_numpy(x) for x in retention_units(self.policy))
        return DeviceTables.of(self.retention, layers, heads, "cpu")

    def use_kv_dtype(self, itemsize: int) -> None:
        """Take over the KV element size in bytes that SGLang settled on."""
        self.geometry = self.geometry.with_kv_dtype_bytes(itemsize)

    def pool_class(self) -> type[Any]:
        """The pool SGLang must build in this process."""
        from engine_patches.pool import RaggedKVPool

        return RaggedKVPool

    def allocator_class(self) -> type[Any]:
        """The paged allocator SGLang must build in this process."""
        from engine_patches.allocator import RaggedAllocator

        return RaggedAllocator


_current: Serving | None = None


def current() -> Serving | None:
    """The policy being served by this process, or None."""
    return _current


def require() -> Serving:
    """The policy being served; raises RuntimeError if there is none."""
    if _current is None:
        raise RuntimeError("no KV policy is being served by this process")
    return _current


def _usable_tables(resolved: ResolvedPolicy, request: ServeRequest) -> RetentionTables | None:
    tables = resolved.retention
    if tables is None:
        if request.budget is not None:
            raise Refusal(
                f"policy {resolved.policy_id} has no retention tables, so a budget of "
                f"{request.budget} cannot be served; drop --kv-budget-tokens/-ratio or give a "
                "policy that has them (python -m kvpolicy new --retention, or merge)"
            )
        return None
    frozen, _, _ = retention_units(resolved.policy)
    full = [unit for level in resolved.policy.levels() if level.is_full for unit in level.units]
    if not len(frozen):
        raise Refusal(f"policy {resolved.policy_id} freezes nothing: every kv head has a window")
    if len(full) != len(frozen):
        raise Refusal(
            f"policy {resolved.policy_id} keeps {len(full) - len(frozen)} sliding-window kv heads "
            "at full length, which cannot be frozen; make it with native windows"
        )
    return tables


def start(request: ServeRequest) -> Serving:
    """Load the policy and make it this process's. Raises Refusal."""
    global _current
    _current = Serving(request)
    return _current


def settle(request: ServeRequest) -> ServeRequest:
    """Decide in the launching process what every process shall serve.

    A policy's name becomes its folder, and its default or a residency budget a point's name: no
    child looks up or chooses anything itself.

    Raises:
        Refusal: as ``Serving``, or no point fits the budget.
    """
    try:
        geometry = read_geometry(request.model)
        resolved = resolve(request.policy, geometry, point=request.point)
    except KvPolicyError as error:
        raise Refusal(str(error)) from error
    artifact, budget = resolved.artifact, request.residency_budget
    if artifact is None:
        return request
    point = resolved.point
    if budget is not None:
        point = _choose(artifact, budget, request.residency_context, geometry)
    folder = str(artifact.path.resolve())  # children may run in another folder
    return msgspec.structs.replace(request, policy=folder, point=point)


def _choose(artifact: Artifact, budget: float, context: int | None, geom: ModelGeometry) -> str:
    flag = "--kv-residency-context"
    try:
        check_context(context, geom)
        flag = "--kv-residency"
        return select_point(artifact, budget, context, geom).point
    except KvPolicyError as error:
        raise Refusal(f"{flag}: {error}") from error


def hand_down(request: ServeRequest | None) -> None:
    """Set (or clear) what child processes will serve with. Changes ``os.environ``."""
    if request is None:
        os.environ.pop(REQUEST_VARIABLE, None)
    else:
        os.environ[REQUEST_VARIABLE] = msgspec.json.encode(request).decode()


def inherited() -> ServeRequest | None:
    """What the launching process asked this one to serve with. Raises Refusal if unreadable."""
    text = os.environ.get(REQUEST_VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=ServeRequest)
    except msgspec.DecodeError as error:
        raise Refusal(f"${REQUEST_VARIABLE} is not a serve request: {error}") from error


def model_folder(model_path: str, revision: str | None = None) -> str:
    """A local folder with the model's config.json, fetched from the hub cache if need be.

    Raises:
        Refusal: there is no such folder and no such hub model.
    """
    if (Path(model_path) / "config.json").is_file():
        return str(Path(model_path).resolve())
    if Path(model_path).exists():
        raise Refusal(f"--model-path {model_path}: no config.json in it, needed to read its layers")
    try:
        from huggingface_hub import hf_hub_download

        return str(Path(hf_hub_download(model_path, "config.json", revision=revision)).parent)
    except Exception as error:
        raise Refusal(f"--model-path {model_path}: config.json could not be read") from error

"""Which servers are compared: stock SGLang, our engine with nothing dropped, the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from kvpolicy.geometry import ModelGeometry
from kvpolicy.select import select_point
from kvpolicy.store import ResolvedPolicy, resolve
from kvpolicy.windows import WindowPolicy
from loadtest.capacity.predict import Kept, Store, dense_store, page_bytes
from loadtest.errors import UserError, naming_flag
from loadtest.servers import PAGE_SIZE

STOCK, NONE = "stock", "none"


class Role(StrEnum):
    """What a side is for."""

    STOCK = "stock"
    BASE = "base"
    FULL = "full"
    WINDOWS = "windows"
    FROZEN = "frozen"
    OTHER = "other"


NAMES = {
    Role.STOCK: "stock SGLang",
    Role.BASE: "RaggedKV base",
    Role.FULL: "RaggedKV full",
    Role.WINDOWS: "RaggedKV windows",
    Role.FROZEN: "RaggedKV frozen",
    Role.OTHER: "other SGLang",
}


@dataclass(frozen=True)
class Side:
    """One server of the comparison.

    ``flags`` are those of ``sglang.launch_server`` that differ from the other servers'; a side with
    a ``url`` runs already. ``what`` says which policy it serves; ``store`` predicts what fits.
    """

    role: Role
    what: str
    store: Store
    flags: tuple[str, ...] = ()
    policy_id: str | None = None
    point: str | None = None
    budget: int | None = None
    url: str | None = None

    @property
    def name(self) -> str:
        """Its name in tables and charts."""
        return NAMES[self.role]

    @property
    def freezes(self) -> bool:
        """True if its prompts are frozen."""
        return self.store.kept is not None

    @property
    def ragged(self) -> bool:
        """True for our engine, False for stock SGLang."""
        return self.role not in (Role.STOCK, Role.OTHER)


@dataclass(frozen=True)
class Wanted:
    """The flags that choose sides. ``residency`` at ``residency_context`` picks a point instead."""

    policy: str
    point: str | None
    residency: float | None
    residency_context: int | None
    budget: int | None
    default_budget: int
    versus: str


def line_up(wanted: Wanted, geometry: ModelGeometry, kv_bytes: int) -> list[Side]:
    """All sides in the order they are measured, what they are compared with first.

    Raises UserError, naming the flag, for an unknown policy or point and for a budget that the
    policy cannot freeze by.
    """
    resolved = _resolved(wanted, geometry)
    budget = _budget(wanted, resolved)
    sides = _compared_with(wanted.versus, geometry, kv_bytes)
    all_full = WindowPolicy.full(geometry)
    if wanted.versus == STOCK and resolved.policy != all_full:
        full = ResolvedPolicy("full", all_full)
        sides.append(_ragged(Role.FULL, "full", full, geometry, kv_bytes))
    role = Role.FULL if resolved.policy == all_full else Role.WINDOWS
    windows = _ragged(role, wanted.policy, resolved, geometry, kv_bytes)
    sides.append(windows)
    if budget is not None:
        sides.append(_frozen(windows, resolved, budget))
    return sides


def _resolved(wanted: Wanted, geometry: ModelGeometry) -> ResolvedPolicy:
    point = wanted.point
    if wanted.residency is not None:
        found = naming_flag("--policy", resolve, wanted.policy, geometry)
        if found.artifact is None:
            raise UserError(
                f"--kv-residency: policy {found.policy_id} is built in and has no points to choose"
            )
        chosen = naming_flag(
            "--kv-residency", select_point, found.artifact, wanted.residency,
            wanted.residency_context, geometry,
        )  # fmt: skip
        point = chosen.point

    def find() -> ResolvedPolicy:
        return resolve(wanted.policy, geometry, point=point)

    return naming_flag("--policy" if point is None else "--policy, --point", find)


def _budget(wanted: Wanted, resolved: ResolvedPolicy) -> int | None:
    """Prompt tokens that a frozen request keeps; None if nothing is to be frozen."""
    if resolved.retention is None:
        if wanted.budget is not None:
            raise UserError(
                f"--budget-tokens: policy {resolved.policy_id} has no retention tables to freeze by"
            )
        return None
    return wanted.default_budget if wanted.budget is None else wanted.budget


def _compared_with(versus: str, geometry: ModelGeometry, kv_bytes: int) -> list[Side]:
    if versus == NONE:
        return []
    if versus == STOCK:
        return [_stock(geometry, kv_bytes)]
    found = naming_flag("--vs", resolve, versus, geometry)
    return [_ragged(Role.BASE, versus, found, geometry, kv_bytes)]


def _stock(geometry: ModelGeometry, kv_bytes: int) -> Side:
    tokens = kv_bytes // geometry.bytes_per_token() // PAGE_SIZE * PAGE_SIZE
    flags = ("--attention-backend", "torch_native", "--max-total-tokens", str(tokens))
    store = dense_store(WindowPolicy.full(geometry).levels(), geometry, tokens)
    return Side(Role.STOCK, "SGLang as it is", store, flags)


def _ragged(
    role: Role, spec: str, resolved: ResolvedPolicy, geometry: ModelGeometry, kv_bytes: int
) -> Side:
    flags = ("--kv-policy", spec, "--kv-arena-bytes", str(kv_bytes))
    if resolved.point is not None:
        flags += ("--kv-policy-point", resolved.point)
    page = page_bytes(geometry)
    store = Store(resolved.policy.levels(), kv_bytes // page - 1, page)  # one page is the sink
    what = f"{resolved.policy_id} {_point(resolved)}".strip()
    return Side(role, what, store, flags, resolved.policy_id, resolved.point)


def _point(resolved: ResolvedPolicy) -> str:
    """The point's name; nothing where the policy has one only."""
    artifact = resolved.artifact
    several = artifact is not None and len(artifact.manifest.points) > 1
    return resolved.point or "" if several else ""


def _frozen(windows: Side, resolved: ResolvedPolicy, budget: int) -> Side:
    store = Store(
        windows.store.levels, windows.store.pages, windows.store.page_bytes,
        kept_tokens(resolved, budget),
    )  # fmt: skip
    flags = (*windows.flags, "--kv-budget-tokens", str(budget))
    what = f"{windows.what}, prompts frozen to {budget} tokens"
    return Side(
        Role.FROZEN, what, store, flags, windows.policy_id, windows.point, budget,
    )  # fmt: skip


def kept_tokens(resolved: ResolvedPolicy, budget: int) -> Callable[[int], Kept | None]:
    """Tokens that each freezing unit keeps of a prompt, as the engine shares out ``budget``."""

    @lru_cache
    def kept(prompt: int) -> Kept | None:
        if budget >= prompt:
            return None
        if not resolved.retention.rule.mixes:
            return budget
        import torch  # slow to import

        from kvpolicy.retention import DeviceTables, retention_units

        _, layers, heads = (torch.from_numpy(x) for x in retention_units(resolved.policy))
        tables = DeviceTables.of(resolved.retention, layers, heads, "cpu")
        return tables.unit_budgets(budget, prompt)

    return kept

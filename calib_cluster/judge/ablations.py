"""Policies with one part taken out, to see what it is worth: ``POLICY~PART``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from calib_cluster.errors import CalibrationError
from kvpolicy.retention import RetentionTables

MARK = "~"


def without_heads(tables: RetentionTables) -> RetentionTables:
    """Every head weight 1."""
    return replace(tables, head_weights=np.ones_like(tables.head_weights))


def without_gate(tables: RetentionTables) -> RetentionTables:
    """The budget alone decides."""
    rule = msgspec.structs.replace(tables.rule, gate="off")
    none = np.zeros(0, np.float32)
    gate = np.zeros((0, tables.gate.shape[1], 1, 1), np.float32)
    return replace(
        tables, rule=rule, budgets=(), gate=gate, entropy_edges=none, perplexity_edges=none
    )


def without_shares(tables: RetentionTables) -> RetentionTables:
    """Every unit keeps the budget."""
    return replace(tables, mix=replace(tables.mix, shares=np.ones_like(tables.mix.shares)))


def without_mixtures(tables: RetentionTables) -> RetentionTables:
    """Every unit takes from all sources alike."""
    return replace(tables, mix=replace(tables.mix, quotas=np.ones_like(tables.mix.quotas)))


def without_order(tables: RetentionTables) -> RetentionTables:
    """The same shares dealt to other units (seeded): a control."""
    shares = tables.mix.shares
    dealt = np.random.default_rng(0).permutation(shares[0].size)
    mixed_up = shares.reshape(len(shares), -1)[:, dealt].reshape(shares.shape)
    return replace(tables, mix=replace(tables.mix, shares=mixed_up))


Change = Callable[[RetentionTables], RetentionTables]
UTILITY = "utility"
"""Without eq. 4's value ratio: the attention mass alone. Not in the tables: the arm does it."""
OF_PAPER: dict[str, Change] = {
    "heads": without_heads, "gate": without_gate, UTILITY: lambda tables: tables,
}  # fmt: skip
OF_MIX: dict[str, Change] = {
    "shares": without_shares, "mixtures": without_mixtures, "order": without_order,
}  # fmt: skip


def split(spec: str) -> tuple[str, str]:
    """(policy, part) of ``POLICY~PART``; the part is empty where there is none."""
    policy, _, part = spec.partition(MARK)
    return policy, part


def ablated(tables: RetentionTables, part: str) -> RetentionTables:
    """``tables`` without ``part``. Raises CalibrationError if they have no such part."""
    if not part:
        return tables
    known = OF_MIX if tables.rule.mixes else OF_PAPER
    usable = [name for name in known if name != "gate" or tables.rule.gate == "table"]
    if part not in usable:
        raise CalibrationError(
            f"--policies: rule {tables.rule.name} has no part {part!r} to take out; there are "
            f"{', '.join(usable)}"
        )
    return known[part](tables)

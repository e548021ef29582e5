"""Policies without one of their parts: what is left, and what has no such part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.judge import Case
from calib_cluster.judge.ablations import ablated, split
from calib_cluster.judge.arms import PolicyArm, find_policy
from kvpolicy.retention import RULES, MixTables
from tests.calib_cluster.rewards.frozen import text
from tests.kvpolicy.retention.tables import compiled


def test_names():
    assert split("artifacts/m/p/1") == ("artifacts/m/p/1", "")
    assert split("p@1~gate") == ("p@1", "gate")


def test_a_paper_policy_loses_its_parts(both):
    tables = compiled(both("llama").model.geometry)
    heads = ablated(tables, "heads")
    assert (heads.head_weights == 1).all() and heads.gate is not None
    np.testing.assert_array_equal(heads.gate, tables.gate)
    gate = ablated(tables, "gate")
    assert gate.rule.gate == "off" and gate.budgets == ()
    np.testing.assert_array_equal(gate.head_weights, tables.head_weights)
    assert ablated(tables, "utility") is tables and ablated(tables, "") is tables


def test_a_mix_loses_its_parts(both):
    geom = both("llama").model.geometry
    tables = find_policy("mix", geom).tables
    shares = np.random.default_rng(0).uniform(0.2, 4, tables.mix.shares.shape).astype(np.float32)
    quotas = np.random.default_rng(1).uniform(0, 1, tables.mix.quotas.shape).astype(np.float32)
    full = replace(tables, mix=MixTables(shares, quotas, tables.mix.query_weights))
    assert (ablated(full, "shares").mix.shares == 1).all()
    assert (ablated(full, "mixtures").mix.quotas == 1).all()
    dealt = ablated(full, "order").mix.shares
    assert sorted(dealt.ravel()) == sorted(shares.ravel()) and not np.array_equal(dealt, shares)
    np.testing.assert_array_equal(ablated(full, "order").mix.quotas, quotas)


@pytest.mark.parametrize("spec", ["paper~shares", "head~gate", "mix~heads", "paper~nothing"])
def test_parts_that_are_not_there_are_refused(spec, both):
    with pytest.raises(CalibrationError, match=r"has no part .* there are") as caught:
        find_policy(spec, both("llama").model.geometry)
    assert "\n" not in str(caught.value)


def test_without_the_utility_values_do_not_matter(both, rng):
    """Two prompts that differ in their values only keep the same."""
    model = both("llama").model
    prompt, continuation = text(rng)
    judged = model.judge_case(Case(tuple(prompt), tuple(continuation), 0))
    policy = find_policy("paper~utility", model.geometry)
    assert policy.plain_mass and policy.title.endswith("without utility")
    arm = PolicyArm(policy.tables, model.units, plain_mass=True)
    before = arm(judged, 12)
    norms = judged.prefill.value_norms * torch.linspace(0.5, 3, len(prompt))
    other = replace(judged, prefill=replace(judged.prefill, value_norms=norms))
    assert torch.equal(arm(other, 12), before)
    usual = PolicyArm(policy.tables, model.units)
    assert not torch.equal(usual(other, 12), usual(judged, 12))
    assert RULES["paper"].gate == "table"

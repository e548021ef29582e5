"""A residency budget chooses the point once, in the launching process, for every process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from engine_patches import serving
from engine_patches.errors import Refusal
from engine_patches.proof import proof
from engine_patches.serving import ServeRequest, Serving
from engine_patches.startup import startup_table
from kvpolicy.artifact import load_artifact
from kvpolicy.select import select_point
from tests.engine_patches import point_policies
from tests.engine_patches.launching import run_python
from tests.engine_patches.test_refusals import LLAMA, config_dir


@pytest.fixture
def llama(tmp_path) -> Path:
    return config_dir(tmp_path / "model", LLAMA)


@pytest.fixture
def made(llama, tmp_path) -> Path:
    """A policy whose points keep 16 / length and half of the cells plus that, by tau."""
    return point_policies.two_points(llama, tmp_path / "policies")


@pytest.fixture
def request_for(llama, made):
    """``request_for(**fields)``: a settled request for the two-point policy."""

    def settle(**fields) -> ServeRequest:
        return serving.settle(ServeRequest(str(llama), str(made), **fields))

    return settle


@pytest.mark.parametrize(
    ("share", "context", "point"),
    [
        (1.0, None, "tau-0.99"),
        (0.6, None, "tau-0.99"),
        (0.5, None, "tau-0.9"),
        (0.5, 512, "tau-0.9"),
        (0.6, 17, "refused"),
        (1.0, 16, "tau-0.99"),
    ],
)
def test_the_budget_chooses_as_kvpolicy_does(request_for, made, share, context, point):
    fields = {"residency_budget": share, "residency_context": context}
    if point == "refused":
        with pytest.raises(Refusal, match="--kv-residency: no point of made"):
            request_for(**fields)
        return
    settled = request_for(**fields)
    served = Serving(settled)
    chosen = select_point(load_artifact(made), share, context)
    assert (settled.point, served.resolved.point) == (point, point) == (chosen.point,) * 2
    assert (served.tau, served.residency) == (chosen.tau, chosen.residency)
    assert (served.policy.windows == load_artifact(made).policy(point).windows).all()


def test_without_a_budget_the_default_or_the_named_point_is_served(request_for):
    assert request_for().point == "tau-0.9"
    assert request_for(point="tau-0.99").point == "tau-0.99"
    with pytest.raises(Refusal, match="no point 'odd'"):
        request_for(point="odd")


@pytest.mark.parametrize("policy", ["native", "full"])
def test_built_in_policies_need_no_settling(llama, policy):
    request = ServeRequest(str(llama), policy)
    assert serving.settle(request) == request
    state = proof(Serving(request))
    assert (state["point"], state["tau"], state["budget"]) == (None, None, None)
    assert (state["residency"], state["residency_context"]) == (1.0, 512)


def test_a_child_in_another_folder_serves_the_point_whatever_it_could_choose(
    llama, made, tmp_path, monkeypatch
):
    """The launcher looked the policy up in its own folder; the child gets what it chose."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGGEDKV_ARTIFACTS", os.path.relpath(made.parents[2]))
    request = ServeRequest(str(llama), "made", residency_budget=0.6)
    text = msgspec.json.encode(serving.settle(request)).decode()
    monkeypatch.chdir("/")
    monkeypatch.setenv(serving.REQUEST_VARIABLE, text)
    child = Serving(serving.inherited())
    assert child.resolved.point == "tau-0.99"
    # the child chooses nothing: it serves the name even where the budget would choose otherwise
    other = msgspec.structs.replace(serving.inherited(), residency_budget=0.1)
    assert Serving(other).resolved.point == "tau-0.99"


def test_the_proof_and_the_start_up_table_name_the_choice(request_for):
    served = Serving(request_for(residency_budget=0.6, residency_context=256))
    state = proof(served)
    assert state == {
        "policy": served.policy_id,
        "point": "tau-0.99",
        "tau": 0.99,
        "residency": 0.53125,
        "residency_context": 256,
        "budget": 0.6,
        "retention": None,
        "prompt_budget": None,
        "kernel": "reference",
        "running": False,
    }
    served.arena_bytes = 1 << 20
    table = startup_table(served, 4096)
    assert f"policy {served.policy_id}, point tau-0.99" in table
    expected = (
        "point tau-0.99: tau 0.99, residency 53.12% of global layers at 256 tokens, "
        "chosen by --kv-residency 0.6"
    )
    assert expected in table.splitlines()


def test_the_start_up_table_says_nothing_of_a_budget_that_was_not_given(request_for, llama):
    served = Serving(request_for(point="tau-0.9"))
    served.arena_bytes = 1 << 20
    line = "point tau-0.9: tau 0.9, residency 3.12% of global layers at 512 tokens"
    assert line in startup_table(served, 4096).splitlines()
    full = Serving(ServeRequest(str(llama), "full", arena_bytes=1 << 20))
    line = "residency 100.00% of global layers at 512 tokens"
    assert line in startup_table(full, 4096).splitlines()


_PARSE = """
import json, os
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(json.loads(os.environ["ARGV"]))
from engine_patches import serving
print()
print(json.dumps([os.environ[serving.REQUEST_VARIABLE], serving.current().resolved.point]))
"""


def test_the_command_line_hands_the_chosen_point_to_the_children(llama, made):
    argv = ["--model-path", str(llama), "--kv-policy", str(made)]
    argv += ["--kv-residency", "0.6", "--kv-residency-context", "256"]
    text, here = run_python(_PARSE, {"ARGV": json.dumps(argv)})
    handed = msgspec.json.decode(text, type=ServeRequest)
    assert (here, handed.point, handed.policy) == ("tau-0.99", "tau-0.99", str(made))
    assert (handed.residency_budget, handed.residency_context) == (0.6, 256)

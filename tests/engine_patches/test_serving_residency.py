"""A served residency budget: the proof, the log and the pages are those of the chosen point."""

from __future__ import annotations

import pytest

from kvpolicy.artifact import load_artifact
from kvpolicy.select import select_point
from tests.engine_patches import point_policies
from tests.harness import corpora
from tests.harness.reference import MaskedReference

CONTEXT = 2048
BUDGET = 0.6
ATOL = 1e-4

pytestmark = pytest.mark.slow  # a server of its own


@pytest.fixture(scope="module")
def artifact(smollm2, tmp_path_factory):
    return load_artifact(
        point_policies.two_points(smollm2, tmp_path_factory.mktemp("p"), window=64)
    )


@pytest.fixture(scope="module")
def server(server_factory, smollm2, artifact):
    flags = ("--kv-policy", str(artifact.path), "--kv-arena-bytes", "300MB", "--enable-metrics")
    flags += ("--kv-residency", str(BUDGET), "--kv-residency-context", str(CONTEXT))
    return server_factory(smollm2, *flags)


@pytest.fixture(scope="module")
def chosen(artifact):
    selection = select_point(artifact, BUDGET, CONTEXT)
    assert selection.point != artifact.manifest.default_point, "else nothing is shown"
    return selection


def test_server_info_names_the_chosen_point_and_holds_its_levels(server, artifact, chosen):
    state = server.info()["internal_states"][0]["raggedkv"]
    assert state["running"] and state["policy"] == artifact.policy_id
    assert (state["point"], state["tau"]) == (chosen.point, chosen.tau) == ("tau-0.99", 0.99)
    assert (state["residency"], state["residency_context"]) == (chosen.residency, CONTEXT)
    assert state["budget"] == BUDGET
    levels = [(level["window"], level["units"]) for level in state["levels"]]
    assert levels == [(64, 45), ("full", 45)]


def test_the_answers_are_those_of_the_chosen_points_windows(
    server, artifact, chosen, smollm2, tokenizer
):
    reference = MaskedReference(smollm2, artifact.policy(chosen.point).windows, 0)
    (prompt,) = corpora.prompts(tokenizer(smollm2), [400], seed=1)
    answer = server.generate(prompt, 12)
    reference.check_greedy(prompt, answer.output_ids, answer.logprobs, atol=ATOL)


def test_the_log_names_tau_residency_and_budget(server, artifact):
    log = server.log.read_text(errors="replace")
    assert f"RaggedKV serves policy {artifact.policy_id}, point tau-0.99" in log
    line = (
        "point tau-0.99: tau 0.99, residency 51.56% of global layers at 2048 tokens, "
        "chosen by --kv-residency 0.6"
    )
    assert line in log.splitlines()


def test_metrics_name_the_choice(server, artifact, chosen):
    server.generate("The capital of France is", 2)
    server.wait_idle()
    metrics = server.metrics()
    (info,) = metrics["raggedkv:policy_info"]
    wanted = {"policy": artifact.policy_id, "point": "tau-0.99", "tau": "0.99"}
    wanted |= {"budget": "0.6", "context": "2048"}
    assert info.value == 1 and wanted.items() <= info.labels.items()
    assert metrics["raggedkv:residency"][0].value == pytest.approx(chosen.residency)

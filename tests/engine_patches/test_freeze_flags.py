"""Flags and policies of a server that freezes prompts: taken, refused and handed down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from engine_patches import flags, serving
from engine_patches.budget import Budget, Wish
from engine_patches.errors import Refusal
from engine_patches.proof import proof
from engine_patches.serving import ServeRequest, Serving
from engine_patches.sizing import HEADROOM, dense_tokens, logical_tokens
from engine_patches.startup import startup_table
from kvpolicy.artifact import load_artifact
from kvpolicy.cli_transfer import transfer
from kvpolicy.geometry import read_geometry
from kvpolicy.residency import held_pages
from kvpolicy.retention import RULES
from kvpolicy.windows import FULL, WindowPolicy
from tests.engine_patches import point_policies, policies
from tests.engine_patches.test_refusals import LLAMA, TINY, config_dir
from tests.kvpolicy.retention import literal

GEMMA = TINY | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 16,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path) -> Path:
    return config_dir(tmp_path / "model", LLAMA)


@pytest.fixture
def gemma(tmp_path) -> Path:
    return config_dir(tmp_path / "gemma", GEMMA)


def with_tables(model: Path, root: Path, policy: WindowPolicy, rule: str = "paper") -> str:
    tables = policies.tables(model, RULES[rule])
    return str(policies.write(policy, root, retention=tables))


@pytest.fixture
def frozen(llama, tmp_path) -> str:
    policy = WindowPolicy.full(read_geometry(llama))
    return with_tables(llama, tmp_path / "policies", policy)


# -- the command line --------------------------------------------------------------------------


def parsed(tokens: str | None = None, ratio: str | None = None) -> Budget | None:
    return flags._budget(SimpleNamespace(kv_budget_tokens=tokens, kv_budget_ratio=ratio))


@pytest.mark.parametrize(
    ("argv", "budget"),
    [
        ({}, None),
        ({"tokens": "512"}, Budget(tokens=512)),
        ({"tokens": "1"}, Budget(tokens=1)),
        ({"ratio": "0.05"}, Budget(ratio=0.05)),
        ({"ratio": "1"}, Budget(ratio=1.0)),
        ({"ratio": "1e-3"}, Budget(ratio=0.001)),
    ],
)
def test_a_budget_is_taken_from_the_flags(argv, budget):
    assert parsed(**argv) == budget


@pytest.mark.parametrize("text", ["0", "-1", "8k", "1.5", "1_00", "", " 5", "٣", "many"])
def test_a_malformed_number_of_tokens_names_its_flag(text):
    with pytest.raises(Refusal) as refusal:
        parsed(tokens=text)
    assert str(refusal.value) == (
        f"--kv-budget-tokens: {text!r} is not a number of tokens such as 32768"
    )


@pytest.mark.parametrize("text", ["0", "-0.5", "1.01", "50", "nan", "inf", "half", "5%", "0,5", ""])
def test_a_malformed_share_names_its_flag_and_itself(text):
    with pytest.raises(Refusal) as refusal:
        parsed(ratio=text)
    message = str(refusal.value)
    assert message.startswith("--kv-budget-ratio: ") and "\n" not in message
    assert repr(text) in message and "share" in message and "residency" not in message


def test_two_budgets_are_refused():
    with pytest.raises(Refusal, match="give --kv-budget-tokens or --kv-budget-ratio, not both"):
        parsed(tokens="5", ratio="0.5")


# -- the policy --------------------------------------------------------------------------------


SOME = Budget(tokens=64)


def serve(model: Path, policy: str, budget: Budget | None = SOME) -> Serving:
    return Serving(serving.settle(ServeRequest(str(model), policy, budget=budget)))


@pytest.mark.parametrize("budget", [Budget(tokens=64), Budget(ratio=0.25)], ids=str)
@pytest.mark.parametrize("policy", ["full", "native", "points"])
def test_a_budget_needs_a_policy_with_tables(llama, tmp_path, policy, budget):
    if policy == "points":
        policy = str(point_policies.two_points(llama, tmp_path / "policies"))
    with pytest.raises(Refusal, match="has no retention tables") as refusal:
        serve(llama, policy, budget)
    message = str(refusal.value)
    assert f"a budget of {budget} cannot be served" in message and "--retention" in message
    assert "\n" not in message
    served = serve(llama, policy, None)
    assert served.retention is None and served.wish(None) == Wish(None)


def test_tables_where_every_head_has_a_window_are_refused(llama, tmp_path):
    policy = WindowPolicy.uniform(read_geometry(llama), 16)
    folder = with_tables(llama, tmp_path / "policies", policy)
    for budget in (None, Budget(tokens=64)):
        with pytest.raises(Refusal, match="freezes nothing: every kv head has a window"):
            serve(llama, folder, budget)


def test_sliding_layers_stored_in_full_cannot_be_frozen(gemma, tmp_path):
    geometry = read_geometry(gemma)
    folder = with_tables(gemma, tmp_path / "full", WindowPolicy.full(geometry))
    with pytest.raises(Refusal, match="keeps 6 sliding-window kv heads at full length"):
        serve(gemma, folder)
    folder = with_tables(gemma, tmp_path / "native", WindowPolicy.native(geometry))
    assert serve(gemma, folder).retention is not None


def test_a_served_budget_is_every_requests_default(llama, frozen):
    served = serve(llama, frozen)
    assert served.wish(None) == Wish(Budget(tokens=64))
    assert served.wish({"kv_budget_ratio": 0.5}) == Wish(Budget(ratio=0.5))
    assert served.wish({"kv_retention": "off"}) == Wish(None)
    assert serve(llama, frozen, None).wish({"kv_budget_tokens": 3}) == Wish(Budget(tokens=3))


def test_children_get_the_budget(llama, frozen, monkeypatch):
    request = serving.settle(ServeRequest(str(llama), frozen, budget=Budget(ratio=0.25)))
    text = msgspec.json.encode(request).decode()
    monkeypatch.setenv(serving.REQUEST_VARIABLE, text)
    child = Serving(serving.inherited())
    assert child.request.budget == Budget(ratio=0.25)
    assert child.wish(None) == Wish(Budget(ratio=0.25))


def test_the_proof_and_the_start_up_table_name_the_freeze(llama, frozen):
    served = serve(llama, frozen)
    state = proof(served)
    assert (state["retention"], state["prompt_budget"]) == ("paper", "64 tokens")
    served.arena_bytes = 1 << 20
    table = startup_table(served, 4096)
    assert "frozen MiB" in table
    line = "freeze: rule paper, 8 heads of 4 layers, to 64 tokens; "
    assert any(row.startswith(line) for row in table.splitlines())
    alone = serve(llama, frozen, None)
    alone.arena_bytes = 1 << 20
    assert proof(alone)["prompt_budget"] is None
    assert "only where a request asks for it" in startup_table(alone, 4096)
    assert "frozen MiB" not in startup_table(alone, 4096)


def test_the_start_up_table_says_that_tables_are_another_models(gemma, frozen, tmp_path):
    source = load_artifact(frozen)
    served = serve(gemma, str(transfer(source, gemma, tmp_path / "moved")))
    served.arena_bytes = 1 << 20
    line = f"tables transferred from {source.policy_id} ({source.manifest.model.name}) by relative"
    lines = startup_table(served, 4096).splitlines()
    assert any(row.startswith(line) and "not measured" in row for row in lines)


# -- heads that split a budget -------------------------------------------------------------------


@pytest.fixture(params=["full", "windows"])
def mixed(request, llama, tmp_path) -> Serving:
    """Serves 100 tokens of every prompt, split among the heads that have no window."""
    policy = WindowPolicy.full(read_geometry(llama))
    if request.param == "windows":
        policy = policies.mixed(llama, sinks=4, sizes=(64, FULL))
    made = with_tables(llama, tmp_path / "policies", policy, "mix")
    served = serve(llama, made, Budget(tokens=100))
    served.arena_bytes = 1 << 28
    return served


def split(served: Serving, budget: int, prompt: int) -> list[int]:
    """Exact tokens of every head without a window, in order."""
    tables, rule = served.retention, served.retention.rule
    row = literal.nearest_budget(tables.budgets, budget)
    free = np.argwhere(served.policy.windows == FULL)
    shares = [tables.mix.shares[row, layer, head] for layer, head in free]
    return literal.unit_budgets(shares, budget, prompt, rule.sinks + rule.recent)


def test_the_servers_budget_is_split_exactly(mixed):
    assert mixed.kept_tokens(100) is None
    for prompt in (101, 160, 512):
        kept = mixed.kept_tokens(prompt).tolist()
        assert kept == split(mixed, 100, prompt)
        assert sum(kept) == 100 * len(kept) and len(set(kept)) > 1


def test_a_server_without_a_split_or_a_budget_says_so(llama, frozen):
    assert serve(llama, frozen).kept_tokens(64) is None
    assert serve(llama, frozen).kept_tokens(65) == 64
    assert serve(llama, frozen, None).kept_tokens(65) is None


def test_the_start_up_table_and_the_sizes_count_each_heads_own_pages(mixed):
    kept, page = split(mixed, 100, 512), mixed.geometry.bytes_per_token() * 16 // 8
    full = sum(-(-n // 16) for n in kept)
    assert full != 7 * len(kept), "an even split would take as many pages"
    windowed = sum(len(k.units) * held_pages(k, 512) for k in mixed.levels if not k.is_full)
    rows = [line.split("│") for line in startup_table(mixed, 4096).splitlines()]
    (row,) = ([cell.strip() for cell in cells] for cells in rows if cells[1:] and "512" in cells[1])
    assert row[-2] == str(mixed.arena_bytes // ((full + windowed) * page))
    pages = dense_tokens(mixed, 16) // 16 * 8
    wanted = HEADROOM * (pages * 512 // (full + windowed))
    assert logical_tokens(mixed, 16) == wanted // 16 * 16


def test_the_start_up_table_tells_how_uneven_the_split_is(mixed):
    row = literal.nearest_budget(mixed.retention.budgets, 100)
    shares = mixed.retention.mix.shares[row][mixed.policy.windows == FULL]
    least, most = shares.min() / shares.mean(), shares.max() / shares.mean()
    lines = startup_table(mixed, 4096).splitlines()
    assert f"mix: heads keep {least:.2g}x to {most:.2g}x of the budget" in lines
    assert any(line.startswith("freeze: rule mix, ") for line in lines)

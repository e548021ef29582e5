"""A live server that freezes prompts, beside the reference of what it must keep and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.retention import RetentionRule, retention_units
from kvpolicy.windows import WindowPolicy
from loadtest.servers import Completion, Server
from tests.engine_patches import policies
from tests.harness.frozen_reference import FrozenReference

ATOL = 1e-4
POISON = {"RAGGEDKV_POISON_FREED_PAGES": "1"}
LIST_POSITIONS = {"kv_positions": True}


@dataclass
class FrozenServer:
    """``check`` compares an answer's kept set and logprobs with the reference."""

    server: Server
    tokenizer: object
    reference: FrozenReference
    budget: int | None

    def ask(self, prompt: Sequence[int], count: int, **custom) -> Completion:
        return self.server.generate(prompt, count, custom_params=LIST_POSITIONS | custom)

    def ask_many(self, prompts, count: int, **custom) -> list[Completion]:
        return self.server.generate_many(
            prompts, count, concurrency=len(prompts), custom_params=LIST_POSITIONS | custom
        )

    def check(self, prompt, answer: Completion, budget: int | None = None) -> None:
        budget = self.budget if budget is None else budget
        report = answer.meta["raggedkv"]
        assert report["prompt_tokens"] == len(prompt) and report["budget"] == budget
        if budget is None or budget >= len(prompt):
            assert not report["frozen"]
            self.check_unfrozen(prompt, answer)
            return
        wanted = self.reference.kept(prompt, budget)
        assert report["frozen"] and report["positions"] == wanted.kept
        counts = [len(kept) for kept in wanted.kept]
        if self.reference.tables.rule.mixes:
            assert sum(counts) == budget * len(counts)
        else:
            assert max(counts) <= budget
        if self.reference.tables.rule.gate == "table":
            assert report["risk_bin"] == list(wanted.bins)
        self.reference.check_frozen(
            prompt, answer.output_ids, answer.logprobs, report["positions"], atol=ATOL
        )

    def check_unfrozen(self, prompt, answer: Completion) -> None:
        assert not answer.meta["raggedkv"]["frozen"]
        self.reference.check_greedy(prompt, answer.output_ids, answer.logprobs, atol=ATOL)

    def state(self) -> dict:
        return self.server.info()["internal_states"][0]["raggedkv"]

    def check_nothing_is_left(self) -> None:
        self.server.wait_idle()
        state = self.state()
        assert state["pages"]["pinned"] == 0 and state["requests"] == 0
        assert state["counters"]["audits"] > 0 and state["counters"]["audit_faults"] == 0
        self.server.flush_cache()
        pages = self.state()["pages"]
        assert pages["free"] == pages["capacity"]


def start(
    server_factory,
    tokenizer,
    root: Path,
    model: Path,
    policy: WindowPolicy,
    rule: RetentionRule,
    budget: int | None,
    *flags: str,
    env: dict[str, str] | None = None,
) -> FrozenServer:
    """Serve ``policy`` with random tables of ``rule``; every longer prompt keeps ``budget``.

    Without a budget prompts are frozen only where a request asks for it.
    """
    tables = policies.tables(model, rule)
    folder = policies.write(policy, root, name=rule.name, retention=tables)
    flags = ("--kv-policy", str(folder), *flags)
    if budget is not None:
        flags += ("--kv-budget-tokens", str(budget))
    server = server_factory(model, *flags, env=POISON | (env or {}))
    _, layers, heads = retention_units(policy)
    reference = FrozenReference(model, policy.windows, policy.sinks, (layers, heads), tables)
    return FrozenServer(server, tokenizer(model), reference, budget)

"""What the demo sends, to which servers, and how many requests each should hold at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpolicy.geometry import ModelGeometry, read_geometry
from kvpolicy.plan import parse_bytes
from kvpolicy.residency import (
    ceil_div,
    frozen_pages,
    held_pages,
    peak_bytes,
    peak_length,
)
from kvpolicy.store import resolve
from kvpolicy.windows import Level, WindowPolicy
from loadtest.errors import UserError, in_range, naming_flag
from loadtest.model_specs import SPECS
from loadtest.models import ensure_model
from loadtest.servers import PAGE_SIZE

DTYPE_BYTES = 4  # float32: logprobs are then comparable to a reference within 1e-4
MAX_REQUESTS = 64
FREEZE_POLICY = "head-uniform@483eaba3df94"
"""What ships to freeze the default model's prompts with; one version, as the demo shows."""


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``prompt_tokens``, each answered with ``output_tokens`` greedily.

    ``kv_bytes`` of K and V is what every server gets; ``checks`` answers are compared with the
    reference.
    """

    model: Path
    geometry: ModelGeometry
    kv_bytes: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    checks: int

    @property
    def final_tokens(self) -> int:
        """Tokens of one request when it ends."""
        return self.prompt_tokens + self.output_tokens

    def prompts(self) -> list[list[int]]:
        """Distinct prompts of token ids: excerpts of Python's standard library."""
        from transformers import AutoTokenizer  # slow to import, and only needed here

        from loadtest import corpora

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        return corpora.prompts(tokenizer, [self.prompt_tokens] * self.requests)


@dataclass(frozen=True)
class Contender:
    """One server of the comparison.

    ``name`` names its log as well; ``windows`` is the policy it must answer by: None for the
    unchanged model. ``predicted`` is how many requests fit at once, by ``kvpolicy``'s formulas.
    ``budget`` is how many tokens of its prompt a request decodes from; None for all.
    ``request_bytes`` of K and V is the most a request holds, once frozen where there is a budget.
    """

    name: str
    policy_id: str | None
    flags: tuple[str, ...]
    windows: WindowPolicy | None
    request_bytes: int
    predicted: int
    budget: int | None = None

    @property
    def log_name(self) -> str:
        """``name`` as a part of a file's name."""
        return self.name.lower().replace(" ", "-")


def make_workload(
    model: str, kv_bytes: str, requests: int, prompt_tokens: int, output_tokens: int, checks: int
) -> Workload:
    """Check everything that can be checked before a server starts.

    Args:
        model: a demo model's name (fetched if absent) or a Hugging Face folder.
        kv_bytes: such as ``330MB``.
        checks: answers to compare with the reference; more than ``requests`` means all.

    Raises:
        UserError: a value out of range, naming the flag and what is accepted.
    """
    in_range("--requests", requests, 1, MAX_REQUESTS)
    in_range("--prompt-tokens", prompt_tokens, 1)
    in_range("--output-tokens", output_tokens, 1)
    in_range("--checks", checks, 0)
    size = naming_flag("--kv-bytes", parse_bytes, kv_bytes)
    folder = model_folder(model)
    geometry = naming_flag("--model", read_geometry, folder).with_kv_dtype_bytes(DTYPE_BYTES)
    work = Workload(
        folder, geometry, size, requests, prompt_tokens, output_tokens, min(checks, requests)
    )
    if work.final_tokens > geometry.max_context:
        raise UserError(
            f"--prompt-tokens plus --output-tokens is {work.final_tokens}; "
            f"this model takes at most {geometry.max_context}"
        )
    return work


def stock(work: Workload) -> Contender:
    """SGLang as it is, with a dense cache of the same bytes. Raises UserError if none fits."""
    request_bytes = _request_bytes(WindowPolicy.full(work.geometry), work)
    if work.kv_bytes < request_bytes:
        raise UserError(
            f"--kv-bytes: {work.kv_bytes} bytes do not hold one request of {work.final_tokens} "
            f"tokens, which takes {request_bytes} in stock SGLang"
        )
    tokens = work.kv_bytes // work.geometry.bytes_per_token() // PAGE_SIZE * PAGE_SIZE
    flags = ("--attention-backend", "torch_native", "--max-total-tokens", str(tokens))
    predicted = work.kv_bytes // request_bytes
    return Contender("stock SGLang", None, flags, None, request_bytes, predicted)


def ragged(work: Workload, policy: str, name: str = "RaggedKV") -> Contender:
    """SGLang with ``policy`` and the same bytes. Raises UserError if there is no such policy."""
    resolved = naming_flag("--policy", resolve, policy, work.geometry)
    request_bytes = _request_bytes(resolved.policy, work)
    flags = ("--kv-policy", policy, "--kv-arena-bytes", str(work.kv_bytes))
    predicted = work.kv_bytes // request_bytes
    return Contender(name, resolved.policy_id, flags, resolved.policy, request_bytes, predicted)


def frozen(work: Workload, policy: str, budget: int, flag: str) -> Contender:
    """SGLang with ``policy``'s retention: every prompt is frozen to ``budget`` tokens.

    Raises UserError, naming ``flag`` for the policy, if there is none or it cannot freeze.
    """
    in_range("--budget-tokens", budget, 1, work.prompt_tokens - 1)
    resolved = naming_flag(flag, resolve, policy, work.geometry)
    if resolved.retention is None:
        raise UserError(f"{flag}: policy {resolved.policy_id} has no retention tables to freeze by")
    flags = ("--kv-policy", policy, "--kv-arena-bytes", str(work.kv_bytes))
    flags += ("--kv-budget-tokens", str(budget))
    page = page_bytes(work.geometry)
    reserved = _Reserved.of(resolved.policy.levels(), work, budget)
    return Contender(
        "RaggedKV frozen", resolved.policy_id, flags, resolved.policy, reserved.decoding * page,
        reserved.at_once(work.kv_bytes // page - 1), budget,
    )  # fmt: skip


@dataclass(frozen=True)
class _Reserved:
    """Pages that admission reserves: for a new request, and for one whose prompt is frozen."""

    new: int
    decoding: int

    @classmethod
    def of(cls, levels: tuple[Level, ...], work: Workload, budget: int) -> _Reserved:
        """A new request needs its whole prompt and, at the freeze, the kept copy beside it."""
        prompt, top = work.prompt_tokens, peak_length(work.final_tokens, PAGE_SIZE)
        whole = max(ceil_div(prompt, PAGE_SIZE), ceil_div(top, PAGE_SIZE) - prompt // PAGE_SIZE)
        new = sum(
            len(level.units)
            * (
                ceil_div(budget, PAGE_SIZE) + whole
                if level.is_full
                else held_pages(level, top, PAGE_SIZE)
            )
            for level in levels
        )
        return cls(new, frozen_pages(levels, prompt, max(0, top - prompt), budget, PAGE_SIZE))

    def at_once(self, pages: int) -> int:
        """Requests that decode together: the last one still had to fit as a new one."""
        return 0 if pages < self.new else 1 + (pages - self.new) // self.decoding


def page_bytes(geometry: ModelGeometry) -> int:
    """Bytes of one page: K and V of 16 tokens of one KV head."""
    return geometry.bytes_per_token() * PAGE_SIZE // geometry.num_units


def _request_bytes(policy: WindowPolicy, work: Workload) -> int:
    return peak_bytes(policy.levels(), work.geometry, work.final_tokens, PAGE_SIZE)


def model_folder(model: str) -> Path:
    """Folder of a demo model (fetched if absent) or of a path. Raises UserError."""
    if model in SPECS:
        return ensure_model(model)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model {model!r} is neither a demo model ({', '.join(SPECS)}) nor a folder with "
            "a config.json"
        )
    return folder.resolve()

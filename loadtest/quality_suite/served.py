"""Arms behind an API: a policy on a server started for it, or any server at a URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.errors import KvPolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.residency import peak_bytes, residency
from kvpolicy.retention import RULES
from kvpolicy.store import ResolvedPolicy, resolve
from kvpolicy.windows import WindowPolicy
from loadtest.demo_measure import one_line
from loadtest.errors import UserError, naming_flag
from loadtest.quality_setup import CHUNK
from loadtest.quality_suite.judging import bos, encoder
from loadtest.quality_suite.openai_api import Prompt, address, ask_all
from loadtest.quality_suite.prompts import Asked
from loadtest.quality_suite.results import ServedCase
from loadtest.quality_suite.suites import AWARE, TEXT
from loadtest.servers import PAGE_SIZE, Server, ServerError

SPARE_TOKENS = 4  # past the answer's own: a completion may cut words otherwise
URL_ARM = "served"
Add = Callable[[ServedCase], None]


@dataclass(frozen=True)
class ServedArm:
    """``name`` of the arm; ``url`` of a server that runs, or ``policy`` of one to start with
    ``flags``."""

    name: str
    url: str = ""
    policy: ResolvedPolicy | None = None
    flags: tuple[str, ...] = ()

    @property
    def log_name(self) -> str:
        """File of a started server's log."""
        return f"{self.name.strip('/').replace('/', '-')}.log"

    @property
    def title(self) -> str:
        """What it is."""
        if self.policy is None:
            return self.url
        point = f", point {self.policy.point}" if self.policy.point else ""
        return f"{self.policy.policy_id}{point}, served"

    def kept(self, geometry: ModelGeometry, length: int) -> float | None:
        """Share of ``length`` tokens that global layers keep; None if only a URL is known."""
        return None if self.policy is None else residency(self.policy.policy, geometry, length)


def policy_arm(spec: str, geometry: ModelGeometry) -> ServedArm:
    """The arm of a built-in policy, an artifact, or ``ARTIFACT:POINT``. Raises UserError."""
    try:
        return _policy_arm(spec, spec, None, geometry)
    except KvPolicyError as error:
        base, mark, point = spec.rpartition(":")
        if not mark:
            raise UserError(f"--policies {spec}: {error}; or a rule: {', '.join(RULES)}") from error
    return naming_flag(f"--policies {spec}", _policy_arm, spec, base, point, geometry)


def _policy_arm(name: str, spec: str, point: str | None, geometry: ModelGeometry) -> ServedArm:
    found = resolve(spec, geometry, point=point)
    where = spec if found.artifact is None else str(found.artifact.path)
    flags = ("--kv-policy", where, *(("--kv-policy-point", point) if point else ()))
    return ServedArm(name, policy=found, flags=flags)


def url_arm(text: str) -> ServedArm:
    """``URL`` or ``NAME=URL``. Raises UserError."""
    name, mark, url = text.partition("=")
    if not mark or "/" in name:
        name, url = URL_ARM, text
    if not name:
        raise UserError(f"--url {text!r} is not accepted: give URL or NAME=URL")
    return ServedArm(name, address(url))


def asked_of_servers(asked: Sequence[Asked]) -> list[Asked]:
    """What a server can be asked: a question at its prompt's end.

    Text without a question has no answer to compare, and a question after the compression is not
    the API's to say.
    """
    return [one for one in asked if one.protocol == AWARE and one.item.task != TEXT]


@dataclass(frozen=True)
class Serving:
    """How arms are asked: ``threads`` of a started server, requests at once, its log's folder."""

    model: Path
    geometry: ModelGeometry
    tokenizer: object
    threads: int
    concurrency: int
    logs: Path

    def run(self, arm: ServedArm, asked: Sequence[Asked], add: Add) -> str:
        """Ask everything; ``add`` gets each answer's score. Returns ``ids`` or ``text``.

        Side effects: a server process for a policy, ended on every way out. Raises UserError if it
        does not start, dies, or nobody answers at a URL.
        """
        prompts = [prompt_of(one, self.tokenizer) for one in asked]
        with self._url(arm, prompts) as url:
            began = time.monotonic()

            def done(index: int, text: str) -> None:
                seconds = time.monotonic() - began
                add(scored(arm.name, asked[index], text, self.tokenizer, seconds))

            return ask_all(url, prompts, self.concurrency, done)

    @contextmanager
    def _url(self, arm: ServedArm, prompts: Sequence[Prompt]) -> Iterator[str]:
        """Where the arm answers, its server started if it has none. Errors name the arm."""
        if arm.policy is None:
            try:
                yield arm.url
            except UserError as error:
                raise UserError(f"{arm.name}: {error}") from error
            return
        server = Server(
            self.model, *arm.flags, *self._flags(prompts), threads=self.threads,
            log=self.logs / arm.log_name,
        )  # fmt: skip
        try:
            with server:
                yield server.url
        except ServerError as error:
            raise UserError(one_line(arm.name, server, error)) from error
        except UserError as error:
            told = ServerError(str(error))
            raise UserError(one_line(arm.name, server, told)) from error

    def _flags(self, prompts: Sequence[Prompt]) -> list[str]:
        """Room for every concurrent request and one more, were each held at full length."""
        longest = max(len(prompt.ids) + prompt.max_tokens for prompt in prompts)
        dense = WindowPolicy.full(self.geometry).levels()
        size = (self.concurrency + 1) * peak_bytes(dense, self.geometry, longest, PAGE_SIZE)
        return ["--kv-arena-bytes", str(size), "--chunked-prefill-size", str(CHUNK)]


def prompt_of(asked: Asked, tokenizer) -> Prompt:
    """What a server is sent: ids, and text without the <bos> that a server's tokenizer adds."""
    item = asked.item
    ids, start = [*item.context, *item.question], bos(tokenizer)
    own = ids[len(start) :] if ids[: len(start)] == start else ids
    text = tokenizer.decode(own, skip_special_tokens=False)
    return Prompt(tuple(ids), text, len(item.answer) + SPARE_TOKENS)


def scored(arm: str, asked: Asked, text: str, tokenizer, seconds: float) -> ServedCase:
    """The score of one completion.

    Tokens are compared place by place with the answer's, both as the model's tokenizer cuts their
    text; unlike the judge's, what follows a wrong token is not given the right one before it.
    """
    item, encode = asked.item, encoder(tokenizer)
    expected = tokenizer.decode(list(item.answer))
    if expected[:1].isspace() and not text[:1].isspace():
        text = expected[:1] + text  # some servers strip it
    wanted, given = encode(expected), encode(text)
    case = item.case(asked.protocol)
    first = case.scored.start - case.start  # the judge leaves out what the prefill predicts
    places = range(first, len(wanted))
    right = [i < len(given) and given[i] == wanted[i] for i in places]
    hits = [answer.lower() in text.lower() for answer in asked.wanted]
    return ServedCase(
        arm, item.task, asked.protocol, item.length, item.index, item.corpus, item.depth,
        item.digest, len(item.context) + len(item.question), round(seconds, 3), text,
        accuracy=sum(right) / max(1, len(right)),
        exact=given[: len(wanted)] == wanted,
        found=sum(hits) / len(hits) if asked.all_of else float(any(hits)),
    )  # fmt: skip

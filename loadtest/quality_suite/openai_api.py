"""Greedy completions of any server that speaks OpenAI's ``/v1/completions``.

Only fields of OpenAI's own API are sent: model, prompt, max_tokens, temperature. The prompt goes as
token ids, which leaves nothing to the server's tokenizer; a server that refuses them gets text from
then on, without <bos>, which servers put there themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from loadtest.errors import UserError

TIMEOUT = 600.0  # seconds for one completion
CONNECT_TIMEOUT = 10.0
SHOWN = 200  # characters of a refusal


@dataclass(frozen=True)
class Prompt:
    """One prompt both ways, ``ids`` with <bos>, ``text`` without it, and its longest answer."""

    ids: tuple[int, ...]
    text: str
    max_tokens: int


def address(url: str) -> str:
    """``url`` without ``/v1`` at its end. Raises UserError if it is no http address."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"--url {url!r} is not accepted: give http://HOST:PORT or https://HOST")
    return url.rstrip("/").removesuffix("/v1")


def ask_all(
    url: str, prompts: Sequence[Prompt], concurrency: int, done: Callable[[int, str], None]
) -> str:
    """Complete every prompt, ``concurrency`` at once; ``done(index, text)`` as answers come in.

    Returns how prompts were sent: ``ids`` or ``text``. An interrupt, or the first failure, drops
    all requests in flight. Raises UserError.
    """
    return asyncio.run(_ask_all(url, prompts, concurrency, done))


def reach(url: str) -> str:
    """Name of the first model at ``url``. Raises UserError if nobody answers there."""

    async def ask() -> str:
        async with _Api(url, 1) as api:
            return await api.model()

    return asyncio.run(ask())


async def _ask_all(
    url: str, prompts: Sequence[Prompt], concurrency: int, done: Callable[[int, str], None]
) -> str:
    async with _Api(url, concurrency) as api:

        async def one(index: int) -> None:
            done(index, await api.complete(prompts[index]))

        if prompts:
            await one(0)  # decides for all whether ids are taken
        tasks = [asyncio.create_task(one(i)) for i in range(1, len(prompts))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return api.form


class _Api:
    """The API under ``url`` for at most ``concurrency`` requests at once."""

    def __init__(self, url: str, concurrency: int) -> None:
        self.url, self.form = address(url), "ids"
        self._name: str | None = None
        self._asked = False
        self._slots = asyncio.Semaphore(concurrency)
        timeout = httpx.Timeout(TIMEOUT, connect=CONNECT_TIMEOUT)
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)

    async def __aenter__(self) -> _Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The first model that ``/v1/models`` names; ``default``, which many take, without."""
        if self._name is None:
            answer = await self._send("GET", "/v1/models")
            try:
                self._name = str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                self._name = "default"
        return self._name

    async def complete(self, prompt: Prompt) -> str:
        """The greedy continuation's text. Raises UserError if there is none."""
        async with self._slots:
            answer = await self._post(prompt)
            if answer.is_error and not self._asked:
                self.form = "text"
                answer = await self._post(prompt)
        self._asked = True
        if answer.is_error:
            reason = " ".join(answer.text[:SHOWN].split())
            raise UserError(f"{self.url}/v1/completions answered {answer.status_code}: {reason}")
        try:
            text = answer.json()["choices"][0]["text"]
        except (ValueError, LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"{self.url}/v1/completions gave no choices[0].text")
        return text

    async def _post(self, prompt: Prompt) -> httpx.Response:
        body = {"model": await self.model(), "temperature": 0, "max_tokens": prompt.max_tokens}
        body["prompt"] = list(prompt.ids) if self.form == "ids" else prompt.text
        return await self._send("POST", "/v1/completions", json=body)

    async def _send(self, method: str, path: str, **sent) -> httpx.Response:
        try:
            return await self._http.request(method, path, **sent)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.url} does not answer: {method} {path}: {reason}") from error

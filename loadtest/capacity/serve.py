"""The servers under test: started here and ended again, or already running somewhere."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpolicy.geometry import ModelGeometry
from kvpolicy.windows import FULL, Level, WindowPolicy
from loadtest.capacity.predict import Store, dense_store
from loadtest.capacity.sides import Role, Side
from loadtest.demo_measure import RETRACTIONS, one_line
from loadtest.errors import UserError
from loadtest.servers import Client, Server, ServerError

PROBE_SECONDS = 10.0
EXIT_SECONDS = 2.0
"""How long a server that failed may take to exit: its connections close before the process ends."""


class Started(Server):
    """A server that was started here, and that remembers how it ended if nobody ended it.

    Attributes:
        died_with: its exit status then; None while it runs, and if it was told to end.
    """

    died_with: int | None = None
    _told_to_end = False

    def kill(self) -> None:
        """As ``Server.kill``."""
        if not self._told_to_end:
            self._told_to_end, self.died_with = True, self.returncode
        super().kill()


class Remote(Client):
    """A server that runs already: it can be asked, but neither watched from inside nor ended."""

    start_seconds: float | None = None
    returncode: int | None = None

    def cpu_seconds(self) -> float:
        """0: its processes are out of reach."""
        return 0.0

    def memory_bytes(self) -> int | None:
        """None: its processes are out of reach."""
        return None

    def kill(self) -> None:
        """Abort every request, so that no thread waits for an answer."""
        with contextlib.suppress(ServerError):
            self.abort()


def started(
    side: Side, model: Path, log: Path, port: int | None, threads: int
) -> contextlib.AbstractContextManager[Server | Remote]:
    """The side's server, ended on the way out if it was started here.

    Side effects: a process, and ``log``. Entering raises UserError with its last lines if it does
    not start; so does leaving with a ServerError.
    """
    if side.url is not None:
        return _connected(side.url)
    flags = (*side.flags, "--enable-metrics")
    return _launched(side, Started(model, *flags, log=log, port=port, threads=threads))


@contextlib.contextmanager
def _launched(side: Side, server: Started) -> Iterator[Server]:
    try:
        with server:
            try:
                yield server
            except ServerError:
                server.exited_within(EXIT_SECONDS)
                raise
    except ServerError as error:
        if server.died_with is not None:
            died = f"the server exited with {server.died_with}"
            error = ServerError(str(error), summary=died)
        raise UserError(one_line(side.name, server, error)) from error


@contextlib.contextmanager
def _connected(url: str) -> Iterator[Remote]:
    remote = Remote(url)
    try:
        yield remote
    except ServerError as error:
        raise UserError(f"{url}: {error.summary}") from error
    finally:
        remote.close()


def check_port(port: int) -> None:
    """Raise UserError unless a server can listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "0 to 65535 are ports"
            raise UserError(f"--port {port} cannot be used: {reason}; give another") from error


def remote_side(flag: str, url: str, base: bool, geometry: ModelGeometry) -> Side:
    """What runs at ``url``, asked there. Raises UserError if it is no SGLang server."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{flag} {url!r} is no address: give http://HOST:PORT")
    client = Client(url.rstrip("/"))
    try:
        client.loads()
        info = client.info()
        state = info["internal_states"][0]
        ragged = state.get("raggedkv")
        store = _told_store(info, ragged, geometry)
    except (ServerError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        told = getattr(error, "summary", None) or f"{type(error).__name__} {error}"
        raise UserError(f"{flag} {url} does not answer as an SGLang server: {told}") from error
    finally:
        client.close()
    if ragged is None:
        role = Role.STOCK if base else Role.OTHER
        return Side(role, f"the server at {url}", store, url=url.rstrip("/"))
    role = Role.FROZEN if store.kept is not None else Role.WINDOWS
    policy, point = ragged["policy"], ragged.get("point")
    what = f"{policy} {point or ''}".strip() + f" at {url}"
    return Side(
        Role.BASE if base else role, what, store, policy_id=policy, point=point,
        url=url.rstrip("/"),
    )  # fmt: skip


def _told_store(
    info: dict[str, Any], ragged: dict[str, Any] | None, geometry: ModelGeometry
) -> Store:
    """Predictions from what a server tells of its memory."""
    if ragged is None:
        tokens = int(info["max_total_num_tokens"])
        return dense_store(WindowPolicy.full(geometry).levels(), geometry, tokens)
    levels, first = [], 0
    for index, level in enumerate(ragged["levels"]):
        window = FULL if level["window"] == "full" else int(level["window"])
        units = tuple(range(first, first + int(level["units"])))
        levels.append(Level(index, window, int(level["sinks"]), units))
        first += int(level["units"])
    kept = _told_budget(ragged.get("prompt_budget"))
    capacity = int(ragged["pages"]["capacity"])
    return Store(tuple(levels), capacity, int(ragged["page_bytes"]), kept)


def _told_budget(text: str | None):
    """Kept tokens by ``prompt_budget``, such as ``256 tokens``: the same for every head."""
    if text is None or not text.endswith(" tokens"):
        return None
    budget = int(text.removesuffix(" tokens"))
    return lambda prompt: None if budget >= prompt else budget


def ragged_state(client: Client) -> dict[str, Any] | None:
    """What our engine tells of itself; None for stock SGLang."""
    states = client.info().get("internal_states") or [{}]
    return states[0].get("raggedkv")


def peak_bytes(client: Client) -> int | None:
    """Bytes of K and V that running requests ever held; None for stock SGLang."""
    state = ragged_state(client)
    return None if state is None else state["pages"]["peak_pinned"] * state["page_bytes"]


def grown_peak(before: int | None, after: int | None, seen: int) -> int:
    """A stage's own peak: the server's if the stage raised it, else the most that was ``seen``."""
    if before is None or after is None or after <= before:
        return seen
    return after


def retractions(client: Client) -> int | None:
    """Requests retracted so far; None if the server has no metrics."""
    try:
        samples = client.metrics()
    except ServerError:
        return None
    return int(sum(sample.value for sample in samples.get(RETRACTIONS, [])))


def since(before: int | None, after: int | None) -> int | None:
    """``after - before``; None if either is not known."""
    return None if before is None or after is None else after - before


def alive(server: Server | Remote) -> bool:
    """True if the server still answers: what it said was a refusal then, not its death."""
    if server.returncode is not None:
        return False
    try:
        server.loads()
    except ServerError:
        return False
    return server.returncode is None

"""Look at a server while it works: requests, KV bytes and memory at their peaks."""

from __future__ import annotations

import threading
import time

from kvpolicy.geometry import ModelGeometry
from kvpolicy.residency import ceil_div
from loadtest.capacity.predict import page_bytes
from loadtest.capacity.serve import Remote, ragged_state
from loadtest.servers import PAGE_SIZE, Server, ServerError

POLL_SECONDS = 0.25
SLOW_EVERY = 4
"""Of so many looks one also asks the scheduler for its pages, and the system for memory."""
JOIN_SECONDS = 5.0


class Watch:
    """``with Watch(server, geometry) as seen``: peaks so far, looked at in a thread of its own.

    Attributes:
        running, waiting: requests, as last reported; ``peak_running`` the most that ran.
        kv_bytes: of K and V that running requests held, at most.
        memory_bytes: of the server's processes at most; None where they are out of reach.
    """

    def __init__(self, server: Server | Remote, geometry: ModelGeometry) -> None:
        self._server = server
        self._token_page = page_bytes(geometry) * geometry.num_units
        self._ragged = ragged_state(server) is not None
        self.running = self.waiting = self.peak_running = self.kv_bytes = 0
        self.memory_bytes: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        looks = 0
        while not self._stop.is_set():
            try:
                self._look(slow=looks % SLOW_EVERY == 0)
            except (ServerError, RuntimeError):
                time.sleep(POLL_SECONDS)  # it died, or was closed: whoever drives it finds out
            looks += 1
            self._stop.wait(POLL_SECONDS)

    def _look(self, slow: bool) -> None:
        load = self._server.loads()
        self.running, self.waiting = load["num_running_reqs"], load["num_waiting_reqs"]
        self.peak_running = max(self.peak_running, self.running)
        if not self._ragged:
            self._note(ceil_div(load.get("num_used_tokens", 0), PAGE_SIZE) * self._token_page)
        if slow:
            self._look_inside()

    def _look_inside(self) -> None:
        """What asks the scheduler, or reads the memory of every process."""
        state = ragged_state(self._server)
        if state is not None:
            self._note(state["pages"]["pinned"] * state["page_bytes"])
        memory = self._server.memory_bytes()
        if memory is not None:
            self.memory_bytes = max(self.memory_bytes or 0, memory)

    def _note(self, held: int) -> None:
        self.kv_bytes = max(self.kv_bytes, held)

"""Stands in for ``sglang.launch_server`` in the tests of max-batch and max-context.

``python capacity_server.py PORT JSON``: see ``Behaviour``. Token ids are bytes; a prompt comes as
text or as ids, and a needle in it is answered if the prompt is short enough.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NEEDLE = re.compile(r"the secret code of the (\w+) is (\d+)\.")
PAGE_BYTES, PAGES_A_REQUEST = 1024, 10
DIES = "MemoryError: no more pages"


@dataclass(frozen=True)
class Behaviour:
    """What the server does.

    ``slots`` requests run at once; where more than ``safe`` do, one is retracted. Prompts longer
    than ``limit`` are refused, or ``stuck``: admitted never. Needles are found in prompts up to
    ``understands`` tokens. ``dies_after`` so many requests it ends; with ``hangs`` it never
    answers. ``stops`` cuts each answer short. ``ragged`` tells of pages as our engine does.
    """

    slots: int = 2
    safe: int = 99
    limit: int = 100_000
    stuck: bool = False
    understands: int = 100_000
    dies_after: int | None = None
    hangs: bool = False
    stops: bool = False
    ragged: bool = False
    token_seconds: float = 0.04
    prefill_seconds: float = 0.05
    unfit: bool = field(default=False)

    def words(self) -> str:
        """The argument that makes a server behave so."""
        return json.dumps(asdict(self))


class Scheduler:
    """Which requests run, in order of arrival, and which were aborted."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.running: list[str] = []
        self.aborted: set[str] = set()
        self.changed = threading.Condition()
        self.waiting = self.retracted = self.peak = self.begun = 0

    def start(self, rid: str, fits: bool) -> bool:
        """Wait for a slot; False if the request was aborted first."""
        with self.changed:
            self.waiting += 1
            self.changed.wait_for(lambda: self._free(fits) or rid in self.aborted)
            self.waiting -= 1
            if rid in self.aborted:
                return False
            self.running.append(rid)
            self.peak = max(self.peak, len(self.running))
            self.retracted += len(self.running) > self.behaviour.safe
            return True

    def _free(self, fits: bool) -> bool:
        return fits and len(self.running) < self.behaviour.slots

    def finish(self, rid: str) -> None:
        with self.changed:
            self.running.remove(rid)
            self.changed.notify_all()

    def abort(self, rid: str | None) -> None:
        with self.changed:
            self.aborted.update([*self.running] if rid is None else [rid])
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """One request a thread."""

    behaviour: Behaviour
    scheduler: Scheduler

    def do_GET(self) -> None:
        load = {"num_running_reqs": len(self.scheduler.running), "num_used_tokens": 160}
        load["num_waiting_reqs"] = self.scheduler.waiting
        retracted = f'sglang:num_retracted_requests_total{{a="b"}} {self.scheduler.retracted}.0\n'
        answers = {
            "/health": "",
            "/v1/loads": json.dumps({"loads": [load]}),
            "/server_info": json.dumps(self._info()),
            "/metrics": retracted,
        }
        known = self.path in answers and not (self.behaviour.unfit and "loads" in self.path)
        self._answer(answers[self.path] if known else "no such page", 200 if known else 404)

    def _info(self) -> dict:
        info = {"max_total_num_tokens": 4096, "internal_states": [{}]}
        if self.behaviour.ragged:
            scheduler = self.scheduler
            pages = {"pinned": PAGES_A_REQUEST * len(scheduler.running), "capacity": 2048}
            pages["peak_pinned"] = PAGES_A_REQUEST * scheduler.peak
            levels = [{"window": "full", "sinks": 0, "units": 8}]
            state = {"pages": pages, "page_bytes": PAGE_BYTES, "levels": levels, "policy": "it@1"}
            info["internal_states"] = [{"raggedkv": state | {"prompt_budget": None}}]
        return info

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/flush_cache"):
            return self._answer("")
        body = json.loads(body)
        if self.path == "/abort_request":
            self.scheduler.abort(None if body.get("abort_all") else body["rid"])
            return self._answer("")
        self.scheduler.begun += 1
        most = self.behaviour.dies_after
        if most is not None and self.scheduler.begun > most:
            print(DIES, flush=True)
            os._exit(7)
        if self.behaviour.hangs:
            time.sleep(600)
        if self.path == "/v1/completions":
            return self._complete(body)
        assert self.path == "/generate"
        return self._generate(body)

    def _complete(self, body: dict) -> None:
        assert body["temperature"] == 0 and body["max_tokens"] == 12
        text = bytes(body["prompt"]).decode(errors="replace")
        choice = {"token_ids": [7], "text": self._say(text), "finish_reason": "length"}
        self._answer(json.dumps({"choices": [choice | {"logprobs": None}], "usage": {}}))

    def _say(self, prompt: str) -> str:
        told = NEEDLE.search(prompt)
        known = told and len(prompt.encode()) <= self.behaviour.understands
        return f" {told[2]}." if known else " no idea"

    def _generate(self, body: dict) -> None:
        text = body.get("text") or bytes(body["input_ids"]).decode(errors="replace")
        length = len(body["text"].encode()) if "text" in body else len(body["input_ids"])
        fits = length <= self.behaviour.limit
        if not fits and not self.behaviour.stuck:
            return self._answer(json.dumps({"error": f"{length} tokens exceed the limit"}), 400)
        self.send_response(200)
        self.end_headers()
        rid = body.get("rid") or f"alone-{threading.get_ident()}"
        if not self.scheduler.start(rid, fits):
            ended = {"finish_reason": {"type": "abort"}, "id": rid}
            return self._event({"output_ids": [], "text": "", "meta_info": ended})
        time.sleep(self.behaviour.prefill_seconds)
        self._tokens(body["sampling_params"]["max_new_tokens"], text, length)
        return self.scheduler.finish(rid)

    def _tokens(self, count: int, prompt: str, length: int) -> None:
        said = self._say(prompt)
        for number in range(1, (count - 1 if self.behaviour.stops else count) + 1):
            meta = {"prompt_tokens": length, "cached_tokens": 0, "completion_tokens": number}
            meta["finish_reason"] = {"type": "length"} if number == count else None
            self._event({"output_ids": [7] * number, "text": said, "meta_info": meta})
            time.sleep(self.behaviour.token_seconds)

    def _event(self, answer: dict) -> None:
        self.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        """Keep stderr for what matters."""


if __name__ == "__main__":
    Handler.behaviour = Behaviour(**json.loads(sys.argv[2]))
    Handler.scheduler = Scheduler(Handler.behaviour)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

"""Stands in for ``sglang.launch_server`` where requests are streamed, withdrawn and frozen.

``python freeze_server.py PORT MODE SLOTS``: SLOTS requests at once, the rest wait. MODE ``stock``
freezes nothing; ``frozen`` does and takes ``FREEZE_SECONDS`` for it; ``warm`` says its prompts were
cached; ``die`` ends on the first request; ``hang`` never answers one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFILL_SECONDS = 0.15
FREEZE_SECONDS = 0.5
TOKEN_SECONDS = 0.1
CACHED = 16


class Scheduler:
    """Which requests run, in order of arrival, and which were aborted."""

    def __init__(self, slots: int) -> None:
        self.slots, self.running, self.aborted = slots, [], set()
        self.changed = threading.Condition()
        self.freezes = self.waiting = 0

    def start(self, rid: str) -> bool:
        """Wait for a slot; False if the request was aborted first."""
        with self.changed:
            free = lambda: len(self.running) < self.slots or rid in self.aborted  # noqa: E731
            self.waiting += 1
            self.changed.wait_for(free)
            self.waiting -= 1
            if rid in self.aborted:
                return False
            self.running.append(rid)
            return True

    def finish(self, rid: str) -> None:
        with self.changed:
            self.running.remove(rid)
            self.changed.notify_all()

    def abort(self, rid: str) -> None:
        with self.changed:
            self.aborted.add(rid)
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """One request a thread."""

    mode = "stock"
    scheduler: Scheduler

    def do_GET(self) -> None:
        running = len(self.scheduler.running)
        load = {"num_running_reqs": running, "num_waiting_reqs": self.scheduler.waiting}
        counters = {"freezes": self.scheduler.freezes, "freeze_prompt_tokens": 100}
        counters["freeze_kept_tokens"] = 25
        state = {"frozen": {"requests": running}, "counters": counters}
        answers = {
            "/health": "",
            "/v1/loads": json.dumps({"loads": [load]}),
            "/server_info": json.dumps({"internal_states": [{"raggedkv": state}]}),
            "/metrics": 'sglang:num_retracted_requests_total{a="b"} 0.0\n',
        }
        self._answer(answers[self.path])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/flush_cache"):
            self._answer("")
        elif self.path == "/abort_request":
            self.scheduler.abort(json.loads(body)["rid"])
            self._answer("")
        else:
            assert self.path == "/generate"
            self._generate(json.loads(body))

    def _generate(self, body: dict) -> None:
        if self.mode == "die":
            print("MemoryError: no more pages", flush=True)
            os._exit(7)
        if self.mode == "hang":
            time.sleep(600)
        assert body["stream"] and not body["return_logprob"]
        self.send_response(200)
        self.end_headers()
        rid, custom = body.get("rid", "alone"), body["sampling_params"].get("custom_params", {})
        if not self.scheduler.start(rid):
            ended = {"finish_reason": {"type": "abort"}, "id": rid}
            self._event({"output_ids": [], "text": "", "meta_info": ended})  # as SGLang does
            return
        freezes = self.mode == "frozen" and custom.get("kv_retention") != "off"
        time.sleep(PREFILL_SECONDS + FREEZE_SECONDS * freezes)
        self.scheduler.freezes += freezes
        meta = {"prompt_tokens": len(body["input_ids"]), "finish_reason": None}
        meta["cached_tokens"] = CACHED if self.mode == "warm" else 0
        meta["raggedkv"] = {"frozen": freezes or self.mode == "warm"}
        for count in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            self._event({"output_ids": [7] * count, "text": "", "meta_info": meta})
            time.sleep(TOKEN_SECONDS)
        self.scheduler.finish(rid)

    def _event(self, answer: dict) -> None:
        self.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        """Keep stderr for what matters."""


if __name__ == "__main__":
    port, Handler.mode = int(sys.argv[1]), sys.argv[2]
    Handler.scheduler = Scheduler(int(sys.argv[3]))
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

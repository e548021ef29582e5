"""Stands in for ``sglang.launch_server``: the HTTP calls that the demo makes, and no model.

``python fake_server.py PORT MODE``: MODE ``answer``; ``refuse`` ends at once with RaggedKV's
line; ``die`` ends on the first completion; ``hang`` never answers one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOTS = 2  # requests at once
TOKENS_EACH = 20
PEAK_PAGES, PAGE_BYTES = 77, 1000
WORK_SECONDS = 0.6  # several polls of the demo
running: list[int] = []
slots = threading.Semaphore(SLOTS)


class Handler(BaseHTTPRequestHandler):
    """One request a thread."""

    mode = "answer"

    def do_GET(self) -> None:
        load = {"num_running_reqs": len(running), "num_waiting_reqs": 0}
        load["num_used_tokens"] = TOKENS_EACH * len(running)
        state = {"pages": {"peak_pinned": PEAK_PAGES}, "page_bytes": PAGE_BYTES}
        state["counters"] = {"freezes": 5, "freeze_prompt_tokens": 20, "freeze_kept_tokens": 5}
        answers = {
            "/health": "",
            "/v1/loads": json.dumps({"loads": [load]}),
            "/server_info": json.dumps({"internal_states": [{"raggedkv": state}]}),
            "/metrics": 'sglang:num_retracted_requests_total{a="b"} 3.0\n',
        }
        self._answer(answers[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.mode == "die":
            print("Traceback ...\nMemoryError: no more pages", flush=True)
            os._exit(7)
        if self.mode == "hang":
            time.sleep(600)
        with slots:
            running.append(1)
            time.sleep(WORK_SECONDS)
            running.pop()
        count = body["max_tokens"]
        assert self.path == "/v1/completions" and body["temperature"] == 0 and body["ignore_eos"]
        choice = {"token_ids": body["prompt"][:count], "text": "x", "finish_reason": "length"}
        choice["logprobs"] = {"token_logprobs": [-1.0] * count}
        self._answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": count}}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        """Keep stderr for what matters."""


if __name__ == "__main__":
    port, Handler.mode = int(sys.argv[1]), sys.argv[2]
    if Handler.mode == "refuse":
        print("INFO chatter\nraggedkv: refusing to start: policy 'x' is damaged", flush=True)
        sys.exit(3)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

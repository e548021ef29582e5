"""Stands in for ``sglang.launch_server`` in the quality tests: a policy, but no model.

``python quality_server.py PORT MODE MODEL POLICY``. A token id is a byte. Every token of a prompt
costs 1 nat plus the share of units that have a window; a needle is answered if at least half of
the units have none. MODE ``answer``; ``die`` ends on the first completion; ``hang`` never answers
one; ``lie`` reports other windows; ``short`` scores one token too few.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvpolicy.geometry import read_geometry
from kvpolicy.store import resolve
from kvpolicy.windows import FULL, WindowPolicy

PEAK_PAGES = 77
NEEDLE = re.compile(r"the secret code of the (\w+) is (\d+)\.")


class Handler(BaseHTTPRequestHandler):
    """One request a thread."""

    mode: str
    policy: WindowPolicy

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._answer("")
        levels = [
            {"window": "full" if k.is_full else k.window, "sinks": k.sinks, "units": len(k.units)}
            for k in self.policy.levels()
        ]
        levels[0]["units"] += self.mode == "lie"
        state = {"pages": {"peak_pinned": PEAK_PAGES}, "levels": levels}
        return self._answer(json.dumps({"internal_states": [{"raggedkv": state}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/generate" and body["sampling_params"]["temperature"] == 0
        if self.mode == "die":
            print("Traceback ...\nMemoryError: no more pages", flush=True)
            os._exit(7)
        if self.mode == "hang":
            time.sleep(600)
        self._answer(json.dumps(self._completion(body)))

    def _completion(self, body: dict) -> dict:
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        meta = {"prompt_tokens": len(ids), "cached_tokens": 0, "finish_reason": {"type": "length"}}
        if body.get("logprob_start_len") == 0:
            rest = [[-1.0 - self._windowed(), token, None] for token in ids[1:]]
            rest = rest[1:] if self.mode == "short" else rest
            meta["input_token_logprobs"] = [[None, ids[0], None], *rest]
            meta["output_token_logprobs"] = [[-1.0, 32, None]] * count
        text = self._say(bytes(token for token in ids if token < 256).decode(errors="replace"))
        output = list(text.ljust(count, "?").encode())[:count]
        return {"output_ids": output, "text": bytes(output).decode(), "meta_info": meta}

    def _windowed(self) -> float:
        return float((self.policy.for_units() != FULL).mean())

    def _say(self, prompt: str) -> str:
        told = NEEDLE.search(prompt)
        return f" {told[2]}." if told and self._windowed() <= 0.5 else " no idea"

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        """Keep stderr for what matters."""


if __name__ == "__main__":
    port, Handler.mode, model, spec = sys.argv[1:]
    Handler.policy = resolve(spec, read_geometry(model)).policy
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()

"""A server of OpenAI's completions that answers by looking back, for the suite's tests.

It finds the prompt's last words earlier in the prompt and goes on as the text did there. As a
script it stands in for ``sglang.launch_server``: ``python suite_server.py PORT MODE MODEL POLICY``;
there only policy ``full`` remembers. MODE ``answer``; ``text`` refuses token ids; ``die`` ends on
the third completion; ``refuse`` ends at once; ``broken`` answers 500; ``odd`` gives no text.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS = 3  # of the prompt's end that must occur before
Decode = Callable[[list[int]], str]


def look_back(prompt: str, count: int) -> str:
    """``count`` characters of what followed the prompt's last words when they first stood there."""
    last = " ".join(prompt.split(" ")[-WORDS:]).split("\n")[-1]
    at = prompt.find(last)
    return prompt[at + len(last) :][:count] if 0 <= at < len(prompt) - len(last) else " no idea"


class Handler(BaseHTTPRequestHandler):
    """One request a thread."""

    mode = "answer"
    forgets = False
    decode: Decode
    seen: list[dict]

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._answer(200, "")
        self._answer(200, json.dumps({"data": [{"id": "the-model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if self.mode == "die" and len(self.seen) > 2:
            print("Traceback ...\nMemoryError: no more pages", flush=True)
            os._exit(7)
        ids = isinstance(body["prompt"], list)
        if self.mode == "broken" or (self.mode == "text" and ids):
            return self._answer(500, "cannot do that")
        if self.mode == "odd":
            return self._answer(200, "{}")
        prompt = self.decode(body["prompt"]) if ids else body["prompt"]
        text = " no idea" if self.forgets else look_back(prompt, 3 * body["max_tokens"])
        self._answer(200, json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        """Keep stderr for what matters."""


@contextmanager
def serving(decode: Decode, mode: str = "answer") -> Iterator[tuple[str, list[dict]]]:
    """A server in this process: its URL, and the bodies it was sent."""
    seen: list[dict] = []
    handler = type("Here", (Handler,), {"mode": mode, "decode": staticmethod(decode), "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def _main() -> None:
    from tokenizers import Tokenizer

    port, Handler.mode, model, policy = sys.argv[1:]
    if Handler.mode == "refuse":
        print("raggedkv: refusing to start: policy 'x' is damaged", flush=True)
        sys.exit(3)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    Handler.decode = staticmethod(tokenizer.decode)
    Handler.seen, Handler.forgets = [], policy != "full"
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    _main()

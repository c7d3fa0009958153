"""A server with a toy model behind `/v1/completions`: `python fake_server.py PORT MODE`.

Token ids and log probabilities come in vLLM's form. MODE is "good", one way to be broken, or
"characters": llama.cpp's form, in which odd tokens are no whole characters and never named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB_SIZE = 64
END_TOKEN_ID = VOCAB_SIZE
"""In mode "characters": never chosen, and nearly as likely as what is."""


def next_token(token_ids: list[int]) -> int:
    """The toy model: what follows depends on every token before."""
    value = 7
    for position, token_id in enumerate(token_ids):
        value = (value * 31 + token_id + position) % 1009
    return value % VOCAB_SIZE


def is_whole(token_id: int) -> bool:
    """Whether the token is a character, in mode "characters"."""
    return token_id % 2 == 0


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    mode = "good"
    num_preemptions = 0

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Health and metrics."""
        if self.path == "/metrics":
            text = f'vllm:num_preemptions_total{{engine="0"}} {Handler.num_preemptions}.0\n'
            self._send(200, text)
        else:
            self._send(503 if self.mode == "never" else 200, "{}")

    def do_POST(self) -> None:
        """A completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) > 100:
            self._send(400, '{"error": "the prompt is too long"}')
        elif body.get("stream"):
            self._stream(body)
        else:
            self._send(200, json.dumps({"choices": [self._choice(body, body["prompt"])[1]]}))

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        token_ids = list(body["prompt"])
        for index in range(body["max_tokens"]):
            token_id, choice = self._choice(body, token_ids)
            token_ids.append(token_id)
            if not self._is_broken_at(index):
                self._event({"choices": [choice]})
            elif self.mode == "drop":
                return
        last = {"text": "", "finish_reason": "length"}
        self._event({"choices": [last], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _choice(self, body: dict[str, Any], token_ids: list[int]) -> tuple[int, dict[str, Any]]:
        """The token that follows, and how the answer shows it."""
        token_id = next_token(token_ids)
        if self.mode != "characters":
            return token_id, _choice(token_id)
        if "grammar" in body and not is_whole(token_id):
            token_id -= 1
        return token_id, _choice_of_characters(token_id)

    def _is_broken_at(self, index: int) -> bool:
        """Do what the mode is about; True when the token is not sent."""
        if index != 3:
            return False
        if self.mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "exits-later":
            os._exit(5)
        if self.mode == "silent":
            time.sleep(3600)
        if self.mode == "preempts":
            Handler.num_preemptions += 2
        return self.mode in ("drop", "loses")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


def _choice(token_id: int) -> dict[str, Any]:
    second = (token_id + 1) % VOCAB_SIZE
    return {
        "text": f"<{token_id}>",
        "token_ids": [token_id],
        "logprobs": {
            "token_logprobs": [-0.25],
            "top_logprobs": [{f"token_id:{token_id}": -0.25, f"token_id:{second}": -2.0}],
        },
    }


def _choice_of_characters(token_id: int) -> dict[str, Any]:
    """The odd ones among the best are likelier and less likely than the token, in turn."""
    if not is_whole(token_id):
        return {"text": "", "logprobs": None}
    best = [(token_id + 1, -0.125), (token_id, -0.25), (token_id + 3, -1.0), (token_id + 2, -2.0)]
    top = [
        {"id": item % VOCAB_SIZE, "bytes": [60 if is_whole(item) else 230], "logprob": logprob}
        for item, logprob in best
    ]
    top.append({"id": END_TOKEN_ID, "bytes": [], "logprob": -1.5})
    return {
        "text": f"<{token_id}>",
        "logprobs": {"content": [{"id": token_id, "logprob": -0.25, "top_logprobs": top}]},
    }


def main(port: int, mode: str) -> None:
    """Serve until killed."""
    if mode == "exits":
        print("no such model")
        sys.exit(3)
    if mode == "detaches":
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        child = subprocess.Popen(command, start_new_session=True)
        print(f"detached {child.pid}", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.mode = mode
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

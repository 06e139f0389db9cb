"""A real HTTP server that speaks `/v1/completions` and `/v1/chat/completions`, and does what a test tells it.

with Served(lambda prompt: "Paris.") as served:
    Endpoint(served.url, "some-model", tokenizer)
    served.plan = [(429, {"retry-after": "0"}, "busy")]       # answers that come first, one a request
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Planned = tuple[int, dict[str, str], str]
"""Status, headers, body."""


class Served:
    """A context manager; `requests` holds (path, headers, body) of all that came."""

    def __init__(self, answer: Callable[[str], str] = lambda prompt: "Paris.") -> None:
        self.answer = answer
        self.plan: list[Planned] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.usage = True
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                owner.requests.append((self.path, headers, body))
                status, more, text = owner.plan.pop(0) if owner.plan else owner.completion(self.path, body)
                data = text.encode("utf-8")
                self.send_response(status)
                for name, value in {"content-type": "application/json", **more}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def completion(self, path: str, body: dict[str, Any]) -> Planned:
        """What an OpenAI-compatible server says."""
        if path == "/v1/completions":
            choice: dict[str, Any] = {"text": self.answer(body["prompt"])}
        elif path == "/v1/chat/completions":
            assert [message["role"] for message in body["messages"]] == ["user"]
            choice = {"message": {"role": "assistant", "content": self.answer(body["messages"][0]["content"])}}
        else:
            return 404, {}, '{"error": "no such route"}'
        reply: dict[str, Any] = {"choices": [{**choice, "index": 0, "finish_reason": "stop"}]}
        if self.usage:
            reply["usage"] = {"prompt_tokens": 7}
        return 200, {}, json.dumps(reply)

    def __enter__(self) -> Served:
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

"""A model behind an OpenAI-compatible endpoint (`/v1/completions`, or `/v1/chat/completions` with `chat`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import longfocus
from longfocus.errors import ConfigError, EndpointError, UnsupportedCallError
from longfocus.memory.fingerprint import tokenizer_fingerprint
from longfocus.subjects.contract import Completion, Prompt

RETRIES = 4
LONGEST_REPLY_BYTES = 1 << 24
LONGEST_PAUSE_S = 60.0
"""Between two tries, whatever the endpoint asks for."""
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class Endpoint:
    """Text in, text out; the model runs elsewhere."""

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        *,
        name: str | None = None,
        chat: bool = False,
        longest: int | None = None,
        timeout_s: float = 600.0,
        transport: Any = None,
    ) -> None:
        """
        Args:
            url: up to and with `/v1`.
            model: its name there.
            tokenizer: to cut prompts to a length; the endpoint's own counts are reported where it gives them.
            name: as tables call it; the model's name unless given.
            chat: ask through chat messages instead of plain continuation; documents and text become one user message.
            longest: tokens that it takes, where known; longer prompts are refused here.
            timeout_s: seconds for one answer.
            transport: of httpx, for tests.

        The key, if one is needed, is read from OPENAI_API_KEY; it is never written anywhere.

        Raises:
            ConfigError: no URL, one with a key in it, a key that cannot be sent, or httpx is missing.
        """
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("--endpoint needs the package httpx: pip install 'longfocus[eval]'") from error
        try:
            parts, port = urlsplit(url), urlsplit(url).port
            httpx.URL(url)
        except (ValueError, httpx.InvalidURL):
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"\s", url):
            raise ConfigError(f"--endpoint: {url!r} given, expected a URL such as http://localhost:8000/v1.")
        if parts.username or parts.password or parts.query:  # it is stored with the results
            raise ConfigError("--endpoint: the URL holds a key or password; put the key into OPENAI_API_KEY instead.")
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not self._key.isascii() or not self._key.isprintable():
            raise ConfigError("OPENAI_API_KEY holds characters that no key has; set it anew.")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self.client = httpx.Client(timeout=timeout_s, headers=headers, transport=transport)
        self.url, self.model, self.name, self.chat = url.rstrip("/"), model, name or model, chat
        self._tokenizer, self._longest, self.timeout_s = tokenizer, longest, timeout_s

    @property
    def longest(self) -> int | None:
        """As given; None: not known."""
        return self._longest

    @property
    def tokenizer(self) -> Any:
        """Not the endpoint's own, unless the caller gave that one."""
        return self._tokenizer

    def about(self) -> dict[str, Any]:
        """All that is known of it."""
        return {
            "kind": "endpoint",
            "name": self.name,
            "model": self.model,
            "url": self.url,
            "chat": self.chat,
            "longest": self._longest,
            "tokenizer": tokenizer_fingerprint(self._tokenizer),
            "longfocus": longfocus.__version__,
        }

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        """See `contract.Completes`; `stop` cuts the answer after what it finds.

        Raises:
            EndpointError: it cannot be reached, refuses, or answers with something else than a completion.
            UnsupportedCallError: a prompt is longer than `longest`.
        """
        pattern = re.compile(stop) if stop else None
        for prompt in prompts:
            text = prompt.joined
            tokens = len(self._tokenizer(text)["input_ids"])
            if self._longest is not None and tokens + max_new_tokens > self._longest:
                raise UnsupportedCallError(
                    f"{self.name} takes {self._longest:,} tokens; a prompt with its answer is {tokens + max_new_tokens:,}."
                )
            begun = time.perf_counter()
            most = max_new_tokens
            if prompt.wanted is not None:  # twice as many: its tokenizer may cut finer than the one at hand
                most = min(most, 2 * len(self._tokenizer(prompt.wanted)["input_ids"]) + 8)
            body: dict[str, Any] = {"model": self.model, "max_tokens": most, "temperature": 0}
            if self.chat:
                route, body["messages"] = "chat/completions", [{"role": "user", "content": text}]
            else:
                route, body["prompt"] = "completions", text
            reply = self._post(f"{self.url}/{route}", body)
            try:
                choice = reply["choices"][0]
                said = choice["message"]["content"] if self.chat else choice["text"]
                said = "" if said is None else said.encode("utf-8", "replace").decode("utf-8")
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise EndpointError(
                    f"{self.url}/{route} answered without text in choices: {self._told(str(reply), 200)}"
                ) from error
            found = pattern.search(said) if pattern else None
            usage = reply.get("usage")
            counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
            if not isinstance(counted, int) or counted < 1:
                counted = tokens
            yield Completion(said[: found.end()] if found else said, counted, time.perf_counter() - begun)

    def _told(self, text: str, limit: int) -> str:
        """What an endpoint said, for a message: short, in one line, without the key."""
        text = " ".join((text.replace(self._key, "***") if self._key else text).split())
        return text if len(text) <= limit else text[: limit - 1] + "…"

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply's JSON; what passes by itself (busy, restarting) is tried again."""
        import httpx

        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES
            try:
                reply = self._sent(url, body)
            except httpx.TimeoutException as error:
                raise EndpointError(
                    f"{url} gave no answer in time ({error}); allow more seconds with --timeout."
                ) from error
            except httpx.HTTPError as error:
                if last:
                    raise EndpointError(f"{url} cannot be reached ({error}); is the server running?") from error
                time.sleep(_pause(attempt))
                continue
            if reply.status_code in _AGAIN and not last:
                wanted = reply.headers.get("retry-after", "")
                time.sleep(min(float(wanted), LONGEST_PAUSE_S) if wanted.isdecimal() else _pause(attempt))
                continue
            if not 200 <= reply.status_code < 300:
                hint = {401: " Set OPENAI_API_KEY.", 403: " Set OPENAI_API_KEY.", 404: " Is the URL right, up to /v1?"}
                told = self._told(reply.text, 300)
                raise EndpointError(f"{url} refused with {reply.status_code}: {told}{hint.get(reply.status_code, '')}")
            try:
                data = reply.json()
            except (ValueError, RecursionError) as error:
                told = self._told(reply.text, 200)
                raise EndpointError(f"{url} answered with something that is not JSON: {told}") from error
            if isinstance(data, dict):
                return data
            raise EndpointError(f"{url} answered with {type(data).__name__}, expected an object.")
        raise AssertionError("the last attempt returns or raises")

    def _sent(self, url: str, body: dict[str, Any]) -> Any:
        """The whole reply of httpx; the time is that of all of it, and not of each piece.

        Raises:
            httpx.HTTPError: it cannot be reached, or the time is over.
            EndpointError: the reply has no end.
        """
        import httpx

        end = time.monotonic() + self.timeout_s
        with self.client.stream("POST", url, json=body) as reply:
            content = bytearray()
            for piece in reply.iter_bytes():
                content += piece
                if len(content) > LONGEST_REPLY_BYTES:
                    raise EndpointError(
                        f"{url} answered with more than {LONGEST_REPLY_BYTES:,} bytes, expected a short text."
                    )
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"not all of it in {self.timeout_s:g} s")
        headers = {name: reply.headers[name] for name in ("content-type", "retry-after") if name in reply.headers}
        return httpx.Response(reply.status_code, headers=headers, content=bytes(content))


def _pause(attempt: int) -> float:
    return min(8.0, 0.25 * 2.0**attempt)

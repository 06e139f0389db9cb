"""A model behind an OpenAI-compatible endpoint (`/v1/completions`, or `/v1/chat/completions` with `chat`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import longfocus
from longfocus.errors import ConfigError, EndpointError, UnsupportedCallError
from longfocus.subjects.contract import Completion, Prompt

RETRIES = 4
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
        """
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("--endpoint needs the package httpx: pip install 'longfocus[eval]'") from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint: {url!r} given, expected a URL such as http://localhost:8000/v1.")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(timeout=timeout_s, headers=headers, transport=transport)
        self.url, self.model, self.name, self.chat = url.rstrip("/"), model, name or model, chat
        self._tokenizer, self._longest = tokenizer, longest

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
            body: dict[str, Any] = {"model": self.model, "max_tokens": max_new_tokens, "temperature": 0}
            if self.chat:
                route, body["messages"] = "chat/completions", [{"role": "user", "content": text}]
            else:
                route, body["prompt"] = "completions", text
            reply = self._post(f"{self.url}/{route}", body)
            try:
                choice = reply["choices"][0]
                said = choice["message"]["content"] if self.chat else choice["text"]
            except (KeyError, IndexError, TypeError) as error:
                raise EndpointError(f"{self.url}/{route} answered without choices: {str(reply)[:200]}") from error
            said = said or ""
            found = pattern.search(said) if pattern else None
            counted = (reply.get("usage") or {}).get("prompt_tokens") or tokens
            yield Completion(said[: found.end()] if found else said, int(counted), time.perf_counter() - begun)

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply's JSON; what passes by itself (busy, restarting) is tried again."""
        import httpx

        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES
            try:
                reply = self.client.post(url, json=body)
            except httpx.TimeoutException as error:
                raise EndpointError(f"{url} gave no answer in time ({error}); allow more with --timeout.") from error
            except httpx.HTTPError as error:
                if last:
                    raise EndpointError(f"{url} cannot be reached ({error}); is the server running?") from error
                time.sleep(min(8.0, 0.25 * 2**attempt))
                continue
            if reply.status_code in _AGAIN and not last:
                waited = reply.headers.get("retry-after", "")
                time.sleep(float(waited) if waited.isdigit() else min(8.0, 0.25 * 2**attempt))
                continue
            if reply.status_code >= 400:
                hint = " Set OPENAI_API_KEY." if reply.status_code in (401, 403) else ""
                raise EndpointError(f"{url} refused with {reply.status_code}: {reply.text[:300]}{hint}")
            try:
                data = reply.json()
            except ValueError as error:
                raise EndpointError(f"{url} answered with something that is not JSON: {reply.text[:200]}") from error
            if isinstance(data, dict):
                return data
            raise EndpointError(f"{url} answered with {type(data).__name__}, expected an object.")
        raise AssertionError("the last attempt returns or raises")

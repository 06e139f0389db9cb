"""A model behind HTTP, with a real server on a real port: answers, refusals, and what passes by itself.

python -m pytest tests/subjects/test_endpoint.py
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longfocus.errors import ConfigError, EndpointError, UnsupportedCallError
from longfocus.evaluation.record import RESULTS, RUN
from longfocus.evaluation.run import evaluate
from longfocus.subjects import endpoint as module
from longfocus.subjects.contract import CAPABILITIES, Prompt
from longfocus.subjects.endpoint import LONGEST_REPLY_BYTES, RETRIES, Endpoint
from longfocus.tasks.passkey import Passkey, PasskeyOptions
from longfocus.tasks.texts import Texts
from tests.small_tokenizers import tokenizer
from tests.subjects.served import Served

KEY = "sk-very-secret-0123456789"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Served() as found:
        yield found


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been slept."""
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    return slept


def at(url: str, **options: Any) -> Endpoint:
    return Endpoint(url, "some-model", tokenizer("byte_level"), **options)


def ask(subject: Endpoint, *prompts: Prompt | str, stop: str | None = None) -> list[str]:
    given = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return [answer.text for answer in subject.complete(given, max_new_tokens=12, stop=stop)]


# -- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_it_answers_in_order_greedily_with_the_text_as_it_stands(served: Served, chat: bool) -> None:
    served.answer = lambda prompt: f"[{prompt}]"
    found = ask(at(served.url + "/", chat=chat), "one ", Prompt("two", ("first\ntext", "second"), ("a", "b")))
    assert found == ["[one ]", "[first\ntext\n\nsecond\n\ntwo]"]
    for path, headers, body in served.requests:
        assert path == ("/v1/chat/completions" if chat else "/v1/completions")
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("some-model", 12, 0)
        assert "authorization" not in headers


def test_tokens_are_the_endpoints_own_or_else_counted_here(served: Served) -> None:
    (answer,) = at(served.url).complete([Prompt("It was late")], max_new_tokens=3)
    assert answer.prompt_tokens == 7
    served.usage = False
    (answer,) = at(served.url).complete([Prompt("It was late")], max_new_tokens=3)
    assert answer.prompt_tokens == len(tokenizer("byte_level")("It was late")["input_ids"])
    assert (answer.local_from, answer.document_mass) == (None, None)


def test_an_answer_ends_with_what_was_to_stop_it(served: Served) -> None:
    served.answer = lambda prompt: " 12345 and 67890."
    assert ask(at(served.url), "key?", stop=r"\d{5}") == [" 12345"]
    assert ask(at(served.url), "key?", stop=r"[A-Z]") == [" 12345 and 67890."]


@pytest.mark.parametrize("body", ['{"choices": [{"text": null}]}', '{"choices": [{"text": ""}], "usage": null}'])
def test_an_answer_may_be_empty(served: Served, body: str) -> None:
    served.plan = [(200, {}, body)]
    assert ask(at(served.url), "x") == [""]


def test_half_characters_do_no_harm(served: Served) -> None:
    served.plan = [(200, {}, '{"choices": [{"text": "a\\ud83d b"}]}')]
    assert ask(at(served.url), "x") == ["a? b"]


def test_a_prompt_longer_than_the_model_takes_is_refused_before_it_is_sent(served: Served) -> None:
    text = "It was late. " * 20
    tokens = len(tokenizer("byte_level")(text)["input_ids"])
    with pytest.raises(UnsupportedCallError, match=rf"takes {tokens + 11:,} tokens; .* is {tokens + 12:,}"):
        ask(at(served.url, longest=tokens + 11), text)
    assert served.requests == []
    assert ask(at(served.url, longest=tokens + 12), text) == ["Paris."]


def test_it_gives_text_and_nothing_else() -> None:
    subject = at("http://localhost:1/v1", name="mine", longest=4096)
    assert [name for name, kind in CAPABILITIES.items() if isinstance(subject, kind)] == ["complete"]
    about = subject.about()
    assert {about[key] for key in ("kind", "name", "model", "url")} == {
        "endpoint",
        "mine",
        "some-model",
        "http://localhost:1/v1",
    }
    assert subject.longest == 4096


# -- what passes by itself ---------------------------------------------------------------------------------


def test_a_busy_endpoint_is_asked_again_when_it_says_so(served: Served, pauses: list[float]) -> None:
    served.plan = [(429, {"retry-after": "3"}, "busy"), (503, {}, "starting"), (429, {"retry-after": "soon"}, "busy")]
    assert ask(at(served.url), "x") == ["Paris."]
    assert len(served.requests) == 4
    assert pauses == [3.0, 0.5, 1.0]


def test_nobody_waits_a_day(served: Served, pauses: list[float]) -> None:
    served.plan = [(429, {"retry-after": "86400"}, "busy")]
    assert ask(at(served.url), "x") == ["Paris."]
    assert pauses == [module.LONGEST_PAUSE_S]


def test_an_endpoint_that_stays_broken_is_given_up(served: Served, pauses: list[float]) -> None:
    served.plan = [(500, {}, "it broke")] * 20
    with pytest.raises(EndpointError, match="completions refused with 500: it broke"):
        ask(at(served.url), "x")
    assert len(served.requests) == RETRIES + 1
    assert len(pauses) == RETRIES


def test_a_connection_that_comes_back_is_used(served: Served, pauses: list[float]) -> None:
    """The port is closed at the first tries and open later, as when a server restarts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    subject = at(f"http://127.0.0.1:{port}/v1")
    tries: list[str] = []
    original = subject.client.stream

    def stream(method: str, url: str, **more: Any) -> Any:
        tries.append(url)
        return original(method, url if len(tries) < 3 else f"{served.url}/completions", **more)

    subject.client.stream = stream  # type: ignore[method-assign]
    assert ask(subject, "x") == ["Paris."]
    assert len(tries) == 3


# -- refusals ----------------------------------------------------------------------------------------------


def test_an_unreachable_port_is_said(pauses: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointError, match=rf"http://127.0.0.1:{port}/v1/completions cannot be reached .*running\?"):
        ask(at(f"http://127.0.0.1:{port}/v1"), "x")


def test_an_answer_that_takes_too_long_is_said() -> None:
    def slowly(prompt: str) -> str:
        time.sleep(1.0)
        return "late"

    with Served(slowly) as served, pytest.raises(EndpointError, match=r"gave no answer in time.*--timeout"):
        ask(at(served.url, timeout_s=0.1), "x")


def test_an_answer_that_comes_drop_by_drop_takes_too_long_too() -> None:
    """Each piece comes in time, and the whole never does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            there, _ = server.accept()
            with there, contextlib.suppress(OSError):
                there.recv(1 << 16)
                there.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
                while True:
                    there.sendall(b" ")
                    time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(EndpointError, match=r"gave no answer in time \(not all of it in 0.5 s\).*--timeout"):
            ask(at(f"http://127.0.0.1:{server.getsockname()[1]}/v1", timeout_s=0.5), "x")


def test_an_answer_without_end_is_said(served: Served) -> None:
    served.plan = [(200, {}, " " * (LONGEST_REPLY_BYTES + 1))]
    with pytest.raises(EndpointError, match="answered with more than 16,777,216 bytes"):
        ask(at(served.url), "x")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        pytest.param(200, "[" * 100_000, "is not JSON: [[[", id="nested without end"),
        (200, "<html>hello</html>", "is not JSON: <html>hello</html>"),
        (200, "[1, 2]", "answered with list, expected an object"),
        (200, "{}", "without text in choices"),
        (200, '{"choices": []}', "without text in choices"),
        (200, '{"choices": [{}]}', "without text in choices"),
        (200, '{"choices": [{"text": ["parts"]}]}', "without text in choices"),
        (200, '{"choices": 7}', "without text in choices"),
        (400, '{"error": "context\\nlength"}', 'refused with 400: {"error": "context\\nlength"}'),
        (401, "who are you", "refused with 401: who are you Set OPENAI_API_KEY."),
        (404, "no such page", "refused with 404: no such page Is the URL right, up to /v1?"),
        (302, "elsewhere", "refused with 302"),
        (413, "x" * 5000, "…"),
    ],
)
def test_what_is_no_answer_is_said_in_one_line(served: Served, status: int, body: str, words: str) -> None:
    served.plan = [(status, {}, body)]
    with pytest.raises(EndpointError) as caught:
        ask(at(served.url), "x")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert len(served.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000/v1",
        "ftp://host/v1",
        "http://",
        "http://[",
        "file:///etc/passwd",
        "https:///v1",
        "http://a b/v1",
        "http://host:port/v1",
    ],
)
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as http://localhost:8000/v1"):
        at(url)


@pytest.mark.parametrize("url", ["https://me:pass@host/v1", "https://host/v1?api-key=abc"])
def test_a_url_with_a_secret_is_refused_for_it_would_be_stored(url: str) -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        at(url)
    assert "pass" not in str(caught.value).replace("password", "") and "abc" not in str(caught.value)


# -- the key -----------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_stored(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    task = Passkey(PasskeyOptions(lengths=[200], samples=2, haystacks=["filler"]), Texts(tmp_path))
    subject = at(served.url)
    evaluate(task, subject, tmp_path / "run")
    assert [headers["authorization"] for _, headers, _ in served.requests] == [f"Bearer {KEY}"] * 2
    files = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert {RUN, RESULTS, "samples.jsonl", "table.md", "plot.png"} <= {path.name for path in files}
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
    assert json.loads((tmp_path / "run" / RUN).read_text())["subject"]["url"] == served.url


def test_the_key_is_in_no_message(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    served.plan = [(401, {}, f"Incorrect API key provided: {KEY}.")]
    with pytest.raises(EndpointError, match=r"key provided: \*\*\*\.") as caught:
        ask(at(served.url), "x")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-caf\u00e9", "sk\n-two-lines"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        at("http://localhost/v1")
    assert key not in str(caught.value)

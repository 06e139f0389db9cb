"""Real processes that start at once: a helper loads torch and longfocus, and forks a child for each call.

Loading them takes seconds, and tests that kill, interrupt or lock need dozens of processes. A child is an
ordinary process with its own pid, descriptors and locks; signals reach it alone.

    child = start("tests.memory.children:remember", folder, text)      # strings only
    os.kill(child.pid, signal.SIGKILL)
    child.wait().code                                                  # -9
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LONGEST_SECONDS = 240


@dataclass(frozen=True)
class Ended:
    """How a child ended; a code below 0 is a signal."""

    code: int
    out: str
    err: str


@dataclass
class Child:
    """A running child."""

    pid: int
    folder: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; a child that has ended already does not mind, since its number is not given away before `wait`."""
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Its end."""
        code = _server().ask({"wait": self.pid})["code"]
        out, err = ((self.folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return Ended(code, out, err)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Return as soon as `what()` is true; the child must not end before."""
        give_up = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < give_up:
            if what():
                return
            if not self.is_running:
                raise AssertionError(f"the process ended first: {self.wait()}")
            time.sleep(0.002)
        raise AssertionError("waited in vain")

    @property
    def is_running(self) -> bool:
        """Whether it is neither gone nor waiting to be buried."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return (self.folder / "out").read_text(encoding="utf-8", errors="replace")

    def said(self, word: str) -> bool:
        """Whether the word stands in its standard output by now."""
        return word in self.out


def start(
    function: str, *arguments: str, stdin: bytes | None = b"", cwd: Path | str = ROOT, **environment: str
) -> Child:
    """Call `module:function` with string arguments in a new process.

    Args:
        stdin: what it reads on standard input; None: standard input is closed.
        environment: variables to set.
    """
    folder = Path(tempfile.mkdtemp(dir=_server().folder.name))
    (folder / "in").write_bytes(stdin or b"")
    for name in ("out", "err"):
        (folder / name).touch()
    request = {
        "call": function,
        "arguments": list(map(str, arguments)),
        "folder": str(folder),
        "stdin": stdin is not None,
        "cwd": str(cwd),
        "environment": environment,
    }
    return Child(_server().ask(request)["pid"], folder)


def run(function: str, *arguments: str, **options: Any) -> Ended:
    """`start` and wait."""
    return start(function, *arguments, **options).wait()


class _Server:
    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.folder = tempfile.TemporaryDirectory(prefix="longfocus-children-")
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
            self.process.wait()
            self.folder.cleanup()


@cache
def _server() -> _Server:
    return _Server()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)  # no thread pool may exist when a child is forked
    for module in (
        "longfocus.cli",
        "longfocus.model.load",
        "longfocus.answering",
        "longfocus.model.reading",
        "longfocus.training.run",
        "longfocus.subjects.open",
        "longfocus.evaluation.run",
    ):
        importlib.import_module(module)
    importlib.import_module("transformers.models.llama.modeling_llama")
    answers = os.fdopen(os.dup(1), "w")
    children: list[int] = []
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            children.remove(request["wait"])
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                _become(request)
            children.append(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), file=answers, flush=True)
    for pid in children:  # whatever a failed test has left behind
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _become(request: dict[str, Any]) -> None:
    """In the child: take its descriptors, call, and end."""
    folder = Path(request["folder"])
    for number, name, flags in ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        os.dup2(os.open(folder / name, flags), number)
    sys.stdin = open(0, encoding="utf-8") if request["stdin"] else None  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    if not request["stdin"]:
        os.close(0)
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        module, function = request["call"].split(":")
        getattr(importlib.import_module(module), function)(*request["arguments"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()

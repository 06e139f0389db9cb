"""The processes of a sharded memory, on Ray: started on first use, asked all at once, started again when they die.

Ray is used for what it is good at (starting processes on machines, calls, noticing that a process or machine died) and nothing
else: a shard's process keeps nothing that its files do not have, so one that died is made anew from them and asked again.

Without an address a Ray of our own is started, which ends with this process. It listens on the machine's network address (Ray
cannot be told not to) and lets in who has its token. An address joins a cluster that runs already (`ray start`).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfocus.errors import ConfigError, LongfocusError, ShardError
from longfocus.memory.distributed.worker import ShardWorker

INSTALL = "pip install 'longfocus[cluster]'"
_INLINE_BYTES = 100_000
"""Larger arguments are put into Ray's store once, for all shards."""
_STORE_BYTES = 512 << 20
"""Of a Ray that we start: room for queries and answers that are too large to be sent inline."""


@dataclass(frozen=True)
class ClusterOptions:
    """How shards are run.

    Raises:
        ConfigError: a value is impossible.
    """

    address: str | None = None
    """Of a running Ray cluster, `host:port` or `auto`; None: a Ray of our own on this machine."""
    answer_seconds: float = 120.0
    """A shard that takes longer for one answer fails the question."""
    start_seconds: float = 300.0
    """A process that has not opened its shard by then fails it."""
    tries: int = 3
    """How often one question is asked anew of a shard whose process died."""
    threads: int | None = None
    """CPU threads of each shard. None: the machine's cores, divided among its shards."""
    cpus: int | None = None
    """CPUs that a Ray of our own counts with. None: the machine's."""

    def __post_init__(self) -> None:
        for name in ("answer_seconds", "start_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} given, expected seconds above 0.")
        for name in ("tries", "threads", "cpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value!r} given, expected 1 or more.")


def connect(options: ClusterOptions) -> Any:
    """The `ray` module, connected.

    Raises:
        ShardError: Ray is not installed, or no cluster answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # processes without a GPU of their own leave it alone
    if (
        options.address is None and "ray" not in sys.modules
    ):  # read when it is imported; a program may have chosen before
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray listens to the network
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ShardError(f"Sharded memories need Ray, which is not installed: {INSTALL}") from error
    if ray.is_initialized():
        return ray
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if options.address is None:
        arguments |= {
            "address": "local",
            "num_cpus": options.cpus,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        }
    else:
        arguments["address"] = options.address
    try:
        ray.init(**arguments)
    except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        where = f"at {options.address}" if options.address else "on this machine"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = " Start one with ray start --head, and give the address that it prints." if options.address else ""
        raise ShardError(f"No Ray {where}: {reason}{hint}") from error
    return ray


class Shard:
    """One shard's process, and its successors.

    Attributes:
        label: for messages, with the folder.
        pid: of the process that runs now.
        started: how many processes there have been.
    """

    def __init__(self, ray: Any, label: str, worker: type, arguments: tuple[Any, ...], options: ClusterOptions) -> None:
        """Start a process; `ready` waits for it.

        Args:
            worker: a class with a method `open` that gives its process id.
            arguments: for the class.
        """
        self.ray, self.label, self.options = ray, label, options
        self.pid, self.started = 0, 0
        self._class = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(worker)
        self._arguments = arguments
        self._start()

    def _start(self) -> None:
        self.actor = self._class.remote(*self._arguments)
        self._opened: Any = self.actor.open.remote()
        self.started += 1

    def ready(self) -> None:
        """Wait until the process has opened its shard.

        Raises:
            ShardError: it cannot be opened, or not in time.
        """
        if self._opened is None:
            return
        opened, self._opened = self._opened, None
        again = "" if self.started == 1 else " died and cannot be started again from its files"
        try:
            self.pid = self.ray.get(opened, timeout=self.options.start_seconds)
        except self.ray.exceptions.GetTimeoutError as error:
            self.stop()
            raise ShardError(
                f"{self.label}{again or ' does not start'}: it was not open after {self.options.start_seconds:g} s. Are there "
                "machines with free CPUs and memory in the cluster?"
            ) from error
        except self.ray.exceptions.RayTaskError as error:
            self.stop()
            raise ShardError(f"{self.label}{again or ' cannot be opened'}: {_cause(error)}") from error
        except self.ray.exceptions.RayError as error:
            raise ShardError(f"{self.label}{again or ' does not start'}: {_first_line(error)}") from error

    def restart(self, dead: Any) -> None:
        """Start a process anew, unless `dead` has been replaced already.

        Raises:
            ShardError: the shard cannot be opened any more; says why.
        """
        if self.actor is dead:
            self.stop()
            self._start()
        self.ready()

    def ask(self, method: str, *arguments: Any) -> Call:
        """Send a call; it is under way when this returns."""
        return Call(self, method, arguments)

    def stop(self) -> None:
        """End the process."""
        if self.ray.is_initialized():
            self.ray.kill(self.actor)


class Call:
    """A call to a shard that is under way."""

    def __init__(self, shard: Shard, method: str, arguments: tuple[Any, ...]) -> None:
        self.shard, self.method, self.arguments = shard, method, arguments
        self._send()

    def _send(self) -> None:
        self._asked = self.shard.actor
        self._reply = getattr(self._asked, self.method).remote(*self.arguments)

    def result(self, seconds: float | None = None) -> Any:
        """Wait for the answer; a shard that died is started again from its files and asked again.

        Args:
            seconds: longest wait; None: `answer_seconds`.

        Raises:
            ShardError: names the shard that died too often, cannot be opened any more, or did not answer in time.
            LongfocusError: what the shard itself raised.
        """
        shard, options = self.shard, self.shard.options
        exceptions = shard.ray.exceptions
        seconds = options.answer_seconds if seconds is None else seconds
        shard.ready()
        for attempt in range(1, options.tries + 2):
            try:
                return shard.ray.get(self._reply, timeout=seconds)
            except exceptions.GetTimeoutError as error:
                shard.stop()  # lest the next question waits behind this one
                if self.method == "index":
                    raise ShardError(
                        f"{shard.label} has no index and did not make one within {seconds:g} s; make it once and save it "
                        "(longfocus index, ShardedMemory.update_index), or allow more (ClusterOptions.start_seconds)."
                    ) from error
                raise ShardError(
                    f"{shard.label} did not answer within {seconds:g} s; ask again, or allow more "
                    "(--shard-timeout, ClusterOptions.answer_seconds)."
                ) from error
            except exceptions.RayTaskError as error:
                if isinstance(error.cause, LongfocusError):
                    raise error.cause from error
                raise
            except exceptions.RayError as error:  # the process, its machine or the way there is gone
                if attempt > options.tries:
                    raise ShardError(
                        f"{shard.label} died {attempt} times while it was asked the same: {_first_line(error)} "
                        "Look at its machine's memory and at Ray's logs."
                    ) from error
                shard.restart(self._asked)
                self._send()
        raise AssertionError("the last try returns or raises")


class ShardProcesses:
    """The processes of a sharded memory's shards."""

    def __init__(self, folders: Sequence[Path], options: ClusterOptions) -> None:
        """Start them, all at once.

        Args:
            folders: of the shards, as every machine of the cluster sees them.

        Raises:
            ShardError: Ray is missing, or a shard cannot be opened; names it.
        """
        self.ray = connect(options)
        threads = options.threads or self._share_of_cores(len(folders))
        self.shards = [
            Shard(self.ray, f"Shard {number} ({folder})", ShardWorker, (str(folder.absolute()), threads), options)
            for number, folder in enumerate(folders)
        ]
        self._indexed = False
        self._end = weakref.finalize(self, _stop_all, self.shards)
        try:
            for shard in self.shards:
                shard.ready()
        except BaseException:
            self.close()
            raise

    def _share_of_cores(self, shards: int) -> int:
        machines = [node for node in self.ray.nodes() if node["Alive"]]
        return max(1, (os.cpu_count() or 1) * len(machines) // shards)

    def index(self) -> int:
        """Have each shard's index in its process, made in RAM as far as none is saved; only the first call waits, as long as for opening.

        Returns:
            How many tokens were encoded by this call, in all shards.

        Raises:
            ShardError: a shard did not finish in time, or died too often; names it.
            ConfigError: faiss is missing there.
        """
        if self._indexed:
            return 0
        calls = [shard.ask("index") for shard in self.shards]
        encoded = sum(int(call.result(call.shard.options.start_seconds)) for call in calls)
        self._indexed = True
        return encoded

    def shared(self, payload: Any, nbytes: int, receivers: int) -> Any:
        """An argument for several shards, sent once where it is large."""
        return self.ray.put(payload) if nbytes > _INLINE_BYTES and receivers > 1 else payload

    def close(self) -> None:
        """End the processes."""
        self._end()


def _stop_all(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.stop()


def _cause(error: Any) -> str:
    cause = getattr(error, "cause", None)
    return str(cause) if isinstance(cause, LongfocusError) else _first_line(cause or error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

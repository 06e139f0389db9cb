"""Reading documents into a sharded memory, several at the same time.

Some processes each load the model by themselves from where it was loaded before (weights are never sent) and own some of the
shards: process r of n owns the shards s with s % n = r. A document goes whole to one shard: to the one that holds its
beginning, or else to the one with the fewest tokens whose process is free. It is read there as `Reader` reads into any memory,
so what was committed survives every kill, and a document whose reading was interrupted goes on where it stopped. A process
that dies is started again and goes on with its document.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from longfocus.data.documents import Source
from longfocus.errors import InputError, LongfocusError, MemoryStoreError, ShardError
from longfocus.memory.distributed.manifest import Entry
from longfocus.memory.distributed.memory import ShardedMemory
from longfocus.memory.distributed.processes import Shard, connect
from longfocus.memory.documents import Document
from longfocus.memory.memory import Memory


@dataclass(frozen=True)
class Read:
    """One document that was read to its end, or could not be."""

    source: Source
    shard: int
    document: Document | None
    """As it is in its shard; None where it could not be read."""
    error: InputError | None
    done: int
    """Documents that are done."""
    tokens: int
    """Tokens that were read so far, in all shards, by this call."""


class ReadingWorker:
    """What runs in a process that reads: the model, and the shards that it owns."""

    def __init__(self, model_source: str, options: dict[str, Any], threads: int) -> None:
        """Loads nothing yet, so that `open` can say what is wrong."""
        self._model_source, self._options, self._threads = model_source, options, threads
        self._shards: dict[str, Memory] = {}

    def open(self) -> int:
        """Load the model.

        Returns:
            The process id.

        Raises:
            ModelNotFoundError: not on this machine.
        """
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(self._threads)
        from longfocus.model.load import load, load_tokenizer

        self._model = load(self._model_source, **self._options)
        self._tokenizer = load_tokenizer(self._model_source)
        return os.getpid()

    def read(self, folder: str, source: Source) -> tuple[Document, int, int]:
        """Read one document into a shard.

        Returns:
            The document, the generation of the shard's files, and how many tokens were read now.

        Raises:
            InputError: the source cannot be read as text, here.
            MemoryStoreError: the shard cannot be opened or written.
        """
        from longfocus.model.reading import Reader

        memory = self._shards.get(folder)
        if memory is None:
            memory = self._shards[folder] = Memory.open(
                Path(folder), model=self._model, tokenizer=self._tokenizer, writable=True
            )
        before = memory.extent
        document = Reader(self._model, self._tokenizer, memory).read(source)
        return document, memory.generation, memory.extent - before


def read_in_parallel(
    memory: ShardedMemory,
    sources: Sequence[Source],
    progress: Callable[[Read], None] = lambda read: None,
    *,
    readers: int | None = None,
    model_source: str | None = None,
) -> None:
    """Read sources into a sharded memory; each stands in it in the order in which it is given, behind what is there.

    Args:
        sources: files must have the same paths on every machine.
        progress: told of each document as it is done, also of one that could not be read; what it raises ends the reading.
        readers: processes that read at the same time, each with the model in its memory; None: as many as the cluster has CPUs
            and the memory has shards.
        model_source: where they load the model from; None: where the one was loaded from that made the memory.

    Raises:
        ShardError: a process cannot be started, or died too often; what was read before is in the memory.
        MemoryLockedError: somebody else is writing.
    """
    if not sources:
        return
    name = model_source or memory.model_source
    if name is None:
        raise MemoryStoreError(
            f"{memory.label} does not say where its model can be loaded from; give model_source=, a path or hub id."
        )
    with memory.writing():
        crew = _Crew(memory, name, min(len(sources), readers or len(memory.shards)), readers is not None)
        try:
            for read in crew.read(sources):
                progress(read)
        finally:
            crew.close()


class _Task(NamedTuple):
    """A document that a process reads."""

    reader: int
    number: int
    """Of the source."""
    shard: int
    attempt: int = 1


class _Crew:
    """The processes that read, and who has what to do."""

    def __init__(self, memory: ShardedMemory, model_source: str, count: int, as_asked: bool) -> None:
        self.memory, options = memory, memory.options
        self.ray = connect(options)
        cpus = max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        if not as_asked:
            count = min(count, cpus)
        count = min(count, len(memory.shards))
        threads = options.threads or max(1, cpus // count)
        arguments = (model_source, {**memory.focus_options, "dtype": memory.geometry.model_dtype}, threads)
        self.readers = [
            Shard(self.ray, f"Reading process {number} of {memory.folder}", ReadingWorker, arguments, options)
            for number in range(count)
        ]
        self.folders = [str((memory.folder / name).absolute()) for name in memory.manifest.shards]
        self.tokens = [shard.tokens for shard in memory.shards]
        self.before: list[Entry] = [*memory.manifest.order]
        self.done: dict[int, Entry] = {}

    def read(self, sources: Sequence[Source]) -> Iterator[Read]:
        """Read all, and tell of each as it is done."""
        waiting = list(range(len(sources)))
        begun = self._begun(sources)
        busy: dict[Any, _Task] = {}  # by reply
        total = done = 0
        for process in self.readers:
            process.ready()
        while waiting or busy:
            free = set(range(len(self.readers))) - {task.reader for task in busy.values()}
            for reader in sorted(free, key=lambda one: self.tokens[self._emptiest(one)]):
                task = self._next(reader, waiting, begun)
                if task is not None:
                    waiting.remove(task.number)
                    busy[self._send(task, sources)] = task
            replies, _ = self.ray.wait(list(busy), num_returns=1)
            task = busy.pop(replies[0])
            source = sources[task.number]
            document: Document | None = None
            failed: InputError | None = None
            try:
                document, generation, tokens = self.ray.get(replies[0])
            except self.ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, InputError):
                    raise (error.cause if isinstance(error.cause, LongfocusError) else error) from error
                failed = error.cause
            except self.ray.exceptions.RayError as error:
                process = self.readers[task.reader]
                if task.attempt > self.memory.options.tries:
                    raise ShardError(
                        f"{process.label} died {task.attempt} times while it read {source.name}."
                    ) from error
                process.restart(process.actor)
                task = task._replace(attempt=task.attempt + 1)
                busy[self._send(task, sources)] = task
                continue
            done += 1
            if document is not None:
                total += tokens
                self.tokens[task.shard] += tokens
                self._note(task.number, (task.shard, generation, document.id))
            yield Read(source, task.shard, document, failed, done, total)

    def _next(self, reader: int, waiting: Sequence[int], begun: Mapping[int, int]) -> _Task | None:
        """What a free process reads next; beginnings first: once something stands behind one, it cannot go on."""
        may = [number for number in waiting if begun.get(number, reader) % len(self.readers) == reader]
        if not may:
            return None
        number = min(may, key=lambda one: one not in begun)
        return _Task(reader, number, begun.get(number, self._emptiest(reader)))

    def _begun(self, sources: Sequence[Source]) -> dict[int, int]:
        """Shards in which the last document is the unfinished beginning of one of the sources, by the source's number."""
        unfinished = {}
        for number, shard in enumerate(self.memory.shards):
            documents = shard.documents
            if documents and not documents[-1].complete and documents[-1].path is not None:
                unfinished[documents[-1].path] = number
        paths = {
            number: str(source.path.absolute()) for number, source in enumerate(sources) if source.path is not None
        }
        return {number: unfinished[path] for number, path in paths.items() if path in unfinished}

    def _emptiest(self, reader: int) -> int:
        """The shard with the fewest tokens of those that a process owns."""
        return min(range(reader, len(self.folders), len(self.readers)), key=lambda shard: self.tokens[shard])

    def _send(self, task: _Task, sources: Sequence[Source]) -> Any:
        actor = self.readers[task.reader].actor
        return actor.read.remote(self.folders[task.shard], _portable(sources[task.number]))

    def _note(self, number: int, entry: Entry) -> None:
        """Keep the order of the sources, so far as they are done."""
        self.done[number] = entry
        ended = [self.done[one] for one in sorted(self.done)]
        self.memory.order_as([*(entry for entry in self.before if entry not in ended), *ended])

    def close(self) -> None:
        """End the processes."""
        for reader in self.readers:
            reader.stop()


def _portable(source: Source) -> Source:
    """A source that another process can read: with an absolute path, or its bytes."""
    if source.path is not None:
        return replace(source, path=source.path.absolute())
    source._spool.seek(0)
    return replace(source, _spool=io.BytesIO(source._spool.read()))

"""ShardedMemory: the documents of all shards as one memory. Files are read here; attention happens in the shards' processes.

memory = ShardedMemory.create("big.memory", model, tokenizer, shards=4, model_source="default")
read_in_parallel(memory, sources)                       # model/parallel_reading.py
memory = ShardedMemory.open("big.memory")               # no process is started yet
model.generate(ids, memory=memory)                      # now one for each shard is
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from longfocus.errors import DocumentNotFoundError, MemoryFormatError, MemoryMismatchError, MemoryWriteError
from longfocus.files import closed_on_error
from longfocus.memory.distributed.context import Piece, ShardedPart
from longfocus.memory.distributed.manifest import MANIFEST, Entry, Manifest, is_sharded, shard_name
from longfocus.memory.distributed.processes import ClusterOptions, ShardProcesses
from longfocus.memory.documents import Document, Place, choose
from longfocus.memory.folder import LOCK, is_memory, take_lock
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.memory import Memory

if TYPE_CHECKING:
    from longfocus.model.focused import FocusedModel


class ShardedMemory:
    """Remembered texts in several saved memories, asked as one; fulfils `AskedMemory`.

    Documents have ids and token numbers of their own here, counted over the live documents of all shards in their order.
    What is added or removed by others shows after `refresh`. Every method but those of attention works on the files and starts
    no process.
    """

    _chosen: frozenset[Entry] | None = None  # of a view made by `select`

    def __init__(self, folder: Path, options: ClusterOptions) -> None:
        """Open the shards' files; use `open` or `create`."""
        self.folder, self.options = folder, options
        self._processes: list[ShardProcesses] = []  # one at most; shared with views
        self._load()

    @classmethod
    def create(
        cls,
        folder: str | Path,
        model: FocusedModel,
        tokenizer: Any = None,
        *,
        shards: int,
        model_source: str | None = None,
        options: ClusterOptions | None = None,
    ) -> ShardedMemory:
        """Empty shards in a folder.

        Args:
            folder: does not exist yet, or is empty.
            shards: how many.
            model_source: where processes that read load the model from; a path must be that of every machine.

        Raises:
            MemoryWriteError: the folder holds other files or cannot be written.
            MemoryMismatchError: the model's memory positions are `absolute`.
        """
        assert shards >= 1, "a memory has a shard"
        folder = Path(folder)
        if model.focus.config.memory_positions == "absolute":
            raise MemoryMismatchError(
                "A memory with memory_positions 'absolute' cannot be sharded: its keys carry their place in one text. "
                "Use one memory (without --shards)."
            )
        names = tuple(map(shard_name, range(shards)))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strangers = [name for name in os.listdir(folder) if name != LOCK and not _is_unused(folder / name, names)]
        except OSError as error:
            raise MemoryWriteError(f"{folder} could not be written ({error.strerror or error}).") from error
        if strangers:
            raise MemoryWriteError(f"{folder} is not an empty folder (it holds {strangers[0]!r}); choose a new one.")
        geometry: MemoryGeometry | None = None
        for name in names:
            made = is_memory(folder / name)  # left by a `create` that was killed
            with (
                Memory.open(folder / name, model=model, tokenizer=tokenizer)
                if made
                else Memory.create(folder / name, model, tokenizer, model_source=model_source)
            ) as shard:
                geometry = shard.geometry
        assert geometry is not None
        Manifest(names, geometry.to_dict()).write(folder)
        return cls(folder, options or ClusterOptions())

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        model: FocusedModel | None = None,
        tokenizer: Any = None,
        options: ClusterOptions | None = None,
    ) -> ShardedMemory:
        """Open a sharded memory; its processes are started when the first question comes.

        Raises:
            MemoryFormatError: not a sharded memory, or a file of it or of a shard is missing, truncated or corrupted.
            MemoryMismatchError: made by another model, tokenizer, layers, window or dtype; or a shard by another than the rest.
        """
        memory = cls(Path(folder), options or ClusterOptions())
        if model is not None:
            with closed_on_error(memory):
                memory.check(model, tokenizer)
        return memory

    # -- files -------------------------------------------------------------------------------------------

    def _load(self) -> None:
        self.manifest = Manifest.read(self.folder)
        with ExitStack() as opened:
            names = enumerate(self.manifest.shards)
            self.shards = tuple(opened.enter_context(self._open_shard(number, name)) for number, name in names)
            opened.pop_all()
        self._seen: ShardedPart | None = None
        for name in ("_table", "_homes"):
            self.__dict__.pop(name, None)

    def _open_shard(self, number: int, name: str) -> Memory:
        try:
            shard = Memory.open(self.folder / name)
        except MemoryFormatError as error:
            raise MemoryFormatError(f"Shard {number} of {self.folder} cannot be opened: {error}") from error
        with closed_on_error(shard):
            try:
                expected = MemoryGeometry.from_dict(self.manifest.geometry)
                shard.geometry.check(expected, f"Shard {number} of {self.folder}")
            except TypeError as error:
                raise MemoryFormatError(
                    f"{self.folder / MANIFEST} is corrupted ({error}); restore it from a copy."
                ) from error
        return shard

    def refresh(self) -> None:
        """Look at the files again; caches that read this memory before must be made anew."""
        old = self.shards
        self._load()
        for shard in old:
            shard.close()

    @cached_property
    def _table(self) -> dict[Entry, Document]:
        """The live documents by where they are, in order, with ids and numbers of this memory."""
        live = {
            (number, shard.generation, document.id): document
            for number, shard in enumerate(self.shards)
            for document in shard.documents
        }
        order = dict.fromkeys(entry for entry in self.manifest.order if entry in live)
        table, start = {}, 0
        for number, entry in enumerate([*order, *(entry for entry in live if entry not in order)]):
            table[entry] = dataclasses.replace(live[entry], id=number, start=start)
            start += live[entry].tokens
        return table

    @cached_property
    def _homes(self) -> list[tuple[int, Document]]:
        """Shard and the document as it is there, by the id here."""
        held = [{document.id: document for document in shard.documents} for shard in self.shards]
        return [(shard, held[shard][number]) for shard, _, number in self._table]

    # -- what is inside ----------------------------------------------------------------------------------

    @property
    def geometry(self) -> MemoryGeometry:
        """What made it."""
        return self.shards[0].geometry

    @property
    def documents(self) -> tuple[Document, ...]:
        """In their order, without removed ones; ids and numbers count here, `text_start` in the shard."""
        chosen = self._chosen
        return tuple(document for entry, document in self._table.items() if chosen is None or entry in chosen)

    @property
    def tokens(self) -> int:
        """Tokens of the documents."""
        return sum(document.tokens for document in self.documents)

    @property
    def extent(self) -> int:
        """One past the number of the last token of all documents, chosen or not."""
        return sum(document.tokens for document in self._table.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the documents' keys and values."""
        return self.tokens * self.geometry.bytes_per_token

    @property
    def removed(self) -> tuple[Document, ...]:
        """Removed documents that still take space; ids and numbers are those of their shards."""
        return tuple(document for shard in self.shards for document in shard.removed)

    @property
    def removed_bytes(self) -> int:
        """Bytes that `compact` gives back."""
        return sum(shard.removed_bytes for shard in self.shards)

    @property
    def label(self) -> str:
        """For messages."""
        return f"The sharded memory in {self.folder}"

    @property
    def focus_options(self) -> dict[str, Any]:
        """Options of the model that made it, for `FocusConfig.from_dict`."""
        return self.shards[0].focus_options

    @property
    def model_source(self) -> str | None:
        """Path or id that the model was loaded from."""
        return self.shards[0].model_source

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"<ShardedMemory of {len(self.shards)} shards, {len(self.documents)} documents, {self.tokens} tokens>"

    def check(self, model: FocusedModel, tokenizer: Any = None) -> None:
        """See that this model (and tokenizer) made the memory.

        Raises:
            MemoryMismatchError: names what differs.
        """
        self.shards[0].check(model, tokenizer)

    def home(self, document: Document) -> int:
        """Number of the shard that holds a document."""
        return self._homes[document.id][0]

    def text_of(self, document: Document) -> str:
        """A document's whole text."""
        shard, there = self._homes[document.id]
        return self.shards[shard].text_of(there)

    def span(self, document: Document, start: int, stop: int) -> tuple[int, int]:
        """Characters of the document that tokens start … stop (numbers here) cover."""
        shard, there = self._homes[document.id]
        shift = there.start - document.start
        return self.shards[shard].span(there, start + shift, stop + shift)

    def place(self, document: Document, text: str, char: int) -> Place:
        """Line or page of a character of the document's text."""
        shard, there = self._homes[document.id]
        return self.shards[shard].place(there, text, char)

    def verify(self) -> None:
        """Compare every committed byte of every shard with its checksum.

        Raises:
            MemoryFormatError: names the corrupted file.
        """
        for shard in self.shards:
            shard.verify()

    # -- attention ---------------------------------------------------------------------------------------

    def visible(self) -> ShardedPart:
        """What a cache reads, as it is now."""
        if self._seen is None:
            pieces = []
            for document in self.documents:
                shard, there = self._homes[document.id]
                if there.tokens:
                    pieces.append(Piece(shard, there.start, there.stop, document.start))
            self._seen = ShardedPart(self.start, tuple(shard.generation for shard in self.shards), tuple(pieces))
        return self._seen

    def is_current(self, visible: ShardedPart) -> bool:
        """Whether the numbers of `visible` still mean this memory's tokens."""
        now = self.visible()
        return visible is now or (visible.generations, visible.pieces) == (now.generations, now.pieces)

    def start(self) -> ShardProcesses:
        """The shards' processes, started when they are not there yet.

        Raises:
            ShardError: Ray is missing, or a shard cannot be opened; names it.
        """
        if not self._processes:
            folders = [self.folder / name for name in self.manifest.shards]
            self._processes.append(ShardProcesses(folders, self.options))
        return self._processes[0]

    # -- choosing and removing ---------------------------------------------------------------------------

    def find(self, *patterns: str) -> tuple[Document, ...]:
        """The documents that any of the patterns means, in order; see `Memory.find`.

        Raises:
            DocumentNotFoundError: a pattern means none.
        """
        documents = self.documents
        named = [(document.name, document.path) for document in documents]
        return tuple(documents[index] for index in choose(patterns, named, self.label))

    def _entries(self, chosen: Sequence[Document | str]) -> list[Entry]:
        """Where documents are that are given themselves or by patterns."""
        here = {document.id: (entry, document) for entry, document in self._table.items()}
        found: dict[Entry, None] = {}
        for given in chosen:
            for document in self.find(given) if isinstance(given, str) else (given,):
                entry, held = here.get(document.id, (None, None))
                if entry is None or held is None or (held.name, held.start) != (document.name, document.start):
                    raise DocumentNotFoundError(f"{self.label} does not hold {document.name!r} any more.")
                found[entry] = None
        return [entry for entry in self._table if entry in found]

    def select(self, *documents: Document | str) -> ShardedMemory:
        """The same memory with only some of its documents, to be asked; nothing is copied, and closing it closes nothing.

        Args:
            documents: of this memory, or patterns as for `find`.

        Raises:
            DocumentNotFoundError: a document is not in the memory; a pattern means none.
        """
        view = copy.copy(self)
        view._chosen, view._seen = frozenset(self._entries(documents)), None
        return view

    def remove(self, *documents: Document | str) -> tuple[Document, ...]:
        """Remove documents; durable at once, shard by shard, so a kill in between leaves those of later shards. They take
        space until `compact`.

        Returns:
            What was removed, in order.

        Raises:
            DocumentNotFoundError: a document is not in the memory; a pattern means none. Nothing was removed.
            MemoryLockedError: somebody is writing to it.
            MemoryWriteError: the disk refused.
        """
        with self.writing():
            entries = self._entries(documents)
            removed = tuple(self._table[entry] for entry in entries)
            for number, name in enumerate(self.manifest.shards):
                mine = [self._homes[document.id][1] for document in removed if self.home(document) == number]
                if mine:
                    with Memory.open(self.folder / name, writable=True) as writer:
                        writer.remove(*mine)
        return removed

    def compact(self) -> int:
        """Write the shards that hold removed documents anew without them, one after another; see `Memory.compact`.

        Returns:
            Bytes that were given back.
        """
        given_back = 0
        with self.writing():
            self.order_as(self._also_as_compacted())
            for number, name in enumerate(self.manifest.shards):
                if self.shards[number].removed:
                    with Memory.open(self.folder / name, writable=True) as writer:
                        given_back += writer.compact()
        return given_back

    def _also_as_compacted(self) -> Iterator[Entry]:
        """The order in which each document of a shard that will be compacted is named by what it is and by what it will be."""
        after = [{document.id: place for place, document in enumerate(shard.documents)} for shard in self.shards]
        for shard, generation, number in self._table:
            yield (shard, generation, number)
            if self.shards[shard].removed:
                yield (shard, generation + 1, after[shard][number])

    # -- index -------------------------------------------------------------------------------------------

    @property
    def has_index(self) -> bool:
        """Whether a shard has an index for approximate search saved beside it."""
        return any(shard.has_index for shard in self.shards)

    @property
    def indexed_tokens(self) -> int:
        """Tokens that the shards' indexes cover; see `Memory.indexed_tokens`."""
        return sum(shard.indexed_tokens for shard in self.shards)

    def update_index(self) -> int:
        """Index in each shard what is not indexed yet, one shard after another; see `Memory.update_index`.

        Returns:
            How many tokens were encoded.

        Raises:
            ConfigError: faiss is missing.
            MemoryLockedError: somebody else is writing.
            MemoryWriteError: the disk refused; the memory is intact.
        """
        encoded = 0
        with self.writing():
            for name in self.manifest.shards:
                with Memory.open(self.folder / name, writable=True) as shard:
                    encoded += shard.update_index()
        return encoded

    # -- writing -----------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Held by whoever adds, removes or compacts; afterwards the memory is as the files are, and the order names all.

        Raises:
            MemoryLockedError: somebody else is writing.
        """
        self._require_whole()
        lock = take_lock(self.folder)
        try:
            self.refresh()
            try:
                yield
            finally:
                self.refresh()
                self.order_as(self._table)
        finally:
            lock.release()

    def order_as(self, entries: Iterable[Entry]) -> None:
        """Have documents stand in this order; those that it does not name come last.

        Raises:
            MemoryWriteError: the disk refused.
        """
        order = list(entries)
        if order != self.manifest.order:
            self.manifest.order = order
            self.manifest.write(self.folder)

    def _require_whole(self) -> None:
        if self._chosen is not None:
            raise MemoryWriteError(f"{self.label} was chosen by select; use the whole memory to change it.")

    def close(self) -> None:
        """End the processes and release files."""
        if self._chosen is None:
            while self._processes:
                self._processes.pop().close()
            for shard in self.shards:
                shard.close()

    def __enter__(self) -> ShardedMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_unused(path: Path, names: Sequence[str]) -> bool:
    """An empty shard of a `create` that was killed before it wrote the manifest."""
    if path.name not in names or is_sharded(path.parent):
        return False
    if not is_memory(path):
        return not any(name != LOCK for name in os.listdir(path)) if path.is_dir() else False
    with Memory.open(path) as shard:
        return not shard.documents

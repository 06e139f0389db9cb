"""What test_saved_memory.py lets other processes do with a memory; see tests/processes.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from longfocus import Memory, Reader, find_sources, load, load_tokenizer
from longfocus.memory import approximate
from longfocus.memory import memory as memory_module
from longfocus.memory.folder import is_memory
from longfocus.memory.ondisk import DiskBackend
from longfocus.model import reading_pass
from longfocus.model.reading import not_remembered
from longfocus.model.updating import compare, settle
from tests.memory.saved import focused, tokenizer_of_these_tests

reading_pass.PASS_TOKENS = 1  # many steps, as in conftest.py


def remember(folder: str, *paths: str) -> None:
    """As `longfocus remember PATHS --into FOLDER` with a tiny model: makes the memory or adds to it."""
    torch.set_num_threads(1)
    model, tokenizer = focused(), tokenizer_of_these_tests()
    memory = (
        Memory.open(folder, model=model, tokenizer=tokenizer, writable=True)
        if is_memory(Path(folder))
        else Memory.create(folder, model, tokenizer)
    )
    with memory:
        reader = Reader(model, tokenizer, memory)
        print("reading", flush=True)
        for source in find_sources(paths).sources:
            if not_remembered(reader.memory, [source]):
                reader.read(source)


def index(folder: str) -> None:
    """Bring the index of a memory up to date in many small steps."""
    torch.set_num_threads(1)
    approximate.TRAIN_TOKENS, memory_module._INDEX_STEP_TOKENS = 640, 32
    save = DiskBackend.save_index

    def saying(self: DiskBackend, index: approximate.MemoryIndex) -> None:
        print("step", flush=True)
        save(self, index)

    DiskBackend.save_index = saying  # type: ignore[method-assign]
    with Memory.open(folder, writable=True) as memory:
        memory.update_index()
    print("done", flush=True)


def hold(folder: str) -> None:
    """Open for writing, and keep it so until killed."""
    with Memory.open(folder, writable=True):
        print("holding", flush=True)
        while True:
            time.sleep(1)


def write_until_killed(folder: str, path: str) -> None:
    """Read the same text again and again."""
    torch.set_num_threads(1)
    model, tokenizer = focused(), tokenizer_of_these_tests()
    with Memory.open(folder, model=model, tokenizer=tokenizer, writable=True) as memory:
        reader = Reader(model, tokenizer, memory)
        source = find_sources([path]).sources[0]
        print("writing", flush=True)
        while memory.tokens < 100_000:
            reader.read(source)
    sys.exit(3)  # nobody killed us


def peak_while_remembering(folder: str, path: str) -> None:
    """Read a file with the default model, and print the MB by which resident memory rose above the loaded model."""
    torch.set_num_threads(1)
    model, tokenizer = load(memory_dtype="float16"), load_tokenizer()
    for weight in model.parameters():
        weight.sum()  # weights are mapped from the file, and resident only once they were touched
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _resident_mb("VmRSS")
    with Memory.create(folder, model, tokenizer) as memory:
        Reader(model, tokenizer, memory).read(find_sources([path]).sources[0])
    print(_resident_mb("VmHWM") - before)


def _resident_mb(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1000


def change_documents(folder: str, other: str) -> None:
    """Remove, update and compact without end: the file `other` is read in two versions in turn; nothing else changes."""
    torch.set_num_threads(1)
    model, tokenizer = focused(), tokenizer_of_these_tests()
    versions = [path.read_text() for path in (Path(other + ".a"), Path(other + ".b"))]
    with Memory.open(folder, model=model, tokenizer=tokenizer, writable=True) as memory:
        reader = Reader(model, tokenizer, memory)
        print("changing", flush=True)
        for number in range(10_000):
            Path(other).write_text(versions[number % 2])
            changes = compare(memory, find_sources([other]).sources)
            settle(memory, changes)
            for source in changes.to_read:
                reader.read(source, replace=True)
            if number % 3 == 2:
                memory.compact()
    sys.exit(3)  # nobody killed us


def remove_and_read_again(folder: str, path: str) -> None:
    """Read a file, remove it and compact, without end."""
    torch.set_num_threads(1)
    model, tokenizer = focused(), tokenizer_of_these_tests()
    with Memory.open(folder, model=model, tokenizer=tokenizer, writable=True) as memory:
        reader = Reader(model, tokenizer, memory)
        print("changing", flush=True)
        for _ in range(10_000):
            document = reader.read(find_sources([path]).sources[0])
            memory.remove(*(found for found in memory.documents if found.path == document.path))
            memory.compact()
    sys.exit(3)

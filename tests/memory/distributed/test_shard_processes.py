"""Shards in processes of their own, on a real Ray: they answer as one memory does, also after they were killed.

python -m pytest tests/memory/distributed/test_shard_processes.py -m ray
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longfocus import (
    Conversation,
    FocusCache,
    KRule,
    Memory,
    Reader,
    Sampling,
    ShardedMemory,
    find_sources,
    read_in_parallel,
)
from longfocus.analysis.attribution import passages, token_mass
from longfocus.analysis.memory_search import head_mass
from longfocus.errors import ConfigError, MemoryStoreError, ShardError, UnsupportedCallError
from longfocus.memory.approximate import TRAIN_TOKENS
from longfocus.memory.context import MassRecorder
from longfocus.memory.dense import Scratch
from longfocus.memory.distributed import context, processes
from longfocus.memory.distributed.context import ShardedContext, ShardedPart
from longfocus.memory.distributed.processes import connect
from longfocus.model.parallel_reading import Read
from longfocus.model.reading import not_remembered
from tests.memory.distributed.sharing import (
    OPTIONS,
    WINDOW,
    assert_as_read_here,
    checkpoint,
    large_shards,
    model_of,
    one_memory,
    sharded,
    write_texts,
)
from tests.models import assert_close, logits
from tests.small_tokenizers import VOCABULARY, talking

# not imported here: `connect` says how before Ray is imported
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="the package ray is not installed (pip install 'longfocus[cluster]')",
    ),
]
psutil = pytest.importorskip("psutil")

TOLERANCE = 2e-5  # float32 sums in another order


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One Ray for all tests here."""
    found = connect(OPTIONS)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_texts(tmp_path_factory.mktemp("sharded") / "texts")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("sharded-model") / "tiny")


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def single(model: Any, texts: list[Path]) -> Memory:
    return one_memory(model, texts)


@pytest.fixture(scope="module")
def memory(
    ray: Any, model: Any, texts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ShardedMemory]:
    """Three shards with running processes; tests only ask it."""
    with sharded(tmp_path_factory.mktemp("sharded-memory") / "big.memory", model, texts, shards=3) as made:
        yield made


def prompt(count: int, seed: int = 1, rows: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


RETRIEVALS: dict[str, dict[str, Any]] = {"dense": {}, "exact": {"retrieval": "exact", "k": 7}}


@pytest.mark.parametrize("retrieval", RETRIEVALS)
@pytest.mark.parametrize(
    "more",
    [{}, {"read_span": 100}, {"read_span": 0}, {"window_first": "replaced", "balance_tokens": 20}],
    ids=["all", "near", "none", "balanced"],
)
def test_logits_are_those_of_one_memory(
    memory: ShardedMemory, single: Memory, retrieval: str, more: dict[str, Any]
) -> None:
    model = model_of(**RETRIEVALS[retrieval], **more)
    for count in (1, 5, 3 * WINDOW + 5):
        expected = logits(model, prompt(count), memory=single)
        assert_close(logits(model, prompt(count), memory=memory), expected, TOLERANCE, f"{count} tokens")
        alone = logits(model, prompt(count))
        assert (alone - expected).abs().max() > 0.1, "the memory matters"


@pytest.mark.parametrize("retrieval", RETRIEVALS)
@pytest.mark.parametrize("span", [None, 60])
@pytest.mark.parametrize("balance", [None, 20])
def test_a_padded_batch_sees_what_its_rows_see_alone(
    memory: ShardedMemory, single: Memory, retrieval: str, span: int | None, balance: int | None
) -> None:
    model = model_of(**RETRIEVALS[retrieval], read_span=span, balance_tokens=balance)
    ids, mask = prompt(150, rows=3), torch.ones(3, 150, dtype=torch.int64)
    mask[0, :33], mask[2, :120] = 0, 0
    found, expected = (logits(model, ids, attention_mask=mask, memory=each) for each in (memory, single))
    assert_close(found, expected, TOLERANCE, "logits")


def test_shards_that_search_approximately_give_what_one_memory_gives(ray: Any, tmp_path: Path) -> None:
    """With candidates enough that none of the best is missed: logits, and the mass of each token."""
    pytest.importorskip("faiss")
    model = model_of(retrieval="approximate", k=5, rerank=600)
    memory, single = large_shards(tmp_path / "large.memory", model, shards=2, tokens=TRAIN_TOKENS)
    memory.update_index()
    exactly = model_of(retrieval="exact", k=5)
    with memory:
        for count in (1, 2 * WINDOW + 5):
            expected = logits(exactly, prompt(count), memory=single)
            assert_close(logits(model, prompt(count), memory=memory), expected, TOLERANCE, f"{count} tokens")
        recorders = []
        for asked, each in ((model, memory), (exactly, single)):
            recorder, cache = MassRecorder(each.extent), asked.new_cache(each)
            cache.recorder = recorder
            with torch.no_grad():
                asked(prompt(3), cache=cache, use_cache=True)
            recorder.settle()
            recorders.append(recorder)
    for layer, mass in recorders[1].mass.items():
        assert_close(recorders[0].mass[layer], mass, TOLERANCE, f"mass in layer {layer}")


def test_a_shard_without_an_index_makes_it_once_and_not_within_an_answers_time(ray: Any, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    model = model_of(retrieval="approximate", k=5)
    memory, _ = large_shards(tmp_path / "large.memory", model, shards=2, tokens=TRAIN_TOKENS)
    with memory:
        started = memory.start()
        assert started.index() == 2 * TRAIN_TOKENS
        assert started.index() == 0
    memory = ShardedMemory.open(tmp_path / "large.memory", options=dataclasses.replace(OPTIONS, answer_seconds=1e-4))
    with (
        memory,
        pytest.raises(ShardError, match="did not answer within 0"),
    ):  # the question, not the index before it
        logits(model, prompt(2 * WINDOW), memory=memory)
    memory.update_index()
    with memory:
        assert memory.start().index() == 0, "it is saved"


def test_a_rule_for_k_is_refused_unless_it_has_no_effect() -> None:
    rule, nothing = KRule(least_share=0.1), ShardedPart(lambda: None, (), ())  # type: ignore[arg-type, return-value]
    for options in ({"retrieval": "dense"}, {"retrieval": "exact", "span": 4}, {"retrieval": "approximate", "span": 4}):
        ShardedContext(nothing, None, k=7, scratch=Scratch(), rule=rule, **options)  # type: ignore[arg-type]
    for retrieval in ("exact", "approximate"):
        with pytest.raises(ConfigError, match="k_rule: shards are asked for the k best keys of every query"):
            ShardedContext(nothing, None, retrieval=retrieval, k=7, scratch=Scratch(), rule=rule)


def test_a_selection_is_asked_alone(memory: ShardedMemory, single: Memory, model: Any) -> None:
    for patterns in (("*latin.txt",), ("*cyrillic.txt", "*code.txt", "*spaces.txt")):
        found, expected = (logits(model, prompt(9), memory=each.select(*patterns)) for each in (memory, single))
        assert_close(found, expected, TOLERANCE, f"{patterns}")


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_generation_is_that_of_one_memory(memory: ShardedMemory, single: Memory, retrieval: str) -> None:
    model = model_of(**RETRIEVALS[retrieval])
    for how in ({"do_sample": False}, {"num_beams": 2}):
        mine, theirs = (
            model.generate(
                prompt(5), memory=each, max_new_tokens=WINDOW + 9, min_new_tokens=WINDOW + 9, pad_token_id=0, **how
            )
            for each in (memory, single)
        )
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_mass_and_sources_are_those_of_one_memory(memory: ShardedMemory, single: Memory, retrieval: str) -> None:
    model = model_of(**RETRIEVALS[retrieval])
    found = []
    for each in (memory, single):
        cache = FocusCache(model.focus, each)
        cache.recorder = MassRecorder(each.extent)
        for part in prompt(WINDOW + 9).split(8, 1):
            logits(model, part, cache=cache)
        cache.recorder.queries = WINDOW + 9
        found.append(token_mass(cache.recorder))
    assert found[1].sum() > 0.2
    assert_close(torch.from_numpy(found[0]), torch.from_numpy(found[1]), TOLERANCE, "mass")
    mine, theirs = (passages(each, mass, 4) for each, mass in zip((memory, single), found, strict=True))
    assert [(one.place, one.text, one.start, one.stop) for one in mine] == [
        (one.place, one.text, one.start, one.stop) for one in theirs
    ]


def test_long_passes_ask_in_blocks_and_settle_early(
    memory: ShardedMemory, single: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_VALUES_AT_ONCE", 2 * 6 * 7 * 8 * 5)  # 5 queries of two rows
    monkeypatch.setattr(context, "_UNSETTLED_QUERIES", 4)
    for retrieval in RETRIEVALS.values():
        model = model_of(**retrieval)
        masses = []
        for each in (memory, single):
            cache = FocusCache(model.focus, each)
            recorder = cache.recorder = MassRecorder(each.extent, queries=1)
            found = logits(model, prompt(13, rows=2), cache=cache)
            masses.append((found, torch.from_numpy(token_mass(recorder))))
        for mine, theirs, what in zip(*masses, ("logits", "mass"), strict=True):
            assert_close(mine, theirs, TOLERANCE, what)


def test_a_conversation_with_sources(memory: ShardedMemory, single: Memory, model: Any) -> None:
    answers = []
    for each in (memory, single):
        talk = Conversation(model, talking(None), each, Sampling(max_new_tokens=6))
        answers.append([talk.ask(question) for question in ("Hm?", "So?")])
    for mine, theirs in zip(*answers, strict=True):
        assert (mine.text, [one.place for one in mine.sources]) == (theirs.text, [one.place for one in theirs.sources])
        assert mine.memory_mass == pytest.approx(theirs.memory_mass, abs=1e-5)


def test_a_step_asks_each_shard_once_a_layer_and_all_before_any_answer(
    memory: ShardedMemory, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FocusCache(model.focus, memory)
    logits(model, prompt(3), cache=cache)
    happened: list[str] = []
    send, result = processes.Call._send, processes.Call.result
    monkeypatch.setattr(processes.Call, "_send", lambda call: (happened.append("asked"), send(call))[1])
    monkeypatch.setattr(processes.Call, "result", lambda call: (happened.append("answered"), result(call))[1])
    for recorded in (False, True):
        happened.clear()
        cache.recorder = MassRecorder(memory.extent) if recorded else None
        logits(model, prompt(1), cache=cache)
        assert happened == (["asked"] * 3 + ["answered"] * 3) * len(model.focus.config.layers)


# -- what cannot be --------------------------------------------------------------------------------------------


def test_gradients_and_weights_of_heads_are_refused(memory: ShardedMemory, model: Any) -> None:
    with pytest.raises(UnsupportedCallError, match="no_grad"):
        model(prompt(3), memory=memory)
    with pytest.raises(UnsupportedCallError, match="single heads"):
        head_mass(model, memory, [5, 6])  # type: ignore[arg-type]


def test_a_memory_that_changes_is_asked_as_it_is_and_closing_ends_its_process(
    ray: Any, model: Any, texts: list[Path], tmp_path: Path
) -> None:
    with sharded(tmp_path / "changing.memory", model, texts[:3], shards=1) as memory:
        cache = FocusCache(model.focus, memory)
        logits(model, prompt(3), cache=cache)
        stale = memory.visible()
        memory.remove("*cyrillic.txt")
        with pytest.raises(MemoryStoreError, match="start a new cache"):
            logits(model, prompt(3), cache=cache)
        memory.compact()
        single = one_memory(model, texts[1:3])
        found = logits(model, prompt(5), memory=memory)
        assert_close(found, logits(model, prompt(5), memory=single), TOLERANCE, "after compaction")
        cache = FocusCache(model.focus, memory)
        cache._shared, memory._seen = stale, stale  # as another program would that opened it before
        with pytest.raises(MemoryStoreError, match="compacted or cleared meanwhile"):
            logits(model, prompt(3), cache=cache)
        process = psutil.Process(memory.start().shards[0].pid)
    assert psutil.wait_procs([process], timeout=60)[1] == []


# -- death -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(
    ray: Any, model: Any, texts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ShardedMemory]:
    """Two shards that tests may kill; each leaves it as it was."""
    with sharded(tmp_path_factory.mktemp("mortal") / "mortal.memory", model, texts[:4], shards=2) as memory:
        memory.start()
        yield memory


def kill(memory: ShardedMemory, number: int) -> int:
    """Kill a shard's process, and wait until it is gone."""
    pid = memory.start().shards[number].pid
    process = psutil.Process(pid)
    assert "ShardWorker" in " ".join(process.cmdline())
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([process], timeout=60)
    return pid


def test_a_shard_that_dies_is_started_again_and_the_answer_is_the_same(
    mortal: ShardedMemory, model: Any, texts: list[Path]
) -> None:
    single = one_memory(model, texts[:4])
    cache, other = FocusCache(model.focus, mortal), FocusCache(model.focus, single)
    mine, theirs = cache.recorder, other.recorder = MassRecorder(mortal.extent), MassRecorder(single.extent)
    killed = 0
    for step, part in enumerate(prompt(5).split(1, 1)):
        if step == 2:
            killed = kill(mortal, 1)
        found, expected = logits(model, part, cache=cache), logits(model, part, cache=other)
        assert_close(found, expected, TOLERANCE, f"step {step}")
    assert mortal.start().shards[1].pid not in (0, killed)
    assert [shard.started for shard in mortal.start().shards] == [1, 2]
    mine.queries = theirs.queries = 5
    masses = [torch.from_numpy(token_mass(each)) for each in (mine, theirs)]
    assert_close(masses[0], masses[1], TOLERANCE, "mass, also of queries before the death")


def test_a_dead_shard_whose_files_are_gone_or_broken_fails_the_question_by_name(
    mortal: ShardedMemory, model: Any
) -> None:
    before = logits(model, prompt(3), memory=mortal)
    folder, aside = mortal.folder / "shard-001", mortal.folder / "aside"
    shutil.copytree(folder, aside)
    for damage, message in ((_remove, "holds no memory"), (_truncate, "truncated")):
        damage(folder)
        assert torch.equal(logits(model, prompt(3), memory=mortal), before), "the process holds its files open"
        kill(mortal, 1)
        with pytest.raises(ShardError, match=rf"Shard 1 \(.*shard-001\) died and cannot be started again.*{message}"):
            logits(model, prompt(3), memory=mortal)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(aside, folder)
        assert torch.equal(logits(model, prompt(3), memory=mortal), before), "restored from a copy"
    shutil.rmtree(aside)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _truncate(folder: Path) -> None:
    path = next(folder.glob("kv-001.*.bin"))
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes()[:-1])
    os.replace(copy, path)  # the old file stays for who has it open


def test_a_shard_that_hangs_fails_the_question_and_the_next_one_is_answered(
    mortal: ShardedMemory, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(model, prompt(3), memory=mortal)
    shard = mortal.start().shards[0]
    monkeypatch.setattr(shard, "options", dataclasses.replace(shard.options, answer_seconds=5))
    os.kill(shard.pid, signal.SIGSTOP)
    with pytest.raises(ShardError, match=r"Shard 0 \(.*\) did not answer within 5 s.*--shard-timeout"):
        logits(model, prompt(3), memory=mortal)
    assert torch.equal(logits(model, prompt(3), memory=mortal), before)


# -- reading ---------------------------------------------------------------------------------------------------


def test_reading_in_parallel_keeps_the_order_and_tells_of_what_it_could_not_read(
    ray: Any, model: Any, model_folder: str, texts: list[Path], single: Memory, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.txt"
    gone.write_text("here now")
    sources = find_sources([texts[0], gone, *texts[1:]]).sources
    gone.unlink()
    told: list[Read] = []
    with ShardedMemory.create(
        tmp_path / "read.memory", model, talking(), shards=3, model_source=model_folder, options=OPTIONS
    ) as memory:
        read_in_parallel(memory, sources, told.append, readers=2)
        assert [read.done for read in told] == [1, 2, 3, 4, 5, 6, 7]
        assert [read.source.name for read in told if read.error is not None] == [str(gone)]
        assert told[-1].tokens == memory.tokens == single.tokens
        assert {read.shard for read in told} == {0, 1, 2}, "each has the fewest tokens at some time"
        assert [Path(document.name).name for document in memory.documents] == [path.name for path in texts]
        assert not not_remembered(memory, find_sources(texts).sources)
        for shard in memory.shards:
            documents = [Path(document.path or "") for document in shard.documents]
            assert_as_read_here(shard, one_memory(model, documents))


def test_a_reading_process_that_dies_goes_on_with_its_document(
    ray: Any, model: Any, model_folder: str, tmp_path: Path
) -> None:
    long = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in long:
        path.write_text(f"{path.stem}: It was late; she said that it was neither the captain nor the mate.\n" * 300)
    folder = tmp_path / "killed.memory"
    with ShardedMemory.create(folder, model, talking(), shards=2, model_source=model_folder, options=OPTIONS) as memory:
        killer = subprocess.Popen([sys.executable, "-c", KILLER, str(folder / "shard-000/journal.jsonl")])
        read_in_parallel(memory, find_sources(long).sources, readers=2)
        assert killer.wait(timeout=60) == 0, "a process was killed while it read"
        for number, shard in enumerate(memory.shards):
            assert_as_read_here(shard, one_memory(model, [long[number]]))


KILLER = """
import os, signal, sys, time, psutil
from pathlib import Path

while Path(sys.argv[1]).read_bytes().count(b"\\n") < 3:  # a first line, and two commits
    time.sleep(0.01)
for one in psutil.process_iter(["cmdline"]):
    if "".join(one.info["cmdline"] or []).startswith("ray::ReadingWorker.read"):
        sys.exit(os.kill(one.pid, signal.SIGKILL))
sys.exit("nobody was reading any more")
"""


def test_an_interrupted_document_goes_on_in_its_shard(
    ray: Any, model: Any, model_folder: str, texts: list[Path], tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("It was late; she said that it was neither the captain nor the mate.\n" * 150)

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "interrupted.memory"
    with sharded(folder, model, texts[:3], shards=3, source=model_folder) as memory:
        with Memory.open(folder / "shard-000", model=model, tokenizer=talking(), writable=True) as shard:
            with pytest.raises(KeyboardInterrupt):
                Reader(model, talking(), shard).read(find_sources([long]).sources[0], stop)
            part = shard.documents[-1]
            assert part.tokens
            assert not part.complete
        told: list[Read] = []
        read_in_parallel(memory, find_sources([texts[3], long]).sources, told.append, readers=1)
        whole = next(read for read in told if read.source.name == str(long))
        assert whole.document is not None
        assert (whole.shard, whole.document.id, whole.document.complete) == (0, part.id, True)
        assert whole.document.tokens > part.tokens
        assert [Path(document.name).name for document in memory.documents][-2:] == [texts[3].name, "long.txt"]


def test_the_command_line_from_texts_to_an_answer(
    ray: Any, texts: list[Path], model_folder: str, tmp_path: Path
) -> None:
    """Read on a cluster that runs already; asked on a Ray of the command's own."""
    folder, address = tmp_path / "big.memory", ray.get_runtime_context().gcs_address

    def longfocus(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "longfocus.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    where = ("--ray-address", address, "--threads", 1)
    done = longfocus("remember", *texts[:4], "--into", folder, "--shards", 2, "--model", model_folder, *where)
    assert done.returncode == 0, done.stderr
    assert "2 shards, 4 documents" in done.stderr
    about = json.loads(longfocus("info", folder, "--json").stdout)
    assert [Path(document["name"]).name for document in about["documents"]] == [path.name for path in texts[:4]]
    assert sum(shard["tokens"] for shard in about["shards"]) == about["tokens"]
    assert all(shard["documents"] for shard in about["shards"])
    done = longfocus("ask", folder, "Hm?", "--json", "--max-new-tokens", 3, "--threads", 1)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["memory"] == {"documents": 4, "tokens": about["tokens"], "bytes": about["bytes"]}
    assert len(answer["sources"]) == 5
    assert {source["document"] for source in answer["sources"]} <= {str(path) for path in texts[:4]}

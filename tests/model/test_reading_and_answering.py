"""Documents read window by window, questions answered from them, and where the answers came from.

Tiny random models. What the package computes is held against windows fed by hand, against brute force
(brute_force.py), against softmax weights worked out from the projections' outputs, and, for the authors'
checkpoints, against their behaviour written anew (authors_longllama.py).

    python -m pytest tests/model/test_reading_and_answering.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from longfocus import (
    Conversation,
    FocusCache,
    FocusConfig,
    Memory,
    Reader,
    Sampling,
    attach,
    find_sources,
    load,
    load_tokenizer,
    read_ids,
)
from longfocus.analysis.attribution import NEUTRAL_QUESTION, PASSAGE_TOKENS, Passage, passages, window_starts
from longfocus.errors import ConfigError, PromptTooLongError
from longfocus.memory.documents import TOKEN_DTYPE, Document
from longfocus.model import focused as focused_module
from longfocus.model import reading_pass
from tests.data.pdf import pdf
from tests.memory.saved import assert_same, held
from tests.model.authors_longllama import AuthorsLongLlama
from tests.model.brute_force import focused_logits, walk
from tests.model.helpers import FLOAT32, WINDOWS
from tests.models import MEMORY_LAYERS, assert_close, logits, tiny, tokens
from tests.small_tokenizers import BOS, EOS, SAMPLES, TEMPLATES, VOCABULARY, talking, tokenizer

WINDOW = 24
TEXT = "".join(SAMPLES[name] for name in ("latin", "cyrillic", "code"))


def focused(
    name: str = "llama", *, dtype: torch.dtype = torch.float32, changes: dict[str, Any] | None = None, **options: Any
) -> Any:
    model = tiny(name, dtype=dtype, vocab_size=VOCABULARY, **(changes or {}))
    return attach(model, FocusConfig(**{"memory_layers": MEMORY_LAYERS, "window": WINDOW, **options}))


def written(folder: Path, **texts: str) -> list[Path]:
    """Files of these names, in this order."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.txt")
        paths[-1].write_text(text, newline="")
    return paths


def remembered(model: Any, *paths: Path, words: Any = None) -> Memory:
    words = tokenizer("byte_level") if words is None else words
    memory = Memory(model, words)
    reader = Reader(model, words, memory)
    for source in find_sources(paths).sources:
        reader.read(source)
    return memory


def ids_of(text: str) -> Tensor:
    return torch.tensor([tokenizer("byte_level")(text)["input_ids"]])


# -- reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 5])
def test_a_document_equals_the_same_windows_fed_by_hand(overlap: int, tmp_path: Path) -> None:
    model = focused(overlap=overlap)
    memory = remembered(model, *written(tmp_path, text=TEXT))
    by_hand = Memory(model)
    cache = FocusCache(model.focus, own=by_hand.store)
    ids, at, room = ids_of(TEXT), 0, WINDOW
    while at < ids.shape[1]:
        model.read_window(ids[:, at : at + room], cache)
        at, room = at + room, WINDOW - overlap
    assert memory.tokens == by_hand.store.tokens == ids.shape[1] > 6 * WINDOW
    for layer in MEMORY_LAYERS:
        mine, theirs = (next(iter(store.chunks(layer))) for store in (memory.store, by_hand.store))
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


SIDE_BY_SIDE: dict[str, dict[str, Any]] = {
    "dense": {},
    "read span": {"read_span": 40},
    "read span of one window": {"read_span": 24},
    "reading sees nothing": {"read_span": 0},
    "top-k": {"retrieval": "exact", "k": 7},
    "top-k within a span": {"retrieval": "exact", "k": 7, "read_span": 60},
    "int8": {"memory_dtype": "int8"},
    "float16": {"memory_dtype": "float16"},
    "no positions": {"memory_positions": "none"},
    "absolute positions": {"memory_positions": "absolute"},
    "overlap": {"overlap": 5},
    "short last window": {"last_window": 3},
    "firsts replaced": {"window_first": "replaced"},
    "balanced": {"balance_tokens": 9},
    "balanced within a span": {"balance_tokens": 9, "read_span": 40, "window_first": "replaced"},
    "balanced top-k": {"balance_tokens": 9, "retrieval": "exact", "k": 7},
}


@pytest.mark.parametrize("options", SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox"])
def test_windows_side_by_side_equal_windows_one_after_another(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits after a long text, and after a question to a memory of one text while another is read behind it."""
    text, question = ids_of(TEXT), ids_of("def f(x):\n    return" * 9)
    found: list[list[Tensor]] = []
    passes: list[int] = []
    original = reading_pass.read_side_by_side

    def watched(focus: Any, inputs: Any, cache: Any) -> None:
        passes.append(next(iter(inputs.values())).shape[1])
        original(focus, inputs, cache)

    for module in (reading_pass, focused_module):
        monkeypatch.setattr(module, "read_side_by_side", watched)
    for at_once in (1, 3 * WINDOW, 10_000):
        monkeypatch.setattr(reading_pass, "PASS_TOKENS", at_once)
        model = focused(name, dtype=torch.float64, **options)
        memory = Memory(model)
        read_ids(model, text, memory)
        with torch.no_grad():
            alone = model(text, use_cache=True, logits_to_keep=2).logits
            both = model(question, memory=memory, use_cache=True, logits_to_keep=2).logits
        found.append([alone, both, held(memory).records[MEMORY_LAYERS[-1]]])
        joined = at_once > 1 and not {"overlap"} & set(options) and options.get("memory_positions") != "absolute"
        assert bool(passes) == joined
        assert all(tokens % WINDOW == 0 and tokens <= max(at_once, 1) for tokens in passes)
        passes.clear()
    for one, other in zip(found[0] * 2, found[1] + found[2], strict=True):
        assert_close(one.double(), other.double(), WINDOWS, name)


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "llama_yarn"])
def test_records_of_the_first_memory_layer_are_those_of_the_plain_model(
    name: str, overlap: int, tmp_path: Path
) -> None:
    """Below it no memory is seen, so a plain transformers model over each window's local tokens gives its input."""
    model = focused(name, dtype=torch.float64, overlap=overlap)
    memory = remembered(model, *written(tmp_path, text=TEXT))
    plain: Any = tiny(name, dtype=torch.float64, vocab_size=VOCABULARY)
    layer: Any = plain.base_model.layers[MEMORY_LAYERS[0]]
    inputs: list[Tensor] = []
    attention = layer.attention if name == "gpt_neox" else layer.self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs.get("hidden_states", args[0] if args else None)),
        with_kwargs=True,
    )
    ids, expected, at = ids_of(TEXT), [], 0
    while at < ids.shape[1]:
        start = max(0, at - overlap)
        stop = at + (WINDOW if at == 0 else WINDOW - overlap)
        logits(plain, ids[:, start:stop])
        expected.append(_key_values(name, attention, inputs[-1])[at - start :])
        at = stop
    records = held(memory).records[MEMORY_LAYERS[0]]
    amplitude = torch.tensor([[model.focus.tables[MEMORY_LAYERS[0]].amplitude], [1.0]], dtype=torch.float64)
    assert_close(records, torch.cat(expected) * amplitude.view(2, 1, 1), WINDOWS, f"{name}, overlap {overlap}")


def _key_values(name: str, attention: Any, hidden: Tensor) -> Tensor:
    """(tokens, 2, Hkv, D): keys not rotated, and values."""
    with torch.no_grad():
        if name == "gpt_neox":
            heads = attention.query_key_value(hidden).view(hidden.shape[1], 6, 3, 8)
            return torch.stack((heads[:, :, 1], heads[:, :, 2]), 1)
        key, value = (project(hidden).view(hidden.shape[1], 2, 8) for project in (attention.k_proj, attention.v_proj))
        if name == "qwen3":
            key = attention.k_norm(key)
        return torch.stack((key, value), 1)


@pytest.mark.parametrize("span", [None, 0, 1, 17, 40])
@pytest.mark.parametrize(("name", "overlap"), [("llama", 0), ("llama", 5), ("gemma3", 0), ("phi3", 3)])
def test_answers_from_a_memory_equal_brute_force(name: str, overlap: int, span: int | None, tmp_path: Path) -> None:
    """Text and question in one big mask; `read_span` limits what reading saw, never what the question sees."""
    model = focused(name, dtype=torch.float64, overlap=overlap, read_span=span)
    text, question = SAMPLES["latin"] + SAMPLES["code"], tokens(1, 9)
    memory = remembered(model, *written(tmp_path, text=text))
    steps: list[tuple[int, int, bool]] = []
    left, local = memory.tokens, 0
    while left:
        leaving = max(0, local - overlap)
        new = min(left, WINDOW - (local - leaving))
        steps.append((new, leaving, True))
        left, local = left - new, local - leaving + new
    windows = walk([*steps, (question.shape[1], local, False)])
    plain = tiny(name, dtype=torch.float64, vocab_size=VOCABULARY)
    with torch.no_grad():
        expected = focused_logits(
            plain, torch.cat((ids_of(text), question), 1)[0], windows, memory_layers=MEMORY_LAYERS, span=span
        )
    assert_close(
        logits(model, question, memory=memory)[0], expected[-question.shape[1] :], 5 * WINDOWS, "logits of the question"
    )


def test_a_question_to_a_memory_equals_the_text_and_the_question_in_one_call(tmp_path: Path) -> None:
    model = focused(dtype=torch.float64)
    question = tokens(1, 9)
    whole_windows = ids_of(TEXT * 2)[:, : 8 * WINDOW]
    memory = Memory(model)
    read_ids(model, whole_windows, memory)
    together = logits(model, torch.cat((whole_windows, question), 1), cache=model.new_cache(last_window=9))
    assert_close(logits(model, question, memory=memory), together[:, -9:], WINDOWS, "logits of the question")


def test_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """So their order does not matter, memories can be merged, and a document costs the same in a large memory."""
    model = focused()
    paths = written(tmp_path, a=SAMPLES["latin"], b=SAMPLES["cyrillic"], c=SAMPLES["code"])
    alone = [held(remembered(model, path)) for path in paths]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        memory = remembered(model, *[paths[number] for number in order])
        together = held(memory)
        for document, number in zip(memory.documents, order, strict=True):
            part = slice(document.start, document.stop)
            assert document.tokens == alone[number].tokens
            assert together.rows[part] == alone[number].rows
            for layer in MEMORY_LAYERS:
                assert torch.equal(together.records[layer][part], alone[number].records[layer])
    merged = Memory.merge([remembered(model, path) for path in paths], model, tokenizer("byte_level"))
    both = remembered(model, *paths)
    assert_same(held(merged), held(both))
    assert torch.equal(logits(model, tokens(1, 9), memory=merged), logits(model, tokens(1, 9), memory=both))


def test_the_order_of_long_documents_matters_only_by_rounding(tmp_path: Path) -> None:
    """Where chunks of a store end may change the order of sums."""
    model = focused(dtype=torch.float64)
    paths = written(tmp_path, long=TEXT * 4, longer="Another start. " + TEXT * 5)
    first, second = remembered(model, *paths), remembered(model, *paths[::-1])
    for document in first.documents:
        other = next(found for found in second.documents if found.path == document.path)
        for layer in MEMORY_LAYERS:
            mine = held(first).records[layer][document.start : document.stop]
            theirs = held(second).records[layer][other.start : other.stop]
            assert_close(mine, theirs, WINDOWS, f"{document.name}, layer {layer}")


def test_a_tokenizers_leading_token_begins_each_document(tmp_path: Path) -> None:
    words = tokenizer("metaspace")
    model = focused()
    paths = written(tmp_path, a=SAMPLES["latin"] * 2, b=SAMPLES["cyrillic"])
    memory = remembered(model, *paths, words=words)
    for document, path in zip(memory.documents, paths, strict=True):
        text = path.read_text()
        assert memory.token_ids(document.start, document.stop).tolist() == words(text)["input_ids"]
        assert memory.token_ids(document.start, document.start + 1).tolist() == [words.bos_token_id]
        assert memory.text_of(document) == text
        assert memory.span(document, document.start, document.stop) == (0, len(text))


def test_reading_leaves_nothing_in_the_model(tmp_path: Path) -> None:
    model = focused()
    before = logits(model, tokens(2, 40))
    remembered(model, *written(tmp_path, text=TEXT))
    assert torch.equal(logits(model, tokens(2, 40)), before)


def test_a_text_shorter_than_a_window_and_one_of_exactly_two(tmp_path: Path) -> None:
    words = tokenizer("byte_level")
    ids = words(TEXT)["input_ids"]
    for count in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW):
        text = words.decode(ids[:count])
        if words(text)["input_ids"] != ids[:count]:
            continue
        model = focused()
        memory = remembered(model, *written(tmp_path, text=text))
        assert memory.tokens == count
        assert memory.documents[0].complete
        assert memory.text_of(memory.documents[0]) == text


# -- where an answer came from -----------------------------------------------------------------------------


class Watch:
    """Queries and local keys (not rotated) of the memory layers, pass by pass, from the projections' outputs.

    Only for the tiny Llama (6 query heads, 2 key heads of 8 numbers) and texts that stay in one window.
    """

    def __init__(self, model: Any) -> None:
        self.queries: dict[int, list[Tensor]] = {}
        self.keys: dict[int, list[Tensor]] = {}
        for layer in model.focus.config.layers:
            attention = model.model.layers[layer].self_attn
            for kept, project, heads in ((self.queries, attention.q_proj, 6), (self.keys, attention.k_proj, 2)):
                mine = kept.setdefault(layer, [])
                project.register_forward_hook(
                    lambda module, args, out, mine=mine, heads=heads: mine.append(
                        out[0].view(-1, heads, 8).transpose(0, 1).detach()
                    )
                )

    def weights(
        self, layer: int, memory_keys: Tensor, fed: int, scale: float = 8**-0.5, k: int | None = None
    ) -> Tensor:
        """Softmax weights (6, fed, memory tokens) that the last `fed` queries gave to memory, local keys beside them."""
        query, local = (torch.cat(parts[layer], 1) for parts in (self.queries, self.keys))
        position = torch.arange(query.shape[1])
        query, local = _rotated(query, position), _rotated(local, position)
        far = query @ memory_keys.repeat_interleave(3, 0).transpose(1, 2) * scale
        if k is not None:
            far = far.masked_fill(far < far.topk(k, -1).values[..., -1:], -torch.inf)
        near = query @ local.repeat_interleave(3, 0).transpose(1, 2) * scale
        near = near.masked_fill(position > position.unsqueeze(1), -torch.inf)
        return torch.softmax(torch.cat((far, near), -1), -1)[:, -fed:, : memory_keys.shape[1]]


def _rotated(x: Tensor, position: Tensor) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    angle = torch.cat([position.float().unsqueeze(1) * frequency] * 2, 1)
    low, high = x.chunk(2, -1)
    return x * angle.cos().to(x) + torch.cat((-high, low), -1) * angle.sin().to(x)


@pytest.mark.parametrize("options", [{}, {"retrieval": "exact", "k": 7}], ids=["dense", "exact"])
def test_mass_is_the_softmax_weight_of_the_answer_and_of_the_question(options: dict[str, Any], tmp_path: Path) -> None:
    """The answer's as a whole, the question's by passage, beyond a neutral one's: over all their tokens, heads and memory
    layers. First tokens of windows count in the whole, not in passages."""
    model = focused(dtype=torch.float64, changes={"eos_token_id": None}, **{"window": 100, **options})
    memory = remembered(model, *written(tmp_path, a=SAMPLES["latin"] * 3, b=SAMPLES["cyrillic"] * 2))
    assert memory.tokens > 3 * PASSAGE_TOKENS
    answered = 6

    def mass_of(watch: Watch, tokens: int) -> Tensor:
        mass = torch.zeros(memory.tokens, dtype=torch.float64)
        for layer in MEMORY_LAYERS:
            keys = held(memory).records[layer][:, 0].transpose(0, 1)
            mass += watch.weights(layer, keys, tokens, k=options.get("k")).mean((0, 1)) / len(MEMORY_LAYERS)
        return mass

    talk = Conversation(model, talking(), memory, Sampling(max_new_tokens=answered))
    looked = []
    for question in ("Who?", NEUTRAL_QUESTION):
        prompt = talk._prompt_ids(question)[:-1]
        watch = Watch(model)
        logits(model, torch.tensor([prompt]), memory=memory)
        looked.append(mass_of(watch, len(prompt)))
    watch = Watch(model)
    answer = talk.ask("Who?")
    assert answer.tokens == answered
    for kept in (watch.queries, watch.keys):
        for parts in kept.values():
            del parts[-2:]  # the last answer token and the neutral question were fed afterwards
    mass = mass_of(watch, answered)
    assert 0.05 < float(mass.sum()) < 1
    assert answer.memory_mass == pytest.approx(float(mass.sum()), abs=1e-9)

    first_of_windows = []
    for document in memory.documents:
        first_of_windows += list(range(document.start, document.stop, 100))
    for each in looked:
        each[first_of_windows] = 0
    expected = {}
    for document in memory.documents:
        for start in range(document.start, document.stop, PASSAGE_TOKENS):
            stop = min(start + PASSAGE_TOKENS, document.stop)
            expected[start, stop] = [float(each[start:stop].sum()) for each in looked]
    sources = Conversation(model, talking(), memory, Sampling(max_new_tokens=1)).ask("Who?", sources=99).sources
    assert {(found.start, found.stop) for found in sources} == set(expected)
    for found in sources:
        asked, neutral = expected[found.start, found.stop]
        assert found.mass == pytest.approx(asked, abs=1e-9)
        assert found.beyond == pytest.approx(asked - neutral, abs=1e-9)
    order = [found.beyond for found in sources]
    assert order == sorted(order, reverse=True) and order[0] > 0


def test_a_neutral_question_is_asked_once_in_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = focused(changes={"eos_token_id": None}, window=100)
    memory = remembered(model, *written(tmp_path, a=SAMPLES["latin"] * 3))
    talk = Conversation(model, talking(), memory, Sampling(max_new_tokens=1))
    fed: list[Any] = []
    original = Conversation._feed

    def watched(self: Conversation, ids: list[int], cache: Any, recorder: Any) -> None:
        fed.append((cache is talk._cache, recorder is not None))
        original(self, ids, cache, recorder)

    monkeypatch.setattr(Conversation, "_feed", watched)
    found = [talk.ask(question, sources=2).sources for question in ("Who?", "Who?")]
    assert [len(sources) for sources in found] == [2, 2]
    assert fed.count((False, True)) == 1, "and only when sources are wanted"
    fed.clear()
    assert talk.ask("Why?", sources=0).sources == []
    assert not any(recorded for _, recorded in fed)


def planted(memory: Memory, model: Any, words: Any, token: int, key: Tensor) -> Memory:
    """The same memory with another key (layers, Hkv, D) at one token."""
    was = held(memory)
    changed = Memory(model, words)
    table = np.array(was.rows, dtype=TOKEN_DTYPE)
    for old in memory.documents:
        document = changed.begin_document(old.name, kind=old.kind, path=old.path)
        records = {}
        for number, layer in enumerate(model.focus.config.layers):
            records[layer] = was.records[layer][old.start : old.stop].clone().unsqueeze(0)
            if old.start <= token < old.stop:
                records[layer][0, token - old.start, 0] = key[number]
        changed.store.append(records)
        text = memory.text_of(old)
        changed.commit_window(document, table[old.start : old.stop], text.encode(), len(text), complete=True)
    return changed


def towards_the_question(model: Any, words: Any, question: str) -> Tensor:
    """A long key (1, Hkv, D) in the direction in which the last prompt token looks, for a model with one memory layer."""
    alone = attach(tiny("llama", vocab_size=VOCABULARY, eos_token_id=None), model.focus.config)
    watch = Watch(alone)
    Conversation(alone, words, None, Sampling(max_new_tokens=1)).ask(question)
    (layer,) = model.focus.config.layers
    query = torch.cat(watch.queries[layer][:-1], 1)
    query = _rotated(query, torch.arange(query.shape[1]))[:, -1]
    return 40 * torch.nn.functional.normalize(query.view(2, 3, 8).sum(1), dim=-1).unsqueeze(0)


def towards_this_question(model: Any, words: Any, question: str) -> Tensor:
    """A long key (1, Hkv, D) in the direction in which a question's tokens look more than those of a neutral one."""
    alone = attach(tiny("llama", vocab_size=VOCABULARY, eos_token_id=None), model.focus.config)
    (layer,) = model.focus.config.layers
    means = []
    for asked in (question, NEUTRAL_QUESTION):
        watch = Watch(alone)
        logits(alone, torch.tensor([Conversation(alone, words, None)._prompt_ids(asked)[:-1]]))
        query = torch.cat(watch.queries[layer], 1)
        means.append(_rotated(query, torch.arange(query.shape[1])).mean(1))
    more = (means[0] - means[1]).view(2, 3, 8).sum(1)
    return 40 * torch.nn.functional.normalize(more, dim=-1).unsqueeze(0)


@pytest.mark.parametrize("token", [70, 150, 333, 401])
def test_a_planted_key_ranks_its_passage_first(token: int, tmp_path: Path) -> None:
    model, words = focused(memory_layers=(1,), window=60, changes={"eos_token_id": None}), talking()
    memory = remembered(model, *written(tmp_path, a=TEXT, b=SAMPLES["greek"] * 3 + TEXT), words=words)
    document = memory.document_of(token)
    assert (token - document.start) % 60, "not the first token of a window"
    changed = planted(memory, model, words, token, towards_this_question(model, words, "Who?"))
    before, after = (
        Conversation(model, words, kept, Sampling(max_new_tokens=1)).ask("Who?", sources=3)
        for kept in (memory, changed)
    )
    found = after.sources[0]
    assert found.start <= token < found.stop
    assert found.beyond > 2 * before.sources[0].beyond
    assert found.beyond > 2 * after.sources[1].beyond
    assert found.place.document == document.name
    first, last = changed.span(document, token, token + 1)
    text = changed.text_of(document)
    assert text[first:last].strip("\n") in found.text
    assert text.splitlines()[found.place.line - 1] == found.text.splitlines()[0]


@pytest.mark.parametrize("overlap", [0, 7])
def test_the_first_token_of_a_window_never_makes_a_passage(overlap: int, tmp_path: Path) -> None:
    """It draws attention whatever it says; a key planted there moves the whole mass and no passage."""
    model, words = focused(memory_layers=(1,), overlap=overlap, window=60, changes={"eos_token_id": None}), talking()
    memory = remembered(model, *written(tmp_path, a=SAMPLES["latin"], b=TEXT), words=words)
    document = memory.documents[1]
    firsts = [document.start, document.start + 60, document.start + 60 + 2 * (60 - overlap)]
    key = towards_the_question(model, words, "Who?")
    for token in firsts:
        changed = planted(memory, model, words, token, key)
        answer = Conversation(model, words, changed, Sampling(max_new_tokens=1)).ask("Who?", sources=99)
        assert answer.memory_mass > 0.5
        assert max(found.mass for found in answer.sources) < 0.3


@pytest.mark.parametrize("overlap", [0, 7])
def test_window_starts_are_the_tokens_that_began_a_window(
    overlap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_pass, "PASS_TOKENS", 1)  # a window at a time
    model = focused(overlap=overlap)
    paths = written(tmp_path, a=SAMPLES["latin"], b=TEXT, c="short")
    memory = Memory(model, tokenizer("byte_level"))
    began: list[int] = []
    reader = Reader(model, tokenizer("byte_level"), memory)
    for source in find_sources(paths).sources:
        reader.read(source, lambda step: began.append(step.document.stop - step.tokens))
    assert np.flatnonzero(window_starts(memory)).tolist() == began
    merged = Memory.merge([memory, memory], model, tokenizer("byte_level"))
    assert np.flatnonzero(window_starts(merged)).tolist() == began + [memory.tokens + token for token in began]


def every_passage(memory: Memory) -> list[Passage]:
    return passages(memory, np.ones(memory.tokens), 10_000)


def check_places(memory: Memory) -> None:
    """Every passage shows the text of its tokens, and its line is the line on which the shown text begins."""
    documents: dict[str, Document] = {document.name: document for document in memory.documents}
    found = every_passage(memory)
    assert sum(passage.stop - passage.start for passage in found) == sum(
        document.tokens for document in memory.documents
    )
    for passage in found:
        document = documents[passage.place.document]
        text = memory.text_of(document)
        first, last = memory.span(document, passage.start, passage.stop)
        assert text[first:last].strip("\n") in passage.text
        if not passage.text:
            continue
        assert passage.place.line is not None
        line = text.split("\n")[passage.place.line - 1]
        shown = passage.text.split("\n")[0]
        assert shown == line or (len(line) > 400 and shown in line), (
            f"line {passage.place.line} is {line!r}, shown: {shown!r}"
        )


PLACES = {
    "lines": "".join(f"{number} {SAMPLES['latin']}" for number in range(30)),
    "many scripts": "".join(SAMPLES.values()) * 2,
    "windows line ends": "".join(f"line {number}\r\n" for number in range(200)),
    "blank lines": "".join(f"paragraph {number} says so.\n\n\n\n\n" for number in range(60)),
    "mostly blank": "a\n" + "\n" * 700 + "b\n",
    "one long line": "word and word, " * 300 + "\n" + SAMPLES["latin"] * 5,
    "no line end": "just one line of some length without an end " * 5,
    "code": SAMPLES["code"].replace("\r\n", "\n") * 30,
}


@pytest.mark.parametrize("name", PLACES)
def test_places_point_at_the_line_on_which_the_shown_text_begins(name: str, tmp_path: Path) -> None:
    check_places(remembered(focused(), *written(tmp_path, text=PLACES[name])))


@pytest.mark.parametrize("kind", ["metaspace", "unsplit", "unigram"])
def test_places_are_right_with_other_tokenizers(kind: str, tmp_path: Path) -> None:
    paths = written(tmp_path, lines=PLACES["lines"], blank=PLACES["blank lines"])
    check_places(remembered(focused(), *paths, words=tokenizer(kind)))


def test_places_in_a_pdf_are_pages(tmp_path: Path) -> None:
    pages = [[f"Page {number} has line {line}." for line in range(number)] for number in range(1, 12)]
    path = tmp_path / "paper.pdf"
    path.write_bytes(pdf(pages))
    memory = remembered(focused(), path)
    found = every_passage(memory)
    assert len(found) > 5
    for passage in found:
        assert passage.place.line is None
        assert passage.text.startswith(f"Page {passage.place.page} has line ")
        assert str(passage.place) == f"{path}, page {passage.place.page}"


def test_token_ids_without_text_are_no_passage(tmp_path: Path) -> None:
    model = focused()
    memory = remembered(model, *written(tmp_path, text=SAMPLES["latin"]))
    read_ids(model, range(3, 90), memory)
    assert {passage.place.document for passage in every_passage(memory)} == {str(tmp_path / "text.txt")}


# -- conversations -----------------------------------------------------------------------------------------


@pytest.fixture
def talk_model() -> Any:
    """A model whose answers never end by themselves, so that their lengths are known."""
    return focused(window=200, changes={"eos_token_id": None})


@pytest.fixture
def talk_memory(talk_model: Any, tmp_path: Path) -> Memory:
    return remembered(talk_model, *written(tmp_path, text=TEXT), words=talking())


def fed_to(model: Any) -> list[int]:
    """All tokens that go through the model from now on, in order."""
    fed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.extend(args[0][0].tolist()))
    return fed


@pytest.mark.parametrize("ends", [False, True], ids=["cut off", "ended"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_two_turns_are_one_transcript(template: str, ends: bool, tmp_path: Path) -> None:
    """What the model is fed in two turns is what its template makes of the two questions and the first answer."""
    words = talking(template)
    model = focused(window=200, changes={"eos_token_id": None})
    probe = Conversation(model, words, None, Sampling(max_new_tokens=4))
    probe.ask("What is it?")
    fed = fed_to(model)
    asked = words.apply_chat_template(
        [{"role": "user", "content": "What is it?"}], add_generation_prompt=True, tokenize=False
    )
    first = words(asked, add_special_tokens=False)["input_ids"]
    if ends:  # the fourth token of the answer is the one that ends it, so a turn of the template's form has been said
        model.register_forward_hook(_say(words.eos_token_id, len(first) + 3))
        model.generation_config.eos_token_id = words.eos_token_id
    talk = Conversation(model, words, None, Sampling(max_new_tokens=4 if not ends else 20))
    answer = talk.ask("What is it?")
    assert (answer.stopped, answer.tokens) == (("end", 4) if ends else ("length", 4))
    assert fed[: len(first)] == first
    said = fed[len(first) :]
    assert len(said) == 4
    assert (said[-1] == words.eos_token_id) == ends
    talk.ask("And why?")
    transcript = words.apply_chat_template(
        [
            {"role": "user", "content": "What is it?"},
            {"role": "assistant", "content": "@@@"},
            {"role": "user", "content": "And why?"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    before, after = transcript.split("@@@")
    assert before == asked
    second = words(after, add_special_tokens=False)["input_ids"]
    assert second[0] == words.eos_token_id
    expected = [*first, *(said[:-1] if ends else said), *second]
    assert fed[: len(expected)] == expected
    assert len(fed) <= len(expected) + 20


def _say(token: int, at: int) -> Any:
    """A hook that makes a model say this token after it has been fed so many tokens."""
    seen = 0

    def hook(module: Any, args: Any, output: Any) -> None:
        nonlocal seen
        seen += args[0].shape[1] if args else 0
        if output.cache is not None and output.cache.seen == at:
            output.logits[:, -1] = -torch.inf
            output.logits[:, -1, token] = 0

    return hook


def test_without_a_chat_template_turns_are_questions_and_answers(talk_model: Any) -> None:
    words = talking(None)
    fed = fed_to(talk_model)
    talk = Conversation(talk_model, words, None, Sampling(max_new_tokens=3))
    talk.ask("What is it?")
    first = words("Question: What is it?\nAnswer:")["input_ids"]
    assert fed[: len(first)] == first
    said = fed[len(first) :]
    talk.ask("And why?")
    second = words("\n\nQuestion: And why?\nAnswer:", add_special_tokens=False)["input_ids"]
    assert fed[: len(first) + 3 + len(second)] == [*first, *said, *second]


def test_a_leading_token_is_said_once(talk_model: Any) -> None:
    words = tokenizer("metaspace")
    fed = fed_to(talk_model)
    talk = Conversation(talk_model, words, None, Sampling(max_new_tokens=3))
    talk.ask("What is it?")
    talk.ask("And why?")
    assert fed[0] == words.bos_token_id
    model_said = 2 * 3
    assert fed.count(words.bos_token_id) <= 1 + model_said
    assert words.bos_token_id not in fed[1 : len(words("Question: What is it?\nAnswer:")["input_ids"])]


def test_the_answer_is_what_generate_gives_for_the_prompt(talk_model: Any, talk_memory: Memory) -> None:
    words = talking()
    pieces: list[str] = []
    answer = Conversation(talk_model, words, talk_memory, Sampling(max_new_tokens=12)).ask(
        "What is it?", emit=pieces.append
    )
    prompt = _chat_ids(words, "What is it?")
    whole = talk_model.generate(prompt, memory=talk_memory, max_new_tokens=12, do_sample=False, pad_token_id=0)
    said = whole[0, prompt.shape[1] :]
    assert answer.text == words.decode(said, skip_special_tokens=True).strip()
    assert "".join(pieces).strip() == answer.text
    assert (answer.tokens, answer.stopped) == (12, "length")


def _chat_ids(words: Any, question: str) -> Tensor:
    text = words.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return torch.tensor([words(text, add_special_tokens=False)["input_ids"]])


def test_the_second_question_sees_the_first_answer(talk_model: Any, talk_memory: Memory) -> None:
    """It is answered as if question, answer and question had been given to generate at once."""
    words = talking()
    fed = fed_to(talk_model)
    talk = Conversation(talk_model, words, talk_memory, Sampling(max_new_tokens=10))
    talk.ask("What is it?", sources=0)  # no neutral question is fed
    start = len(fed)
    second = talk.ask("And why?", sources=0)
    transcript = fed[: start + _turn_length(words)]
    whole = talk_model.generate(
        torch.tensor([transcript]), memory=talk_memory, max_new_tokens=10, do_sample=False, pad_token_id=0
    )
    assert second.text == words.decode(whole[0, len(transcript) :], skip_special_tokens=True).strip()
    alone = Conversation(talk_model, words, talk_memory, Sampling(max_new_tokens=10)).ask("And why?")
    assert alone.text != second.text


def _turn_length(words: Any) -> int:
    """Tokens of a second turn asking `And why?`."""
    text = words.apply_chat_template(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "@@@"},
            {"role": "user", "content": "And why?"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    return len(words(text.split("@@@")[1], add_special_tokens=False)["input_ids"])


def test_conversations_leave_the_memory_as_it_was(tmp_path: Path) -> None:
    """Also long ones, whose window overflows many times: a fresh conversation gives the fresh answer."""
    model, words = focused(window=48, changes={"eos_token_id": None}), talking()
    memory = remembered(model, *written(tmp_path, text=TEXT), words=words)
    before = held(memory)
    fresh = Conversation(model, words, memory, Sampling(max_new_tokens=30)).ask("Who?")
    talk = Conversation(model, words, memory, Sampling(max_new_tokens=90))
    for question in ("Who?", "Why?", "Where?"):
        assert talk.ask(question).tokens == 90
    assert_same(held(memory), before)
    again = Conversation(model, words, memory, Sampling(max_new_tokens=30)).ask("Who?")
    assert again == fresh


def test_a_long_answer_equals_generate_over_several_overflows(tmp_path: Path) -> None:
    model, words = focused(window=48, changes={"eos_token_id": None}), talking()
    memory = remembered(model, *written(tmp_path, text=TEXT), words=words)
    answer = Conversation(model, words, memory, Sampling(max_new_tokens=130)).ask("Who?")
    prompt = _chat_ids(words, "Who?")
    whole = model.generate(prompt, memory=memory, max_new_tokens=130, do_sample=False, pad_token_id=0)
    assert answer.text == words.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True).strip()


def test_a_question_must_fit_the_window(talk_model: Any) -> None:
    words = talking(None)
    frame = len(words("Question: \nAnswer:")["input_ids"])
    model = focused(window=frame + 20, changes={"eos_token_id": None})
    fits = "a" * 60
    while len(words(f"Question: {fits}\nAnswer:")["input_ids"]) > frame + 20:
        fits = fits[1:]
    assert len(words(f"Question: {fits}\nAnswer:")["input_ids"]) == frame + 20
    talk = Conversation(model, words, None, Sampling(max_new_tokens=2))
    too_long = fits + " and more"
    taken = len(words(f"Question: {too_long}\nAnswer:")["input_ids"])
    with pytest.raises(
        PromptTooLongError, match=f"The question takes {taken} tokens, more than the local window of {frame + 20}"
    ):
        talk.ask(too_long)
    after_refusal = talk.ask(fits)
    assert after_refusal == Conversation(model, words, None, Sampling(max_new_tokens=2)).ask(fits)
    with pytest.raises(PromptTooLongError):
        talk.ask(too_long)


def test_without_a_memory_there_are_no_sources(talk_model: Any) -> None:
    answer = Conversation(talk_model, talking(), None, Sampling(max_new_tokens=3)).ask("Who?")
    assert (answer.sources, answer.memory_mass) == ([], 0.0)


def test_sources_are_as_many_as_asked(talk_model: Any, talk_memory: Memory) -> None:
    for count in (0, 1, 3):
        answer = Conversation(talk_model, talking(), talk_memory, Sampling(max_new_tokens=2)).ask("Who?", sources=count)
        assert len(answer.sources) == count
        assert answer.memory_mass > 0


def test_sampling_is_the_same_for_a_seed(talk_model: Any, talk_memory: Memory) -> None:
    def say(seed: int, temperature: float) -> str:
        sampling = Sampling(max_new_tokens=12, temperature=temperature, seed=seed)
        return Conversation(talk_model, talking(), talk_memory, sampling).ask("Who?").text

    assert say(1, 1.0) == say(1, 1.0)
    assert len({say(seed, 1.0) for seed in range(4)}) > 1
    assert len({say(seed, 0.0) for seed in range(3)}) == 1


@pytest.mark.parametrize("moment", ["question", "answer"])
@pytest.mark.parametrize("turn", [1, 2])
def test_after_an_interruption_a_conversation_goes_on_without_the_broken_turn(
    turn: int, moment: str, tmp_path: Path
) -> None:
    """It starts over, or goes on after the turn before; nothing of the broken turn is left."""
    model, words = focused(window=60, changes={"eos_token_id": None}), talking()
    memory = remembered(model, *written(tmp_path, text=TEXT), words=words)
    before = held(memory)

    def conversation() -> Conversation:
        talk = Conversation(model, words, memory, Sampling(max_new_tokens=50))
        if turn == 2:
            talk.ask("Who?")
        return talk

    fresh = Conversation(model, words, memory, Sampling(max_new_tokens=50)).ask("Where?")
    going_on = conversation().ask("Where?")
    talk = conversation()
    left = 0 if moment == "question" else 20

    def interrupt(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(interrupt)
    try:
        assert talk.ask("Why?").stopped == "interrupt"
    except KeyboardInterrupt:
        assert moment == "question"
    hook.remove()
    assert talk.ask("Where?") in (fresh, going_on)
    assert_same(held(memory), before)


# -- the authors' checkpoints ------------------------------------------------------------------------------

AUTHORS = {
    "architectures": ["LongLlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_longllama.LongLlamaForCausalLM"},
    "model_type": "longllama",
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "hidden_act": "silu",
    "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
    "use_cache": True,
    "transformers_version": "4.30.0",
    "mem_layers": [1, 3],
    "mem_positionals": True,
    "mem_dtype": "bfloat16",
    "mem_attention_grouping": [4, 2048],
    "last_context_length": 10,
    "gradient_checkpoint_every_ith": 1,
    "torch_attention": False,
}
"""A config.json in the form of the authors' 3B checkpoint, with small numbers."""

AUTHORS_TOLERANCE = 2e-6
"""float64 models on both sides; norms and rotary tables are float32, whose last bits may differ."""


def authors_checkpoint(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write one, and return its config and weights."""
    config = {**AUTHORS, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    heads = config.get("num_key_value_heads", 6)
    model = tiny("llama", vocab_size=VOCABULARY, num_key_value_heads=heads, dtype=torch.float64)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return config, model.state_dict()


def load_authors(folder: Path, **options: Any) -> Any:
    with pytest.warns(UserWarning, match="Fields of this LongLLaMA config that are not used: mem_attention_grouping"):
        return load(folder, **options)


@pytest.mark.parametrize(
    ("last", "positionals", "mem_dtype"),
    [
        (10, True, "bfloat16"),
        (10, False, "bfloat16"),
        (WINDOW, True, "float32"),
        (WINDOW, False, "float16"),
        (40, True, "bfloat16"),
        (40, False, "float32"),
    ],
)
def test_authors_checkpoints_behave_as_their_code(last: int, positionals: bool, mem_dtype: str, tmp_path: Path) -> None:
    """All logits of prompts around every edge, then steps over two overflows of the local window."""
    changes = {"last_context_length": last, "mem_positionals": positionals, "mem_dtype": mem_dtype}
    config, weights = authors_checkpoint(tmp_path, **changes)
    model = load_authors(tmp_path)
    assert model.dtype == torch.float64
    edges = {1, last - 1, last, last + 1, last + WINDOW - 1, last + WINDOW, last + WINDOW + 1, last + 2 * WINDOW, 91}
    for count in sorted(edges):
        steps = 2 * WINDOW + 5 if count in (1, last + 1, 91) else 1
        ids = tokens(1, count + steps, seed=count)[0]
        authors = AuthorsLongLlama(weights, config)
        cache = model.new_cache()
        what = f"prompt of {count} tokens"
        assert_close(
            logits(model, ids[None, :count], cache=cache)[0], authors.prompt(ids[:count]), AUTHORS_TOLERANCE, what
        )
        for at in range(count, len(ids)):
            mine = logits(model, ids[None, at : at + 1], cache=cache)[0, 0]
            assert_close(mine, authors.step(int(ids[at])), AUTHORS_TOLERANCE, f"{what}, then {at - count + 1} steps")


def test_authors_checkpoints_in_float32_and_with_grouped_heads(tmp_path: Path) -> None:
    config, weights = authors_checkpoint(tmp_path, num_key_value_heads=2, mem_dtype="float32", torch_dtype="float32")
    model = load_authors(tmp_path)
    assert model.dtype == torch.float32
    ids = tokens(1, 71)[0]
    authors = AuthorsLongLlama({name: weight.float() for name, weight in weights.items()}, config)
    assert_close(logits(model, ids[None])[0], authors.prompt(ids), FLOAT32, "logits")


def test_authors_checkpoints_generate_as_their_code(tmp_path: Path) -> None:
    config, weights = authors_checkpoint(tmp_path)
    model = load_authors(tmp_path)
    ids = tokens(1, 60)[0]
    authors = AuthorsLongLlama(weights, config)
    token = int(authors.prompt(ids)[-1].argmax())
    expected = [token]
    while len(expected) < 3 * WINDOW:
        token = int(authors.step(token).argmax())
        expected.append(token)
    out = model.generate(ids[None], max_new_tokens=3 * WINDOW, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out[0, 60:].tolist() == expected


def test_the_last_window_of_an_authors_checkpoint_can_be_set_in_the_call(tmp_path: Path) -> None:
    """`last_context_length=` is a keyword of the authors' generate."""
    config, weights = authors_checkpoint(tmp_path)
    model = load_authors(tmp_path)
    ids = tokens(1, 60)[0]
    expected = AuthorsLongLlama(weights, {**config, "last_context_length": 17}).prompt(ids)[-1]
    out = model.generate(
        ids[None],
        last_context_length=17,
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert_close(out.logits[0][0], expected.float(), FLOAT32, "logits")


def test_fields_of_the_authors_become_ours(tmp_path: Path) -> None:
    authors_checkpoint(tmp_path, mem_positionals=False, last_context_length=40)
    focus = load_authors(tmp_path).focus.config
    assert focus == FocusConfig(
        memory_layers=(1, 3),
        window=WINDOW,
        overlap=0,
        last_window=40,
        memory_positions="none",
        memory_dtype="bfloat16",
        overflow="all",
    )
    for name in ("mem_positionals", "mem_dtype", "last_context_length"):  # what the authors' class would assume
        authors_checkpoint(tmp_path, **{name: None})
        focus = load_authors(tmp_path).focus.config
        assert (focus.memory_positions, focus.memory_dtype) == ("first", "bfloat16")
        assert focus.last_window == (1024 if name == "last_context_length" else 10)


def test_options_may_change_single_fields_of_an_authors_checkpoint(tmp_path: Path) -> None:
    authors_checkpoint(tmp_path)
    model = load_authors(tmp_path, overflow="slide", retrieval="exact", k=5)
    assert (model.focus.config.overflow, model.focus.config.retrieval, model.focus.config.layers) == (
        "slide",
        "exact",
        (1, 3),
    )


def test_every_ignored_field_of_the_authors_is_named(tmp_path: Path) -> None:
    authors_checkpoint(tmp_path, context_window=999)
    with pytest.warns(UserWarning, match="not used") as caught:
        load(tmp_path)
    message = str(caught[0].message)
    for name in ("mem_attention_grouping", "gradient_checkpoint_every_ith", "torch_attention", "context_window"):
        assert f"{name} (" in message


def test_impossible_fields_of_the_authors_are_errors(tmp_path: Path) -> None:
    for changes, reason in (
        ({"mem_dtype": "int7"}, "memory_dtype: 'int7' given"),
        ({"mem_layers": [1, 9]}, "memory_layers: \\[9\\] given"),
        ({"mem_dtype": 16}, "mem_dtype: 16 given"),
    ):
        authors_checkpoint(tmp_path, **changes)
        with pytest.raises(ConfigError, match=reason), pytest.warns(UserWarning, match="not used"):
            load(tmp_path)


def test_the_tokenizer_of_an_authors_checkpoint_loads(tmp_path: Path) -> None:
    """Its config.json names a model type that transformers does not know."""
    authors_checkpoint(tmp_path)
    talking(None).save_pretrained(tmp_path)
    words = load_tokenizer(tmp_path)
    assert words("some text")["input_ids"] == talking(None)("some text")["input_ids"]
    assert (words.bos_token, words.eos_token) == (BOS, EOS)


def test_an_authors_checkpoint_saves_as_an_ordinary_llama_with_our_options(tmp_path: Path) -> None:
    authors_checkpoint(tmp_path / "theirs")
    model = load_authors(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.focus.config == model.focus.config
    ids = tokens(1, 60)
    assert torch.equal(logits(again, ids), logits(model, ids))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert torch.isfinite(logits(plain, ids[:, :WINDOW])).all()


def test_a_memory_of_an_authors_checkpoint_answers(tmp_path: Path) -> None:
    """The reader and the prompt's own reading store the same records."""
    config, weights = authors_checkpoint(tmp_path)
    model = load_authors(tmp_path)
    ids = tokens(1, 2 * WINDOW + 10)[0]
    memory = Memory(model)
    read_ids(model, ids[: 2 * WINDOW], memory)
    expected = AuthorsLongLlama(weights, config).prompt(ids)
    assert_close(
        logits(model, ids[None, 2 * WINDOW :], memory=memory)[0], expected[2 * WINDOW :], AUTHORS_TOLERANCE, "logits"
    )


def test_a_conversation_goes_on_after_an_error_in_the_middle_of_an_answer() -> None:
    """The reader of the answer may fail (a closed pipe); the turn is forgotten, as after Ctrl-C."""

    def failing(text: str) -> None:
        raise BrokenPipeError

    model, words = focused(changes={"eos_token_id": None}, window=100), talking()
    talk = Conversation(model, words, None, Sampling(max_new_tokens=6))
    with pytest.raises(BrokenPipeError):
        talk.ask("Who?", emit=failing)
    fresh = Conversation(model, words, None, Sampling(max_new_tokens=6))
    assert talk.ask("Who?").text == fresh.ask("Who?").text

"""What local models say of texts: against loops over `model.forward`, and against softmax written out.

python -m pytest tests/subjects/test_local.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longfocus import Memory, Reader
from longfocus.data.documents import Source
from longfocus.errors import UnsupportedCallError
from longfocus.memory.context import MemoryContext
from longfocus.model.cache import FocusCache
from longfocus.model.reading import read_ids
from longfocus.subjects import local
from longfocus.subjects.contract import CAPABILITIES, Prompt
from longfocus.subjects.local import FocusedSubject, LocalModel
from tests.small_tokenizers import tokenizer
from tests.subjects.tiny_subjects import WINDOW, focused, plain, text

SAME = 2e-5
"""float32 in another order of operations; a token that is forgotten or seen twice moves a loss by more than 0.01."""


def ids_of(words: int, seed: int = 0) -> list[int]:
    return tokenizer("byte_level")(text(words, seed))["input_ids"]


def nll(logits: Tensor, token: int) -> float:
    """Of one token, from the logits (vocabulary,) before it."""
    return float(-logits.double().log_softmax(-1)[token])


@torch.no_grad()
def one_by_one(model: Any, seen: Sequence[int], following: Sequence[int], **more: Any) -> float:
    """Loss of tokens that follow, fed one at a time to a cache that has read the ones before."""
    cache = model.new_cache(**more)
    logits = model(torch.tensor([list(seen)]), cache=cache, use_cache=True).logits[0, -1]
    total = 0.0
    for token in following:
        total += nll(logits, token)
        logits = model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1]
    return total


# -- losses of blocks, full attention ----------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 2])
def test_blocks_of_a_plain_model_see_their_context_and_no_more(before: int) -> None:
    subject = plain()
    ids, others = ids_of(120), [ids_of(20, 1), ids_of(12, 2)][:before]
    front = [token for other in others for token in other]
    starts, contexts = (0, 32, 96), (0, 5, 32, 100)
    found = list(subject.block_losses(ids, starts, 16, contexts, others))
    assert [(record.start, record.context) for record in found] == [(s, c) for s in starts for c in contexts]
    for record in found:
        everything = [*front, *ids[: record.start]]
        seen = everything[len(everything) - min(record.context, len(everything)) :]
        block = ids[record.start : record.start + 16]
        with torch.no_grad():
            logits = subject.model(torch.tensor([[*seen, *block]])).logits[0]
        expected = [nll(logits[len(seen) + at - 1], block[at]) for at in range(1, 16)]
        assert record.nll.shape == (15,) and record.nll.dtype == np.float64
        np.testing.assert_allclose(record.nll, expected, atol=SAME)
        likeliest = [int(logits[len(seen) + at - 1].argmax()) == block[at] for at in range(1, 16)]
        assert record.hit is not None and record.hit.tolist() == likeliest


def test_a_block_at_the_end_of_a_text_is_as_long_as_the_text() -> None:
    ids = ids_of(60)[:70]
    for subject in (plain(), focused()):
        (whole,) = subject.block_losses(ids, (64,), 32, (32,))
        (cut,) = subject.block_losses([*ids, *ids_of(30, 3)], (64,), 32, (32,))
        assert len(whole.nll) == 5
        np.testing.assert_allclose(whole.nll, cut.nll[:5], atol=SAME)


def test_a_context_too_long_for_a_plain_model_is_refused() -> None:
    with pytest.raises(UnsupportedCallError, match=r"plain takes 2,048 tokens; context and block is 2,064"):
        list(plain().block_losses(ids_of(40), (32,), 16, (2048,)))


# -- losses of blocks, with a memory -----------------------------------------------------------------------


def records(store: Any, layer: int, start: int = 0) -> Tensor:
    """(1, n, 2, heads, head_dim), copied."""
    return torch.cat([chunk.records for chunk in store.chunks(layer, start)], 1).clone()


def expected_losses(model: Any, ids: list[int], start: int, block: int, context: int, others: list[list[int]]) -> Any:
    """Read each text into a memory of its own (as `longfocus remember` does), keep the last `context` records of all
    of them in a new memory, and feed the block to an empty window."""
    parts: dict[int, list[Tensor]] = {layer: [] for layer in model.focus.config.layers}
    for part in (*others, ids[:start]):
        if part:
            memory = Memory(model)
            read_ids(model, part, memory)
            for layer, found in parts.items():
                found.append(records(memory.store, layer))
    store = model.focus.new_store()
    total = sum(len(part) for part in others) + start
    kept = min(context, total)
    if kept:
        store.append({layer: torch.cat(found, 1)[:, total - kept :] for layer, found in parts.items()})
    told = ids[start : start + block]
    with torch.no_grad():
        logits = model(torch.tensor([told]), cache=FocusCache(model.focus, own=store), use_cache=True).logits[0]
    return [nll(logits[at - 1], told[at]) for at in range(1, len(told))]


@pytest.mark.parametrize(
    "options", [{}, {"read_span": 40}, {"retrieval": "exact", "k": 8}, {"memory_dtype": "bfloat16"}]
)
@pytest.mark.parametrize("before", [0, 2])
def test_blocks_of_a_focused_model_see_the_last_records_and_no_more(before: int, options: dict[str, Any]) -> None:
    subject = focused(**options)
    ids, others = ids_of(150)[:200], [ids_of(40, 1)[:75], ids_of(12, 2)[:20]][:before]
    starts, contexts = (0, 160), (0, 1, 50, 1000)
    found = list(subject.block_losses(ids, starts, 16, contexts, others))
    assert [(record.start, record.context) for record in found] == [(s, c) for s in starts for c in contexts]
    for record in found:
        expected = expected_losses(subject.model, ids, record.start, 16, record.context, others)
        np.testing.assert_allclose(record.nll, expected, atol=SAME)


def test_a_focused_block_after_all_of_its_text_is_one_long_forward() -> None:
    subject = focused(last_window=WINDOW)
    ids = ids_of(150)[: 5 * WINDOW]
    (record,) = subject.block_losses(ids, (4 * WINDOW,), WINDOW, (4 * WINDOW,))
    with torch.no_grad():
        logits = subject.model(torch.tensor([ids])).logits[0, -WINDOW:]
    expected = [nll(logits[at - 1], ids[4 * WINDOW + at]) for at in range(1, WINDOW)]
    np.testing.assert_allclose(record.nll, expected, atol=SAME)


def test_context_0_is_the_window_alone_for_both_kinds() -> None:
    ids = ids_of(80)[:96]
    (one,) = focused().block_losses(ids, (64,), 32, (0,))
    (other,) = plain().block_losses(ids, (64,), 32, (0,))
    np.testing.assert_allclose(one.nll, other.nll, atol=SAME)


def test_records_do_not_depend_on_which_blocks_are_asked_for() -> None:
    """What was measured before is passed over when a run goes on; the rest must come out the same."""
    subject = focused()
    ids = ids_of(150)[:200]
    every = {(r.start, r.context): r.nll for r in subject.block_losses(ids, (32, 64, 160), 16, (32, 160))}
    for starts, contexts in (((160,), (32, 160)), ((64, 160), (160,)), ((32,), (32,))):
        for record in subject.block_losses(ids, starts, 16, contexts):
            np.testing.assert_array_equal(record.nll, every[record.start, record.context])


@pytest.mark.parametrize(
    ("options", "starts", "block", "words"),
    [
        ({}, (33,), 16, "begin at its multiples"),
        ({}, (32,), 33, "window of 32 tokens"),
        ({"overlap": 4}, (32,), 16, "overlap of 4 tokens"),
    ],
)
def test_blocks_that_a_window_cannot_hold_are_refused(
    options: dict[str, Any], starts: tuple[int, ...], block: int, words: str
) -> None:
    with pytest.raises(UnsupportedCallError, match=words):
        list(focused(**options).block_losses(ids_of(80), starts, block, (0,)))


# -- losses of choices -------------------------------------------------------------------------------------

CHOICES = (" captain", " mate", " the narrator, she said, was neither the captain nor the mate; it was", "s", "\n")


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "unigram"])
@pytest.mark.parametrize("words", [3, 60])
@pytest.mark.parametrize("make", [plain, focused])
def test_the_loss_of_a_choice_is_that_of_its_tokens_one_by_one(make: Any, words: int, kind: str) -> None:
    subject: LocalModel = make(kind)
    prompt = text(words)[:-1]
    ids = subject.encode(prompt)
    wholes = [subject.encode(prompt + choice) for choice in CHOICES]
    alike = min(next((i for i, (a, b) in enumerate(zip(ids, w, strict=False)) if a != b), len(ids)) for w in wholes)
    losses = subject.choice_losses(Prompt(prompt), CHOICES)
    for whole, loss in zip(wholes, losses, strict=True):
        if make is plain:
            with torch.no_grad():
                logits = subject.model(torch.tensor([whole])).logits[0]
            expected = sum(nll(logits[at - 1], whole[at]) for at in range(alike, len(whole)))
        else:
            expected = one_by_one(subject.model, whole[:alike], whole[alike:])
        assert loss == pytest.approx(expected, abs=5 * SAME * len(whole))


def test_a_choice_that_merges_with_the_prompt_is_counted_from_the_merged_token_for_all() -> None:
    """`wa` + `s` may be one token: then all choices are compared as whole texts from `wa` on."""
    subject = plain()
    prompt, choices = "it was late; she sai", ["d", "ling", " "]
    ids = subject.encode(prompt)
    merged = subject.encode(prompt + "d")
    assert merged[: len(ids)] != ids, "the tokenizer merges them"
    losses = subject.choice_losses(Prompt(prompt), choices)
    alike = next(i for i, (a, b) in enumerate(zip(ids, merged, strict=False)) if a != b)
    with torch.no_grad():
        for choice, loss in zip(choices, losses, strict=True):
            whole = subject.encode(prompt + choice)
            logits = subject.model(torch.tensor([whole])).logits[0]
            assert loss == pytest.approx(sum(nll(logits[i - 1], whole[i]) for i in range(alike, len(whole))), abs=1e-3)


def test_choices_after_documents_read_them_from_memory() -> None:
    subject = focused()
    documents = (text(60, 1), text(50, 2))
    prompt = Prompt("Who was late? It was", documents)
    losses = subject.choice_losses(prompt, CHOICES)
    memory = Memory(subject.model, subject.tokenizer)
    for number, document in enumerate(documents):
        Reader(subject.model, subject.tokenizer, memory).read(Source.of_text(f"document {number + 1}", document))
    ids = subject.encode(prompt.text)
    for choice, loss in zip(CHOICES, losses, strict=True):
        whole = subject.encode(prompt.text + choice)
        alike = min(
            next(
                (i for i, (a, b) in enumerate(zip(ids, subject.encode(prompt.text + c), strict=False)) if a != b),
                len(ids),
            )
            for c in CHOICES
        )
        expected = one_by_one(subject.model, whole[:alike], whole[alike:], memory=memory)
        assert loss == pytest.approx(expected, abs=1e-3)
    alone = subject.choice_losses(Prompt(prompt.text), CHOICES)
    assert max(abs(a - b) for a, b in zip(alone, losses, strict=True)) > 0.1


@pytest.mark.parametrize("make", [plain, focused])
def test_choices_without_a_prompt_are_texts_without_their_first_token(make: Any) -> None:
    subject = make()
    losses = subject.choice_losses(Prompt(""), ["captain", "narrator"])
    for choice, loss in zip(["captain", "narrator"], losses, strict=True):
        ids = subject.encode(choice)
        with torch.no_grad():
            logits = subject.model(torch.tensor([ids])).logits[0]
        assert loss == pytest.approx(sum(nll(logits[at - 1], ids[at]) for at in range(1, len(ids))), abs=1e-3)


def test_a_prompt_too_long_for_a_plain_model_is_refused() -> None:
    long = text(2000)
    with pytest.raises(UnsupportedCallError, match="plain takes 2,048 tokens"):
        plain().choice_losses(Prompt(long), [" a"])
    with pytest.raises(UnsupportedCallError, match="plain takes 2,048 tokens"):
        list(plain().complete([Prompt(long)], max_new_tokens=5))
    assert list(focused().complete([Prompt(long)], max_new_tokens=2))


# -- answers -----------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """The likeliest continuation, by forward over all of it again and again."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(model(torch.tensor([[*ids, *found]])).logits[0, -1].argmax()))
    return found


def test_answers_of_a_plain_model_see_documents_and_text_as_one() -> None:
    subject = plain()
    prompt = Prompt("It was", (text(20, 1), text(10, 2)))
    (answer,) = subject.complete([prompt], max_new_tokens=6)
    ids = subject.encode(f"{text(20, 1)}\n\n{text(10, 2)}\n\nIt was")
    assert answer.text == subject.tokenizer.decode(greedy(subject.model, ids, 6), skip_special_tokens=True)
    assert (answer.prompt_tokens, answer.local_from, answer.document_mass) == (len(ids), None, None)


@torch.no_grad()
def remembered(model: Any, ids: Sequence[int], count: int, *pieces: int, memory: Memory | None = None) -> list[int]:
    """The likeliest continuation of a focused model, token by token, the prompt fed in such pieces."""
    cache = model.new_cache(memory)
    at, logits = 0, None
    for piece in (*pieces, len(ids) - sum(pieces)):
        logits = model(torch.tensor([list(ids[at : at + piece])]), cache=cache, use_cache=True).logits[0, -1]
        at += piece
    found: list[int] = []
    for _ in range(count):
        assert logits is not None
        found.append(int(logits.argmax()))
        logits = model(torch.tensor([found[-1:]]), cache=cache, use_cache=True).logits[0, -1]
    return found


@pytest.mark.parametrize("words", [4, 100])
def test_answers_of_a_focused_model_continue_the_text(words: int) -> None:
    subject = focused()
    (answer,) = subject.complete([Prompt(text(words))], max_new_tokens=8)
    ids = subject.encode(text(words))
    expected = remembered(subject.model, ids, 8)
    assert answer.text == subject.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.prompt_tokens == len(ids)


def test_answers_about_documents_read_each_by_itself() -> None:
    subject = focused()
    prompt = Prompt("Who was late?", (text(60, 1), text(50, 2)), ("first", "second"))
    (answer,) = subject.complete([prompt], max_new_tokens=8)
    memory = Memory(subject.model, subject.tokenizer)
    for name, document in zip(prompt.names, prompt.documents, strict=True):
        Reader(subject.model, subject.tokenizer, memory).read(Source.of_text(name, document))
    ids = subject.encode(prompt.text)
    expected = remembered(subject.model, ids, 8, len(ids) - 1, memory=memory)
    assert answer.text == subject.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.prompt_tokens == memory.tokens + len(ids)
    assert answer.shared_tokens == memory.tokens
    assert answer.document_mass is None


def test_prompts_with_and_without_documents_keep_their_order() -> None:
    subject = focused()
    prompts = [
        Prompt(text(30, 1)),
        Prompt("Why?", (text(20, 2),)),
        Prompt(text(30, 3)),
        Prompt(text(30, 4)),
        Prompt("Why?", (text(20, 5),)),
    ]
    together = [answer.text for answer in subject.complete(prompts, max_new_tokens=5)]
    alone = [next(subject.complete([prompt], max_new_tokens=5)).text for prompt in prompts]
    assert together == alone
    assert len(set(together)) > 1


@pytest.mark.parametrize("make", [plain, focused])
def test_an_answer_ends_with_what_was_to_stop_it(make: Any) -> None:
    subject = make()
    (free,) = subject.complete([Prompt(text(5))], max_new_tokens=20)
    middle = free.text[len(free.text) // 2]
    (cut,) = subject.complete([Prompt(text(5))], max_new_tokens=20, stop=f"[{middle}]")
    assert cut.text == free.text[: free.text.index(middle) + 1]


@pytest.mark.parametrize("make", [plain, focused])
def test_an_empty_prompt_is_refused(make: Any) -> None:
    with pytest.raises(UnsupportedCallError, match="empty prompt"):
        list(make().complete([Prompt("")], max_new_tokens=2))


# -- where the window begins -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("words", [3, 20, 61, 200])
@pytest.mark.parametrize("documents", [(), (text(40, 8),)])
def test_what_lies_before_local_from_is_in_memory(documents: tuple[str, ...], words: int, kind: str) -> None:
    """The number of local tokens is that of the cache itself when the first answer token is chosen."""
    subject = focused(kind)
    prompt = Prompt(text(words), documents)
    (answer,) = subject.complete([prompt], max_new_tokens=1)
    ids = subject.encode(prompt.text)
    cache = subject.model.new_cache()
    feeds = [ids[:-1], ids[-1:]] if documents else [ids]
    for part in feeds:
        subject.model(torch.tensor([part]), cache=cache, use_cache=True, logits_to_keep=1)
    held = int(cache.local_tokens[0])
    before = sum(len(document) + 2 for document in documents)
    assert answer.local_from is not None
    place = answer.local_from - before
    offsets = subject.tokenizer(prompt.text, return_offsets_mapping=True)["offset_mapping"]
    assert place == offsets[len(ids) - held][0]
    if words == 200:
        assert 0 < place < len(prompt.text)


# -- attention mass of documents ---------------------------------------------------------------------------


@pytest.fixture
def written_out(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor]]:
    """(layer, weights (heads, queries, memory tokens)) of every pass over a memory, by softmax over all scores."""
    seen: list[tuple[int, Tensor]] = []
    join = MemoryContext.join

    def watched(self: MemoryContext, layer: int, window: Any, *, scale: float, softcap: float | None) -> Tensor:
        if self.shared is not None and self.shared.tokens:
            keys = torch.cat([chunk.keys for chunk in self.shared.chunks(layer)], 2).to(window.query.dtype)
            repeat = window.query.shape[1] // keys.shape[1]
            outer = window.outer_query @ keys.repeat_interleave(repeat, 1).transpose(-1, -2) * scale
            inner = window.query @ window.key.repeat_interleave(repeat, 1).transpose(-1, -2) * scale
            if window.mask is not None:
                inner = inner.masked_fill(~window.mask, -torch.inf)
            own = [] if self.own is None or not self.own.tokens else [self.own]
            assert not own, "this test keeps the question in the window"
            weights = torch.cat((outer, inner), -1).double().softmax(-1)[..., : keys.shape[2]]
            seen.append((layer, weights[0]))
        return join(self, layer, window, scale=scale, softcap=softcap)

    monkeypatch.setattr(MemoryContext, "join", watched)
    return seen


def test_the_mass_of_documents_is_softmax_weight_without_first_tokens(written_out: list[tuple[int, Tensor]]) -> None:
    subject = focused(dtype=torch.float64)
    sizes = (60, 17, 40)
    prompt = Prompt("Who?", tuple(text(words, seed) for seed, words in enumerate(sizes)))
    memory = subject.memory_of(prompt)
    written_out.clear()
    (answer,) = subject.complete([prompt], max_new_tokens=5, mass=True)
    question = len(subject.encode(prompt.text)) - 1
    total = torch.zeros(memory.tokens, dtype=torch.float64)
    passes = written_out[2:]  # without the pass over the question's tokens but its last, of two layers
    assert written_out[0][1].shape[1] == question and len(passes) == 5 * 2
    for _, weights in passes:
        assert weights.shape[1] == 1
        total += weights.mean(0).sum(0)
    for document in memory.documents:
        total[document.start : document.stop : WINDOW] = 0  # the first token of each window that was read
    expected = [float(total[d.start : d.stop].sum() / total.sum()) for d in memory.documents]
    assert answer.document_mass == pytest.approx(expected, abs=1e-9)
    assert sum(answer.document_mass or ()) == pytest.approx(1.0)


def test_mass_adds_up_to_1_also_with_retrieval_and_many_documents() -> None:
    for subject in (focused(), focused(retrieval="exact", k=4)):
        prompt = Prompt("Who?", tuple(text(8 + seed, seed) for seed in range(9)))
        (answer,) = subject.complete([prompt], max_new_tokens=4, mass=True)
        assert answer.document_mass is not None and len(answer.document_mass) == 9
        assert sum(answer.document_mass) == pytest.approx(1.0)
        assert min(answer.document_mass) >= 0


def test_asking_for_mass_changes_no_answer() -> None:
    subject = focused()
    prompt = Prompt("Who?", (text(60, 1), text(40, 2)))
    answers = {next(subject.complete([prompt], max_new_tokens=9, mass=mass)).text for mass in (False, True)}
    assert len(answers) == 1


# -- memories that are kept --------------------------------------------------------------------------------


def test_kept_documents_give_the_answers_of_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [text(12, seed) for seed in range(4)]
    prompts = [Prompt("Why?", (documents[a], documents[b])) for a, b in ((0, 1), (0, 1), (2, 1), (0, 3))]

    def fresh() -> FocusedSubject:
        return FocusedSubject(focused().model, focused().tokenizer, "fresh")

    expected = [next(fresh().complete([prompt], max_new_tokens=3, mass=True)) for prompt in prompts]
    for limit in (1 << 18, 60):
        monkeypatch.setattr(local, "KEPT_DOCUMENT_TOKENS", limit)
        found = list(fresh().complete(prompts, max_new_tokens=3, mass=True))
        assert [answer.text for answer in found] == [answer.text for answer in expected]
        assert [answer.document_mass for answer in found] == [answer.document_mass for answer in expected]


def test_documents_are_read_once_while_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Reader.read

    def watched(self: Reader, source: Source, *more: Any) -> Any:
        read.append(source.name)
        return original(self, source, *more)

    monkeypatch.setattr(local.Reader, "read", watched)
    subject = FocusedSubject(focused().model, focused().tokenizer, "fresh")
    one = Prompt("Why?", (text(30, 1), text(30, 2)), ("a", "b"))
    list(subject.complete([one, one, Prompt("When?", one.documents, one.names)], max_new_tokens=1))
    assert read == ["a", "b"]


# -- what a result depends on ------------------------------------------------------------------------------


def test_about_tells_weights_tokenizers_and_options_apart() -> None:
    abouts = [
        plain().about(),
        plain("metaspace").about(),
        focused().about(),
        focused(read_span=40).about(),
        focused(dtype=torch.float64).about(),
    ]
    assert len({repr(sorted(about.items(), key=str)) for about in abouts}) == len(abouts)
    assert plain().about()["fingerprint"] == focused().about()["fingerprint"], "the same weights"
    changed = plain("byte_level", torch.float64)
    before = changed.about()["fingerprint"]
    with torch.no_grad():
        changed.model.lm_head.weight[0, 0] += 1
    try:
        assert changed.about()["fingerprint"] != before
    finally:
        with torch.no_grad():
            changed.model.lm_head.weight[0, 0] -= 1


def test_capabilities_are_those_of_the_contract() -> None:
    can = {name: [isinstance(s, kind) for s in (plain(), focused())] for name, kind in CAPABILITIES.items()}
    assert can == {"complete": [True, True], "losses": [True, True], "memory": [False, True]}


def test_a_prompt_has_a_name_for_each_document_or_none() -> None:
    with pytest.raises(AssertionError):
        Prompt("Why?", ("one", "two"), ("only one",))

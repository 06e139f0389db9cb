"""Which heads copy: the layers that find a text's earlier words again are the ones to give a memory to.

A head's score is the attention that it pays, at the token from which the next answer token must be told, to the
place where that same token stands in the text (its source), meaned over answer tokens and prompts. A head that
copies scores near 1, one that looks anywhere near 1 / length. Full attention, the right answer fed whatever the
model would have said (teacher forcing), on short prompts of two kinds:

    text     invented facts strewn in plain sentences, some asked for at the end: retrieval by meaning
    tokens   random tokens, then the same again: repetition only, for models that know no language

    probes = text_probes(tokenizer, 10)
    measured = measure(model, probes)                   # a plain model, not attached
    propose(measured.scores, 4)                         # (17, 18, 20, 23)

One prompt and one layer at a time: of each attention map only the wanted entries are kept. (The measure is that
of induction heads, Olsson et al. 2022, and of retrieval heads, Wu et al. 2024, with mass instead of argmax.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longfocus.data.tokens import leading_ids
from longfocus.errors import ConfigError, InputError, UnsupportedCallError
from longfocus.model.families import Anatomy
from longfocus.model.focused import FocusedModel

LAYERS = 4
THRESHOLD = 0.1
PROMPTS = 10
PROMPT_TOKENS = 400
_FACTS, _ASKED = 6, 3
_THINGS = ("locker number", "ticket number", "room number", "home town", "boat", "favourite tea")
_SYLLABLES = ("ba", "cor", "dal", "fen", "gri", "hol", "jun", "kel", "lor", "mar", "nis", "ost", "pel", "quin", "ros")
_FILLER = (
    "The ferry left the harbour a little before noon.",
    "Nobody had painted the fence since the winter.",
    "A warm wind came down from the hills and dried the washing.",
    "The baker opened early on market days.",
    "Two children were counting the wagons of a long train.",
    "It had rained in the night, and the paths were soft.",
    "The library closes for an hour at midday.",
    "Someone was practising the same tune on a piano.",
    "Most of the apples were stored in the cellar.",
    "The bridge is narrow, so carts wait for one another.",
    "An old map of the coast hung beside the door.",
    "In spring the meadow behind the mill is full of cowslips.",
    "They talked about the weather until the kettle boiled.",
    "The clock on the town hall is always four minutes slow.",
    "A grey cat slept on the warm stones of the yard.",
    "The postman knows every dog along the river.",
)


@dataclass(frozen=True)
class Probe:
    """A prompt, and where in it something is copied."""

    ids: tuple[int, ...]
    """The tokens, answers included."""
    queries: tuple[int, ...]
    """Positions from which an answer token must be told: each one before an answer token."""
    sources: tuple[int, ...]
    """For each query, the position where that answer token stood before."""


@dataclass(frozen=True)
class Measured:
    """What `measure` found."""

    scores: Tensor
    """float64 (layers, heads): mean attention on the source, in [0, 1]."""
    accuracy: float
    """Share of the answer tokens that the model itself would have said. Where it is low, the scores say little."""
    answer_tokens: int
    prompts: int


@dataclass(frozen=True)
class LayerScore:
    """The two best heads of a layer."""

    layer: int
    head: int
    score: float
    second_head: int | None
    """None where the layer has one head."""
    second_score: float


def text_probes(tokenizer: Any, count: int, *, tokens: int = PROMPT_TOKENS, seed: int = 0) -> list[Probe]:
    """Prompts of about `tokens` tokens with invented facts, some of which are asked for at the end.

    The sentence in which a fact is asked repeats the one that told it, so that both have the same tokens.

    Args:
        tokenizer: a fast `transformers` tokenizer.

    Raises:
        InputError: the tokenizer is not a fast one, or cuts a repeated answer otherwise each time.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "Text prompts need a fast tokenizer, which tells where tokens start; try the prompts of tokens."
        )
    rng = random.Random(seed)
    return [_text_probe(tokenizer, tokens, rng) for _ in range(count)]


def token_probes(
    vocabulary: int, count: int, *, tokens: int = PROMPT_TOKENS, seed: int = 0, without: Collection[int] = ()
) -> list[Probe]:
    """Random tokens, and the same again, `tokens` together.

    Args:
        vocabulary: number of token ids.
        without: ids that are not drawn (special tokens).
    """
    rng = random.Random(seed)
    known = [token for token in range(vocabulary) if token not in without]
    half = max(2, tokens // 2)
    found = []
    for _ in range(count):
        # no token twice where the vocabulary allows it: then each has one source
        first = rng.sample(known, half) if half <= len(known) else rng.choices(known, k=half)
        queries = range(half, 2 * half - 1)
        found.append(Probe((*first, *first), tuple(queries), tuple(query - half + 1 for query in queries)))
    return found


def measure(model: Any, probes: Sequence[Probe], step: Callable[[int], None] | None = None) -> Measured:
    """Score every head of a plain model.

    The model is left as it was; while it runs, its attention is the eager one, which alone shows its weights.

    Args:
        model: a causal language model of a known family, not attached.
        probes: see `text_probes` and `token_probes`; at least one.
        step: called with the number of prompts done, after each.

    Raises:
        UnsupportedModelError: the family is unknown.
        UnsupportedCallError: the model is attached: then it has no weights over one text to show.
        ConfigError: a prompt is longer than the model's positions.
    """
    if isinstance(model, FocusedModel):
        raise UnsupportedCallError(
            "measure: the model is attached; give the plain one (longfocus.detach(model), or another loaded copy)."
        )
    anatomy = Anatomy(model)
    longest = max(len(probe.ids) for probe in probes)
    if anatomy.longest_window is not None and longest > anatomy.longest_window:
        raise ConfigError(
            f"tokens: prompts of {longest} tokens given, expected at most the {anatomy.longest_window} "
            "that the model's positions cover."
        )
    heads = int(model.config.get_text_config().num_attention_heads)
    total = torch.zeros(anatomy.num_layers, heads, dtype=torch.float64)
    device = model.get_input_embeddings().weight.device
    now: Probe

    def record(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            wanted = output[1][0][:, now.queries, now.sources]  # of (1, heads, tokens, tokens)
            total[layer] += wanted.double().sum(1).cpu()

        return hook

    right = asked = 0
    with _eager(model), torch.no_grad():
        hooks = [module.register_forward_hook(record(layer)) for layer, module in enumerate(anatomy.attentions)]
        try:
            for number, now in enumerate(probes, 1):
                ids = torch.tensor([now.ids], device=device)
                queries = torch.tensor(now.queries, device=device)
                logits = model(ids, use_cache=False, logits_to_keep=queries).logits
                right += int((logits[0].argmax(-1) == ids[0, queries + 1]).sum())
                asked += len(now.queries)
                if step is not None:
                    step(number)
        finally:
            for hook in hooks:
                hook.remove()
    return Measured(total / asked, right / asked, asked, len(probes))


def rank(scores: Tensor) -> list[LayerScore]:
    """Layers by their best head, best first; of equals the lower layer.

    Args:
        scores: float (layers, heads).
    """
    found = []
    for layer, row in enumerate(scores.tolist()):
        order = sorted(range(len(row)), key=lambda head: -row[head])
        second = order[1] if len(order) > 1 else None
        found.append(LayerScore(layer, order[0], row[order[0]], second, 0.0 if second is None else row[second]))
    return sorted(found, key=lambda entry: -entry.score)


def propose(
    scores: Tensor, layers: int = LAYERS, *, threshold: float = THRESHOLD, without: Collection[int] = ()
) -> tuple[int, ...]:
    """The `layers` best layers whose best head reaches the threshold, in order of depth; fewer where fewer do.

    Args:
        scores: float (layers, heads).
        without: layers that cannot carry a memory.
    """
    fit = [entry.layer for entry in rank(scores) if entry.score >= threshold and entry.layer not in without]
    return tuple(sorted(fit[:layers]))


def narrow_layers(model: Any, window: int) -> tuple[int, ...]:
    """Layers that see fewer tokens than the window by themselves, which `attach` refuses as memory layers."""
    anatomy = Anatomy(model)
    spans = {layer: anatomy.sliding_window(layer) for layer in range(anatomy.num_layers)}
    return tuple(layer for layer, span in spans.items() if span is not None and span < window)


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Eager attention and evaluation mode, and back."""
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


def _text_probe(tokenizer: Any, tokens: int, rng: random.Random) -> Probe:
    facts: list[tuple[str, str, str]] = []
    while len(facts) < _FACTS:
        thing = rng.choice(_THINGS)
        value = str(rng.randint(100000, 999999)) if thing.endswith("number") else _name(rng, 3)
        facts.append((thing, f"{_name(rng, 2)} {_name(rng, 2)}", value))
    asked = rng.sample(facts, _ASKED)
    told = [f"The {thing} of {name} is {value}." for thing, name, value in facts]
    asking = [
        f"\nQuestion: What is the {thing} of {name}?\nAnswer: The {thing} of {name} is {value}."
        for thing, name, value in asked
    ]
    room = tokens - len(_ids(tokenizer, " ".join(told) + "".join(asking)))
    sentences: list[str] = []
    while room > 0:
        sentences.append(rng.choice(_FILLER))
        room -= len(_ids(tokenizer, " " + sentences[-1]))
    for sentence in told:
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    text = " ".join(sentences) + "\n" + "".join(asking)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    leading = leading_ids(tokenizer)
    queries: list[int] = []
    sources: list[int] = []
    for thing, name, value in asked:
        sentence = f"The {thing} of {name} is {value}."
        places = []
        for start in (text.index(sentence), text.rindex(sentence)):
            end = start + len(sentence) - 1
            begin = end - len(value)
            places.append([at for at, (low, high) in enumerate(offsets) if low < end and high > begin])
        source, answer = places
        if [ids[at] for at in source] == [ids[at] for at in answer]:
            queries += [len(leading) + at - 1 for at in answer]
            sources += [len(leading) + at for at in source]
    if not queries:
        raise InputError("The tokenizer cuts an answer and its source differently; try the prompts of tokens.")
    return Probe((*leading, *ids), tuple(queries), tuple(sources))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _name(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choices(_SYLLABLES, k=syllables)).capitalize()

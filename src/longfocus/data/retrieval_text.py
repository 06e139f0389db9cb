"""Made-up retrieval text: facts strewn into a text and asked for, or stated again, later on.

Ordinary text rarely needs what stood thousands of tokens before, so a model that trains on little of it
hardly meets the case that a memory is for. Here the case is frequent: random names and values, in many
wordings, among real text or repeated plain sentences, and later a question with its answer, a restatement, or a
turn of chat. It is synthetic and said to be so; the wording and numbers of the pass-key evaluation
(`tasks/passkey.py`) are not in it.

A document is a function of (seed, its number): nothing is stored, and a resumed run meets the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_THINGS = (
    "access code|door code|ticket number|locker number|invoice number|serial number|account number|order number|"
    "registration number|phone extension|room number|badge number|safe combination|case number|flight number|"
    "membership number|tracking number|reference number|vault code|meter reading|catalogue number|booking code|"
    "engine number|archive number|signal frequency|secret word|code word|nickname|home town|favourite colour|middle name|"
    "password|project name|meeting place|horse|ship|instrument|street"
).split("|")
_NUMERIC = 25  # the first so many of _THINGS have numbers as values
_FIRST = (
    "Ada|Bruno|Chen|Dalia|Emeka|Farah|Goran|Hana|Ivo|Jun|Kofi|Leila|Marta|Nadia|Omar|Priya|Quentin|Rosa|Sven|Tariq|"
    "Uma|Viktor|Wanda|Ximena|Yusuf|Zora|Anton|Beatrix|Caleb|Dorota|Elias|Freya|Gideon|Helga|Ismail|Joana|Kaito|Lars"
).split("|")
_LAST = (
    "Abara|Bergman|Castillo|Dvorak|Eriksen|Fontaine|Greer|Hoshino|Ivanova|Jansen|Kowalski|Lindqvist|Moreau|Novak|Okafor|"
    "Petrov|Quispe|Rinaldi|Sato|Tanaka|Ueda|Vargas|Weber|Xu|Yilmaz|Zimmer|Adeyemi|Brandt|Correia|Dragan|Engel|Farkas"
).split("|")
_PLACES = (
    "the north gate|the old mill|the harbour office|Building Seven|the red workshop|the town library|Hut 12|the lighthouse|"
    "the chemistry lab|the west tower|the night train|the bakery|Unit Delta|the observatory|the print shop|the boathouse"
).split("|")
_WORDS = (
    "amber|anvil|apricot|badger|basalt|beacon|birch|canyon|cedar|cinder|cobalt|comet|copper|coral|cricket|dahlia|ember|"
    "falcon|fennel|garnet|ginger|glacier|granite|harbor|hazel|heron|indigo|ivory|jasmine|juniper|kestrel|lantern|"
    "lavender|lichen|linden|magnet|maple|marble|meadow|mercury|nectar|nickel|nutmeg|onyx|orchid|otter|paprika|pebble|"
    "pepper|quartz|raven|saffron|sapphire|silver|sparrow|sycamore|thistle|timber|topaz|tulip|velvet|walnut|willow|zephyr"
).split("|")
_STATEMENTS = (
    "The {thing} of {who} is {value}.",
    "{Who}'s {thing} is {value}.",
    "Note that the {thing} for {who} is {value}.",
    "For {who}, the {thing} is {value}.",
    "{value} is the {thing} of {who}.",
    "It was written down that the {thing} belonging to {who} is {value}.",
    "Please keep in mind: the {thing} of {who} is {value}. Again, {value}.",
    "One more detail, the {thing} of {who}: {value}.",
    "{Who} has the {thing} {value}.",
)
_BARE_STATEMENTS = (
    "The {thing} is {value}.",
    "Do not forget the {thing}: {value}.",
    "The {thing} is {value}, so write down {value}.",
    "{value} is the {thing} to use.",
)
_RECALLS = (
    "What is the {thing} of {who}? The {thing} of {who} is {value}.",
    "What is {who}'s {thing}? It is {value}.",
    "As stated before, the {thing} of {who} is {value}.",
    "Question: which {thing} belongs to {who}? Answer: {value}.",
    "Q: {Who}, {thing}?\nA: {value}",
    "{Who}'s {thing}, as we saw, is {value}.",
    "The {thing} of {who} was {value}.",
    "Remember that the {thing} for {who} is {value}.",
)
_BARE_RECALLS = (
    "What is the {thing}? The {thing} is {value}.",
    "Question: what was the {thing}? Answer: {value}.",
    "The {thing} mentioned above is {value}.",
    "Tell me the {thing}. It is {value}.",
)
_CHAT = (
    "<|im_start|>user\nWhat is the {thing} of {who}?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n",
    "<|im_start|>user\nAccording to the text, what is {who}'s {thing}?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n",
)
_CHAT_ANSWERS = ("The {thing} of {who} is {value}.", "{value}", "It is {value}.", "{Who}'s {thing} is {value}.")
_PLAIN = (
    "The rain fell on the roof all night.|A dog barked somewhere down the lane.|The kettle was already warm.|"
    "Clouds moved slowly over the hills.|The market opens early.|Someone had left the window open.|"
    "Water is wet.|Stones are hard.|The road goes on.|It was a quiet morning.|The river runs to the sea.|"
    "Birds sing at dawn.|Bread is made from flour.|The train was late again.|Leaves turn brown in autumn.|"
    "The lamp flickered twice.|Snow covers the fields.|We walked home.|Then we turned around.|The bell rang once more.|"
    "Grain grows in the valley.|The clock ticks on the wall.|Nothing else happened.|The moon is pale.|Boats drift by the pier."
).split("|")


@dataclass(frozen=True)
class Fact:
    """One made-up fact."""

    thing: str
    who: str | None
    value: str

    def fill(self, pattern: str) -> str:
        """A wording with this fact in it."""
        who = self.who or ""
        return pattern.format(thing=self.thing, who=who, Who=who[:1].upper() + who[1:], value=self.value)


class RetrievalText:
    """Documents of made-up facts among hay; an endless source for `Mixture` (its documents have numbers 0, 1, 2, …)."""

    documents = None

    def __init__(
        self,
        tokenizer: Any,
        hay: Callable[[random.Random, int], str] | None,
        *,
        seed: int,
        tokens: tuple[int, int] = (2048, 8192),
        plain_hay: float = 0.4,
        chat: float = 0.3,
        spacing: tuple[int, int] = (20, 120),
        far: float = 0.5,
        lone: float = 0.1,
        name: str = "retrieval",
    ) -> None:
        """
        Args:
            tokenizer: of the model.
            hay: (generator, characters) -> real text of about so many characters. None: plain sentences only.
            seed: of the whole source.
            tokens: shortest and longest document.
            plain_hay: part of the documents whose hay is a few plain sentences over and over.
            chat: part of the recalls that are a turn of chat, where the tokenizer has the chat's marks.
            spacing: fewest and most words of hay between two facts or recalls; drawn for each document.
            far: part of the documents that state all their facts first and ask for each once, later on, so that only a
                memory helps.
            lone: part of the documents with one to three facts in much hay, asked for at the end. The others mix facts
                and recalls from their beginning on, so that some recalls are near.
        """
        self.tokenizer, self.hay, self.seed, self.name = tokenizer, hay, seed, name
        self.shortest, self.longest = tokens
        self.plain_hay, self.spacing, self.far, self.lone = plain_hay, spacing, far, lone
        known = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
        self.chat = chat if "<|im_start|>" in known else 0.0

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document, int64."""
        wanted = words = random.Random(f"{self.seed} {number}").randint(self.shortest, self.longest)
        ids: list[int] = []
        for _ in range(12):  # words of one text make more tokens than those of another
            text = self.text(random.Random(f"{self.seed} {number} text"), words)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if wanted <= len(ids) <= 1.08 * wanted:
                break
            words = max(1, words // 4, round(words * 1.04 * wanted / max(1, len(ids))))
        while len(ids) < wanted:
            words *= 2
            text = self.text(random.Random(f"{self.seed} {number} text"), words)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[-wanted:]  # the recalls at the end stay
        return np.asarray(ids, dtype=np.int64)

    def text(self, rng: random.Random, tokens: int) -> str:
        """A document of about so many tokens, or somewhat more."""
        words_wanted = int(tokens * 0.85) + 50
        plain = self.hay is None or rng.random() < self.plain_hay
        hay = self._plain_words(rng, words_wanted) if plain else self._real_words(rng, words_wanted)
        form = rng.random()
        if form < self.far:
            parts = self._far(rng, hay)
        elif form < self.far + self.lone:
            parts = self._lone(rng, hay)
        else:
            parts = self._mixed(rng, hay)
        return " ".join(parts).replace("<|im_end|>\n ", "<|im_end|>\n")

    def _mixed(self, rng: random.Random, hay: list[str]) -> list[str]:
        """Facts and recalls from the beginning on."""
        between = rng.randint(*self.spacing)
        bare_only = rng.random() < 0.2
        facts: list[Fact] = []
        parts: list[str] = []
        for stretch in self._stretches(rng, hay, between):
            parts.append(stretch)
            telling = not facts or rng.random() < max(0.12, 0.9 - 0.12 * len(facts))
            if telling and (not bare_only or not facts):
                facts.append(self._fact(rng, facts, bare_only))
                parts.append(self._statement(rng, facts[-1]))
            elif not bare_only or rng.random() < 0.5:
                parts.append(self._recall(rng, rng.choice(facts)))
        return parts

    def _far(self, rng: random.Random, hay: list[str]) -> list[str]:
        """All facts in the first part, each asked for once in the second, in another order."""
        cut = round(rng.uniform(0.4, 0.7) * len(hay))
        facts: list[Fact] = []
        parts: list[str] = []
        for stretch in self._stretches(rng, hay[:cut], rng.randint(*self.spacing)):
            facts.append(self._fact(rng, facts, bare=rng.random() < 0.1))
            parts += [stretch, self._statement(rng, facts[-1])]
        asked = rng.sample(facts, len(facts))
        between = max(1, (len(hay) - cut) // max(1, len(asked)))
        for number, stretch in enumerate(self._stretches(rng, hay[cut:], between)):
            parts.append(stretch)
            if number < len(asked):
                parts.append(self._recall(rng, asked[number]))
        return parts

    def _lone(self, rng: random.Random, hay: list[str]) -> list[str]:
        """One to three facts anywhere in the hay, all of them asked for at its end."""
        facts: list[Fact] = []
        for _ in range(rng.randint(1, 3)):
            facts.append(self._fact(rng, facts, bare=rng.random() < 0.5))
        at = sorted(rng.randrange(max(1, round(0.9 * len(hay)))) for _ in facts)
        parts: list[str] = []
        for fact, start, stop in zip(facts, [0, *at], at, strict=False):
            parts += [" ".join(hay[start:stop]), self._statement(rng, fact)]
        parts.append(" ".join(hay[at[-1] :]))
        return parts + [self._recall(rng, fact) for fact in rng.sample(facts, len(facts))]

    def _stretches(self, rng: random.Random, hay: list[str], between: int) -> Iterator[str]:
        """The hay in pieces of about so many words."""
        at = 0
        while at < len(hay):
            step = max(1, round(between * rng.uniform(0.4, 1.6)))
            yield " ".join(hay[at : at + step])
            at += step

    def _statement(self, rng: random.Random, fact: Fact) -> str:
        return fact.fill(rng.choice(_BARE_STATEMENTS if fact.who is None else _STATEMENTS))

    def _recall(self, rng: random.Random, fact: Fact) -> str:
        if fact.who is None:
            return fact.fill(rng.choice(_BARE_RECALLS))
        if rng.random() < self.chat:
            answer = fact.fill(rng.choice(_CHAT_ANSWERS))
            return "\n" + fact.fill(rng.choice(_CHAT).replace("{answer}", answer.replace("{", "").replace("}", "")))
        return fact.fill(rng.choice(_RECALLS))

    def _fact(self, rng: random.Random, others: Sequence[Fact], bare: bool) -> Fact:
        """A fact about something that no other one is about."""
        taken = {(fact.thing, fact.who) for fact in others}
        while True:
            thing = rng.choice(_THINGS)
            who = (
                None
                if bare
                else rng.choice([f"{rng.choice(_FIRST)} {rng.choice(_LAST)}", rng.choice(_FIRST), rng.choice(_PLACES)])
            )
            if (thing, who) not in taken:
                break
        if _THINGS.index(thing) < _NUMERIC:
            digits = rng.randint(3, 8)
            value = "".join(rng.choice("0123456789") for _ in range(digits))
            if rng.random() < 0.15:
                value = f"{rng.choice('ABCDEFGHJKLMNPRSTUVWXYZ')}{rng.choice('ABCDEFGHJKLMNPRSTUVWXYZ')}-{value}"
        else:
            value = rng.choice(_WORDS)
            if rng.random() < 0.4:
                value = f"{value} {rng.choice(_WORDS)}"
        return Fact(thing, who, value)

    def _plain_words(self, rng: random.Random, count: int) -> list[str]:
        few = rng.sample(_PLAIN, rng.randint(3, 7))
        block = " ".join(few).split()
        return (block * (count // len(block) + 1))[:count]

    def _real_words(self, rng: random.Random, count: int) -> list[str]:
        assert self.hay is not None
        return self.hay(rng, count * 7).split(" ")[:count]

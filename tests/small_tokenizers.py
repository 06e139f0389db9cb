"""Small real tokenizers, one of each kind that cuts text differently, trained here on the sample texts below.

    tokenizer("byte_level")      GPT-2 style: a regular expression splits, bytes are merged; no normaliser
    tokenizer("digits")          Llama 3 and Qwen style: another expression, digits in threes from the left
    tokenizer("metaspace")       sentencepiece style: words begin with a metaspace, unknown characters fall back to bytes
    tokenizer("unsplit")         Llama 2 style: spaces are rewritten and nothing splits, so a whole text is one piece
    tokenizer("unigram")         T5 style: NFKC normaliser, likeliest segmentation, unknown tokens

All have 400 tokens at most and are the same in every run. There is a BOS token that stands before a text where the kind does so, and special tokens
that a document may spell without meaning them. `talking` adds chat templates.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 400
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
SPECIAL = (UNKNOWN, BOS, EOS)

SAMPLES = {
    "latin": "The narrator, she said, was neither the captain nor the mate; it was getting late — très tard, déjà.\n",
    "cyrillic": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.\n",
    "greek": "Ἄνδρα μοι ἔννεπε, Μοῦσα, πολύτροπον, ὃς μάλα πολλὰ πλάγχθη.\n",
    "arabic": "كان يا ما كان في قديم الزمان، وكانت الليالي ألف ليلة وليلة.\n",
    "hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם וְאֵת הָאָרֶץ\n",
    "devanagari": "धर्मक्षेत्रे कुरुक्षेत्रे समवेता युयुत्सवः ।\n",
    "thai": "กาลครั้งหนึ่งนานมาแล้ว มีเจ้าหญิงอยู่ในปราสาท\n",
    "chinese": "話說天下大勢，分久必合，合久必分。\n",
    "japanese": "吾輩は猫である。名前はまだ無い。ｶﾀｶﾅも。\n",
    "korean": "동해물과 백두산이 마르고 닳도록 하느님이 보우하사\n",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 👍🏽 ☕️ 🙂🙃\n",
    "combining": "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343\u036a\u0302 ﬁnd ① ½ Å K\n",
    "code": "def f(x: int) -> str:\n    if x >= 10:\n        return f'{x:>4}'\n\telse:\r\n\t\treturn ''\r\n",
    "spaces": "a  b   c    d\t\te \u00a0 \u2003 \u3000 f\n\n\n   \n",
}
"""One sentence of each kind of text that cuts can go wrong in."""

CHAT = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}[system]\nBe brief." + EOS + "\n{% endif %}"
    "[{{ m['role'] }}]\n{{ m['content'] }}"
    + EOS
    + "\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
"""ChatML in form: an opening said once, a token and a newline after each turn."""
NO_SYSTEM = (
    BOS
    + "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ 'model' if m['role'] == 'assistant' else m['role'] }}]\n{{ m['content'] | trim }}"
    + EOS
    + "\n{% endfor %}{% if add_generation_prompt %}[model]\n{% endif %}"
)
"""Gemma in form: BOS in the template, and a system message is an error."""
NO_NEWLINE = (
    "{% for m in messages %}{% if loop.first %}"
    + BOS
    + "{% endif %}[{{ m['role'] }}]\n\n{{ m['content'] | trim }}"
    + EOS
    + ""
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
"""Llama 3 in form: nothing between a turn's last token and the next turn."""
TEMPLATES = {"chat": CHAT, "no_system": NO_SYSTEM, "no_newline": NO_NEWLINE}


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the kind; the same object at every call."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_KINDS[kind](), bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN, pad_token=UNKNOWN
    )


KINDS = ("byte_level", "digits", "metaspace", "unsplit", "unigram")


def talking(template: str | None = "chat") -> PreTrainedTokenizerFast:
    """A new byte-level tokenizer with this chat template, or none."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(), bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN, pad_token=UNKNOWN
    )
    made.chat_template = TEMPLATES[template] if template is not None else None
    return made


def _samples() -> list[str]:
    return [*SAMPLES.values(), " ".join(SAMPLES.values()), *(SAMPLES["latin"], SAMPLES["code"]) * 5]


def _begins_with_bos(made: Tokenizer) -> Tokenizer:
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    return made


def _byte_level(splitting: Any = None, more: str = "") -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = splitting or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([*_samples(), more], trainer)
    return made


def _digits() -> Tokenizer:
    expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(pre_tokenizers.Sequence([split, as_bytes]), "123 456 777 100 " * 50)


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_KNOWN = ("latin", "cyrillic", "code", "spaces")
"""What the sentencepiece kinds were trained on; other characters fall back to bytes or are unknown."""


def _metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[*SPECIAL, *_BYTES], show_progress=False)
    made.train_from_iterator([SAMPLES[name] for name in _KNOWN for _ in range(2)], trainer)
    return _begins_with_bos(made)


def _unsplit() -> Tokenizer:
    made = _metaspace()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None  # type: ignore[assignment]
    return made


def _unigram() -> Tokenizer:
    text = unicodedata.normalize("NFKC", "".join(SAMPLES[name] for name in _KNOWN)).replace(" ", "▁")
    counts = Counter(text[at : at + size] for size in (1, 2, 3, 5) for at in range(len(text) - size + 1))
    frequent = sorted(counts, key=lambda piece: (len(piece) > 1, -counts[piece] * len(piece), piece))
    pieces = [(name, 0.0) for name in SPECIAL]
    pieces += [(piece, math.log(counts[piece] / len(text))) for piece in frequent[: VOCABULARY - len(SPECIAL)]]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return _begins_with_bos(made)


_KINDS: dict[str, Any] = {
    "byte_level": _byte_level,
    "digits": _digits,
    "metaspace": _metaspace,
    "unsplit": _unsplit,
    "unigram": _unigram,
}

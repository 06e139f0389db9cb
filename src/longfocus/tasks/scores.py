"""How answers are compared with what would be right: pure functions of texts.

Normalisation and F1 are those of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250, evaluation script v1.1), which SCROLLS
(Shaham et al. 2022, arXiv 2201.03533) and open-domain question answering use too.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an, the; single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truth: str) -> bool:
    """The same after normalisation. Where nothing is left of the truth (`The The`, `?`), the same but for case."""
    wanted = normalised(truth)
    return normalised(answer) == wanted if wanted else answer.strip().lower() == truth.strip().lower()


def token_f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall of normalised words, each counted as often as it occurs on both sides.

    0 where no word is shared, also where nothing is left of both after normalisation.
    """
    said, wanted = normalised(answer).split(), normalised(truth).split()
    shared = (Counter(said) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_f1(answer: str, truths: Sequence[str]) -> float:
    """The largest `token_f1` over several right answers, at least one."""
    return max(token_f1(answer, truth) for truth in truths)


def contains_answer(answer: str, truth: str, *, spare: int = 10) -> bool:
    """The normalised words of the truth stand in the answer, side by side and in order, among at most `spare` others.

    The bound keeps an echo of a whole context from being right.
    """
    said, wanted = normalised(answer).split(), normalised(truth).split()
    if not wanted:
        return exact_match(answer, truth)
    spans = (said[start : start + len(wanted)] for start in range(len(said) - len(wanted) + 1))
    return len(said) <= len(wanted) + spare and wanted in spans


def first_line(text: str) -> str:
    """The first line with anything on it, without outer spaces: where an answer of one line ends."""
    return text.strip().partition("\n")[0].strip()

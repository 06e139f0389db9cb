"""Where right passages stand among all, by a retriever's scores; passages that are scored alike stand in random order."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np


def _against(scores: np.ndarray, right: Sequence[int], left_out: Sequence[int]) -> tuple[int, int, int]:
    """Wrong passages that are scored above the best right one, wrong ones and right ones that are scored like it."""
    best = max(scores[number] for number in right)
    wrong = np.ones(len(scores), dtype=bool)
    wrong[[*right, *left_out]] = False
    above, alike = int((scores[wrong] > best).sum()), int((scores[wrong] == best).sum())
    return above, alike, sum(1 for number in right if scores[number] == best)


def rank(scores: np.ndarray, right: Sequence[int], left_out: Sequence[int]) -> float:
    """Expected rank, from 1, of the first right passage; passages with the same score stand in random order.

    Args:
        scores: float (passages,).
        right: passages, any of which is right; none of them left out.
    """
    if not np.isfinite(scores).all():
        return float("nan")
    above, alike, rights = _against(scores, right, left_out)
    return above + 1 + alike / (rights + 1)


def recall(scores: np.ndarray, right: Sequence[int], left_out: Sequence[int], k: int) -> float:
    """Probability that a right passage is among the first k; 0 or 1 unless scores are alike there. nan where a score is."""
    if not np.isfinite(scores).all():
        return float("nan")
    above, alike, rights = _against(scores, right, left_out)
    places = min(max(0, k - above), alike + rights)
    return 1 - comb(alike, places) / comb(alike + rights, places)

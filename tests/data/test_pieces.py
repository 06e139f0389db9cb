"""Long documents cut into pieces: every token once, in order, none longer than asked.

python -m pytest tests/data/test_pieces.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longfocus.data.mixture import Mixture
from longfocus.data.pieces import Pieces
from tests.data.marked import Marked, marks


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), tokens=st.integers(1, 120))
def test_every_token_once_and_in_order(lengths: list[int], tokens: int) -> None:
    pieces = Pieces(Marked(1, lengths), tokens)
    found = [pieces.document(index) for index in range(pieces.documents)]
    assert (np.concatenate(found) == np.concatenate([marks(1, i, n) for i, n in enumerate(lengths)])).all()
    assert [len(piece) for piece in found] == pieces.lengths.tolist()
    assert max(map(len, found)) <= tokens and min(map(len, found)) >= 1
    assert pieces.tokens == sum(lengths)
    for start in range(0, pieces.documents):
        document = int(found[start][0] // 10**4 % 10**4)
        assert pieces.document_id(start).startswith(f"1/{document}[")
    sizes = [pieces.lengths[i] for i in range(pieces.documents) if pieces.document_id(i).startswith("1/0[")]
    assert all(size == tokens for size in sizes[:-1])


def test_a_mixture_draws_them_as_documents() -> None:
    mixture = Mixture(
        [Pieces(Marked(1, [1000, 10]), 100)], [1.0], seed=1, minimum_tokens=[0], join_below=0, separator_ids=[]
    )
    drawn = [mixture.next_document() for _ in range(11)]
    assert sorted(len(document.tokens) for document in drawn) == [10] + [100] * 10
    assert len({document.ids for document in drawn}) == 11
    again = mixture.recall(mixture.remember(drawn[3]))
    assert again.ids == drawn[3].ids and (again.tokens == drawn[3].tokens).all()

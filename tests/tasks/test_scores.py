"""Normalisation, exact match and F1 against cases worked by hand.

python -m pytest tests/tasks/test_scores.py
"""

from __future__ import annotations

import pytest

from longfocus.tasks.scores import best_f1, contains_answer, exact_match, first_line, normalised, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Yelp Challenge  dataset.", "yelp challenge dataset"),
        ("an apple, a pear & the plum", "apple pear plum"),
        ("state-of-the-art", "stateoftheart"),  # punctuation goes before articles
        ("theory of another\tthing\n", "theory of another thing"),
        ("U.S.A.", "usa"),
        ("1,006 reviews (all)", "1006 reviews all"),
        ("2003–04", "2003–04"),  # only ASCII punctuation goes
        ("A", ""),
        ("  ", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("the cat sat on the mat", "cat on mat", 2 * (3 / 4) * 1 / (3 / 4 + 1)),  # cat sat on mat
        ("a Yelp dataset", "the Yelp Challenge dataset", 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("new new york", "New York, New Jersey", 2 * 1 * (3 / 4) / (1 + 3 / 4)),  # a repeated word counts twice
        ("yes yes yes", "yes", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("york", "new york new", 2 * 1 * (1 / 3) / (1 + 1 / 3)),
        ("Yes.", "yes", 1.0),
        ("no", "yes", 0.0),
        ("Unanswerable.", "unanswerable", 1.0),
        ("unanswerable", "Chinese general corpus", 0.0),
        ("3%", "3", 1.0),
        ("", "yes", 0.0),
        ("the", "a", 0.0),
        ("BERT, QANet", "QANet BIBREF39, BERT", 2 * 1 * (2 / 3) / (1 + 2 / 3)),
    ],
)
def test_f1(answer: str, truth: str, expected: float) -> None:
    assert token_f1(answer, truth) == pytest.approx(expected, abs=1e-12)
    assert token_f1(truth, answer) == pytest.approx(expected, abs=1e-12)


def test_the_best_annotator_counts() -> None:
    assert best_f1("yelp", ["unanswerable", "Yelp dataset", "Amazon"]) == pytest.approx(2 / 3)
    assert best_f1("unanswerable", ["Yelp dataset", "Unanswerable"]) == 1


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("the Jamaican English!", "Jamaican English", True),
        ("Jamaican Creole English", "Jamaican English", False),
        ("", "The", False),
        ("a", "The", False),
        ("THE", "the", True),
        ("", "Paris", False),
    ],
)
def test_exact_match(answer: str, truth: str, expected: bool) -> None:
    assert exact_match(answer, truth) is expected


def test_an_answer_in_a_sentence_is_found_and_an_echo_is_not() -> None:
    assert contains_answer("They speak Jamaican English there.", "Jamaican English")
    assert contains_answer("It is in the Paris of 1900", "Paris")
    assert not contains_answer("parisian", "Paris")
    assert not contains_answer("English or Jamaican", "Jamaican English")
    assert not contains_answer("", "Paris")
    assert not contains_answer("anything at all", "the")
    assert contains_answer("Paris " + "x " * 10, "Paris")
    assert not contains_answer("Paris " + "x " * 11, "Paris")


def test_the_first_line_with_anything_on_it() -> None:
    assert first_line(" NUM:dist\nQuestion: and so on") == "NUM:dist"
    assert first_line("\n\n  Paris \n London") == "Paris"
    assert first_line(" \n ") == ""

"""Questions about papers: prompts cut to a length, F1 as in SCROLLS, subjects whose result is known.

python -m pytest tests/tasks/test_qasper.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longfocus.errors import ConfigError, InputError
from longfocus.evaluation.run import evaluate
from longfocus.subjects.contract import Completion, Prompt
from longfocus.tasks.contract import Example, Sample
from longfocus.tasks.qasper import Qasper, QasperOptions
from longfocus.tasks.texts import Texts
from tests.machine import data_folder
from tests.small_tokenizers import KINDS
from tests.tasks.fakes import Answers, Chooses, write_sets


def paper(name: str, sentences: int) -> str:
    return f"Title of {name}\n\n" + "".join(f"Sentence {n} of {name} says something new.\n" for n in range(sentences))


def record(name: str, paper_name: str, sentences: int, question: str, *answers: str) -> dict[str, Any]:
    kinds = {"yes": "boolean", "no": "boolean", "unanswerable": "unanswerable"}
    return {
        "id": name,
        "paper": paper_name,
        "title": paper_name,
        "full_text": paper(paper_name, sentences),
        "question": question,
        "answers": list(answers),
        "answer_type": [kinds.get(answer, "extractive") for answer in answers],
    }


RECORDS = [
    record(
        "a1", "alpha", 60, "Which dataset do they use?", "the Yelp Challenge dataset", "Yelp Challenge dataset BIBREF2"
    ),
    record("a2", "alpha", 60, "Do they use a pretrained model?", "no", "no"),
    record(
        "a3", "alpha", 60, "How long is the longest of all the questions that are asked about alpha?", "unanswerable"
    ),
    record("b1", "beta", 6, "Is it larger?", "yes", "unanswerable"),
    record("b2", "beta", 6, "How many words?", "30 words"),
    record("b3", "beta", 6, "Is it better?", "Yes"),
]
FOLLOWING = {record["question"]: record["answers"] for record in RECORDS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sets(tmp_path / "data", {"qasper/test": RECORDS})


def made(folder: Path, **options: Any) -> Qasper:
    return Qasper(QasperOptions(**{"lengths": [500, 3000], **options}), Texts(folder))


def question_of(prompt: str) -> str:
    return prompt.rpartition("\n\nQuestion: ")[2].removesuffix("\nAnswer:")


def first_truth(prompt: str) -> str:
    return f" {FOLLOWING[question_of(prompt)][0]}\nQuestion: and so on"


def unanswerable(prompt: str) -> str:
    return " unanswerable"


def prompts(task: Qasper, subject: Any) -> dict[str, dict[str, Example]]:
    return {p.key: {e.id: e for e in task.examples(subject, p)} for p in task.points(subject)}


# -- prompts -----------------------------------------------------------------------------------------------


def test_a_short_paper_is_whole_and_the_question_follows(folder: Path) -> None:
    found = prompts(made(folder), Answers(unanswerable))
    text = RECORDS[4]["full_text"] + "\n\nQuestion: How many words?\nAnswer:"
    assert found["tokens=500"]["b2"].prompt == found["tokens=3000"]["b2"].prompt == Prompt(text)
    assert found["tokens=500"]["b2"].expected["whole"] is found["tokens=3000"]["a1"].expected["whole"] is True
    assert found["tokens=500"]["a1"].expected["whole"] is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", ["beginning", "end"])
def test_a_long_paper_is_cut_to_the_length_and_the_question_stays(folder: Path, kind: str, keep: str) -> None:
    task, subject = made(folder, keep=keep), Answers(unanswerable, kind=kind)
    found = prompts(task, subject)["tokens=500"]
    whole, parts, sizes = RECORDS[0]["full_text"], set(), []
    for name in ("a1", "a2", "a3"):
        text = found[name].prompt.text
        parts.add(text.rpartition("\n\nQuestion: ")[0])
        sizes.append(len(subject.tokenizer(text)["input_ids"]) + task.max_new_tokens)
    (part,) = parts  # one cut for all questions, so that it is read once
    assert whole.startswith(part) if keep == "beginning" else whole.endswith(part)
    assert 480 <= max(sizes) == sizes[2] <= 500
    shortened = prompts(made(folder, keep=keep, samples=1, seed=0), subject)["tokens=500"]
    assert all(example == found[name] for name, example in shortened.items())  # whoever else is asked


def test_some_questions_by_seed(folder: Path) -> None:
    chosen = [
        list(prompts(made(folder, samples=3, seed=seed), Answers(unanswerable))["tokens=500"]) for seed in range(9)
    ]
    assert all(len(ids) == 3 and ids == sorted(ids) for ids in chosen)
    assert len({tuple(ids) for ids in chosen}) > 1
    assert list(prompts(made(folder, samples=3), Answers(unanswerable))["tokens=3000"]) == chosen[0]
    assert len(prompts(made(folder, samples=99), Answers(unanswerable))["tokens=500"]) == 6


def test_what_cannot_be_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qasper.lengths: 100 given; the longest question and its answer take \d+"):
        made(folder, lengths=[100, 4000]).points(Answers(unanswerable))
    with pytest.raises(InputError, match="qasper"):
        made(tmp_path).points(Answers(unanswerable))


# -- scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answers", "expected"),
    [
        (" The Yelp challenge dataset.\nQuestion: more", ["the Yelp Challenge dataset", "Yelp data"], 1.0),
        (" Yelp", ["the Yelp Challenge dataset", "Yelp data"], 2 / 3),
        (" They use the Yelp Challenge dataset", ["the Yelp Challenge dataset"], 3 / 4),  # 3 of 5 and 3 of 3
        (" yes", ["yes", "unanswerable"], 1.0),
        (" Yes, it is.", ["yes"], 1 / 2),
        (" unanswerable", ["no", "unanswerable"], 1.0),
        ("", ["unanswerable"], 1.0),  # nothing said counts as unanswerable
        ("\nYelp", ["Yelp"], 0.0),
        (" ", ["Yelp"], 0.0),
        (" the the", ["Yelp"], 0.0),
    ],
)
def test_the_first_line_is_compared_with_each_annotators_answer(
    folder: Path, said: str, answers: list[str], expected: float
) -> None:
    example = Example("1", Prompt(""), {"answers": answers})
    assert made(folder).score(example, Completion(said, 1, 0.0)) == {"F1": pytest.approx(expected)}


def scores(task: Qasper, subject: Any, tokens: int = 3000) -> dict[str, Sample]:
    (point,) = [p for p in task.points(subject) if p.values["tokens"] == tokens]
    samples = list(task.samples(subject, point, frozenset()))
    assert len(samples) == point.samples
    return {sample.id: sample for sample in samples}


def test_one_who_knows_scores_1_and_an_echo_does_not(folder: Path) -> None:
    assert [s.scores["F1"] for s in scores(made(folder), Answers(first_truth)).values()] == [1.0] * 6
    assert [s.scores["F1"] for s in scores(made(folder), Answers(lambda p: p)).values()] == [0.0] * 6  # its first line
    flat = scores(made(folder), Answers(lambda p: " " + p.replace("\n", " ")))
    assert all(sample.scores["F1"] < 0.1 for sample in flat.values())


def test_yes_and_no_are_decided_by_their_probabilities_where_there_are_some(folder: Path) -> None:
    likes_no = Chooses(unanswerable, lambda prompt, choice: {" yes": 2.0, " no": 1.0}[choice])
    found = scores(made(folder), likes_no)
    assert {question_of(prompt) for prompt in likes_no.chosen} == {RECORDS[1]["question"], RECORDS[5]["question"]}
    assert {question_of(prompt) for prompt in likes_no.asked} == {RECORDS[n]["question"] for n in (0, 2, 3, 4)}
    assert {name: sample.scores["F1"] for name, sample in found.items()} == {
        "a1": 0.0, "a2": 1.0, "a3": 1.0, "b1": 1.0, "b2": 0.0, "b3": 0.0,
    }  # fmt: skip
    assert found["a2"].details["answer"] == "no"
    assert found["a2"].details["loss of yes, no"] == [2.0, 1.0]
    assert found["a2"].details["prompt_tokens"] > 500
    generated = Answers(lambda prompt: " yes")
    assert scores(made(folder), generated)["b3"].scores["F1"] == 1.0
    assert len(generated.asked) == 6


def test_rows_have_papers_for_groups_and_kinds_of_question(folder: Path, tmp_path: Path) -> None:
    subject = Chooses(unanswerable, lambda prompt, choice: float(choice == " yes"))
    results = evaluate(made(folder), subject, tmp_path / "out")
    short, long = results.rows
    # one of 3 is right about alpha's open ones, one about beta's; no to both yes-no questions
    assert long.estimates["F1"].value == pytest.approx((0 + 1 + 1 + 1 + 0 + 0) / 6)
    assert long.notes == {
        "F1, yes-no": "50.0% of 2",
        "F1, unanswerable": "100.0% of 1",
        "F1, open": "33.3% of 3",
        "papers read whole": "2 of 2",
    }
    assert short.notes["papers read whole"] == "1 of 2"
    assert long.chance == {"F1": pytest.approx((0 + 0.5 + 1 + 1 + 0 + 0.5) / 6)}
    made_up = [Sample(str(n), {"tokens": 1}, {"F1": n / 3}, 1.0, details(n)) for n in range(4)]
    estimate = made(folder).row(made_up).estimates["F1"]
    assert estimate.value == pytest.approx(0.5)
    assert (estimate.low, estimate.high) == (0.0, 1.0)  # two papers: means 1/6 and 5/6, t of 1 degree of freedom


def details(number: int) -> dict[str, Any]:
    return {"paper": "alpha" if number < 2 else "beta", "answers": ["x"], "whole": True}


def test_it_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    class Stops(Chooses):
        def complete(self, given: Any, **more: Any) -> Any:
            for completion in super().complete(given, **more):
                if len(self.asked) == 3:
                    raise KeyboardInterrupt
                yield completion

    def loss(prompt: str, choice: str) -> float:
        return float(choice == " no")

    whole, first, second = Chooses(first_truth, loss), Stops(first_truth, loss), Chooses(first_truth, loss)
    expected = evaluate(made(folder), whole, tmp_path / "whole")
    assert evaluate(made(folder), first, tmp_path / "parts").stopped
    found = evaluate(made(folder), second, tmp_path / "parts")
    assert found.rows == expected.rows and not found.stopped
    assert first.asked[:2] + second.asked == whole.asked
    assert first.chosen + second.chosen == whole.chosen


# -- the real set ------------------------------------------------------------------------------------------


@pytest.mark.data
def test_the_real_questions(tmp_path: Path) -> None:
    texts = Texts(data_folder("qasper"))
    truths = {record["question"]: record["answers"] for record in texts.records("qasper/test")}
    options = QasperOptions(lengths=[2048])

    def knows(prompt: str) -> str:
        return " " + truths[question_of(prompt)][0].strip().replace("\n", " ")

    always = evaluate(Qasper(options, texts), Answers(unanswerable), tmp_path / "always").rows[0]
    assert (always.samples, always.estimates["F1"].value) == (42, pytest.approx(8 / 42))
    assert always.chance["F1"] == pytest.approx((8 + 3 / 2) / 42)
    assert evaluate(Qasper(options, texts), Answers(knows), tmp_path / "knows").rows[0].estimates["F1"].value == 1

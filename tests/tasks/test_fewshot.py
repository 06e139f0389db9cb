"""In-context learning: prompts, draws, scores, and subjects whose result is known.

python -m pytest tests/tasks/test_fewshot.py
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, InputError
from longfocus.evaluation.run import evaluate
from longfocus.model import reading_pass
from longfocus.model.attach import attach
from longfocus.subjects.contract import Completion, Prompt
from longfocus.subjects.local import FocusedSubject
from longfocus.tasks.contract import Example, Point
from longfocus.tasks.fewshot import Fewshot, FewshotOptions
from longfocus.tasks.statistics import mean_of
from longfocus.tasks.texts import Texts
from tests.machine import data_folder
from tests.models import tiny
from tests.small_tokenizers import KINDS, tokenizer
from tests.tasks.fakes import Answer, Answers, write_sets

LABELS = ("HUM:ind", "LOC:city", "NUM:date", "DESC:def")
THINGS = "lamp clock river spoon whale cloud ladder piano needle barrel anchor candle".split()


def trec(part: str, count: int) -> list[dict[str, Any]]:
    made = []
    for number in range(count):
        label = LABELS[number % len(LABELS)] if number % 5 else "HUM:ind"
        text = f"Who or where or what is the {part} {THINGS[number % 12]} number {number} ?"
        made.append({"id": f"{part}-{number}", "text": text, "coarse": label[:3], "fine": label})
    return made


def webqs(part: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"w{part}-{n}",
            "question": f"who made the {part} {THINGS[n % 12]} {n}?",
            "answers": [f"Mr. {n}", f"{n}"],
        }
        for n in range(count)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sets = {"trec/train": trec("train", 60), "trec/test": trec("test", 40)}
    more = {"webqs/train": webqs("train", 60), "webqs/test": webqs("test", 40)}
    return write_sets(tmp_path / "data", {**sets, **more})


def made(folder: Path, **options: Any) -> Fewshot:
    settings = {"lengths": [300, 700], "draws": 3, "questions": 4, **options}
    return Fewshot(FewshotOptions(**settings), Texts(folder))


def everything(task: Fewshot, subject: Any) -> dict[str, list[Example]]:
    return {point.key: list(task.examples(subject, point)) for point in task.points(subject)}


def nothing(prompt: str) -> str:
    return ""


# -- prompts -----------------------------------------------------------------------------------------------


def test_a_prompt_is_demonstrations_and_a_question_without_its_answer(folder: Path) -> None:
    task, subject = made(folder), Answers(nothing)
    by_text = {record["text"]: record["fine"] for record in trec("train", 60)}
    asked = {record["text"]: record["fine"] for record in trec("test", 40)}
    for example in everything(task, subject)["tokens=700, set=trec"]:
        *shown, last = example.prompt.text.split("\n")
        assert len(shown) == example.expected["demonstrations"] > 3
        labels = []
        for line in shown:
            text, _, label = line.removeprefix("Question: ").partition(" Type: ")
            assert by_text[text] == label
            labels.append(label)
        assert last.startswith("Question: ") and last.endswith(" Type:")
        label = asked[last.removeprefix("Question: ").removesuffix(" Type:")]
        assert example.expected["class"] == label
        assert example.expected["class_shown"] == labels.count(label)
        assert example.expected["classes"] == len(set(labels))
        assert labels.count(example.expected["commonest"]) == max(Counter(labels).values())
    for example in everything(task, subject)["tokens=300, set=webqs"]:
        *shown, last = example.prompt.text.split("\n")
        assert all(" Answer: Mr. " in line for line in shown)  # the first listed answer
        assert last.endswith(" Answer:")


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_demonstrations_as_fit(folder: Path, kind: str) -> None:
    """Every prompt leaves room for its answer, and one demonstration more would be too many for the longest question."""
    task, subject = made(folder, questions=None), Answers(nothing, kind=kind)
    for point in task.points(subject):
        tokens, part = int(point.values["tokens"]), str(point.values["set"])
        assert point.tokens == tokens
        for example in task.examples(subject, point):
            assert len(subject.tokenizer(example.prompt.text)["input_ids"]) + task.max_new_tokens <= tokens
        for draw in range(3):
            shown = task._demonstrations(subject, part, draw, tokens)
            order = task._order(part, draw)
            assert shown == order[: len(shown)][::-1]
            more = "".join(item.demonstration for item in order[: len(shown) + 1][::-1])
            assert task._tokens(subject, part, more) > tokens


def test_a_length_beyond_the_training_part_takes_all_of_it(folder: Path) -> None:
    task, subject = made(folder, lengths=[20000], sets=["trec"], draws=1), Answers(nothing)
    (examples,) = everything(task, subject).values()
    assert [example.expected["demonstrations"] for example in examples] == [60] * 4


def test_a_draw_has_the_same_demonstrations_for_all_questions_and_longer_prompts_only_add_earlier_ones(
    folder: Path,
) -> None:
    found = everything(made(folder), Answers(nothing))
    fronts: dict[str, dict[int, str]] = {}
    for key, examples in found.items():
        for example in examples:
            front = example.prompt.text.rpartition("Question: ")[0]
            assert fronts.setdefault(key, {}).setdefault(example.expected["draw"], front) == front
    for part in ("trec", "webqs"):
        short, long = fronts[f"tokens=300, set={part}"], fronts[f"tokens=700, set={part}"]
        assert len(set(short.values())) == 3
        for draw in range(3):
            assert long[draw].endswith(short[draw]) and len(long[draw]) > 1.5 * len(short[draw])
    order = [example.expected["draw"] for example in found["tokens=700, set=trec"]]
    assert order == sorted(order)  # side by side, so that they are read once


def test_questions_in_turn_and_the_same_at_every_length(folder: Path) -> None:
    found = everything(made(folder, draws=10), Answers(nothing))
    ids = {key: [example.id for example in examples] for key, examples in found.items()}
    assert ids["tokens=300, set=trec"] == ids["tokens=700, set=trec"]
    assert len(set(ids["tokens=300, set=trec"])) == 40
    assert len({name.partition(" ")[2] for name in ids["tokens=300, set=trec"]}) == 40  # each once in 10 draws of 4
    whole = everything(made(folder, questions=None, draws=2), Answers(nothing))["tokens=300, set=trec"]
    assert len(whole) == len({example.id for example in whole}) == 80


def test_the_seed_decides_everything(folder: Path) -> None:
    one = everything(made(folder), Answers(nothing))
    assert one == everything(made(folder), Answers(nothing))
    other = everything(made(folder, seed=1), Answers(nothing))
    assert all(
        [a.prompt for a in one[key]] != [b.prompt for b in other[key]] and len(one[key]) == len(other[key])
        for key in one
    )


def test_no_demonstration_is_a_test_question_or_stands_twice(tmp_path: Path) -> None:
    train, test = trec("train", 30), trec("test", 10)
    leak = {**test[3], "id": "leak", "text": test[3]["text"].upper() + " "}
    twice = {**train[0], "id": "twice", "fine": "NUM:date"}
    folder = write_sets(tmp_path, {"trec/train": [leak, *train, twice], "trec/test": test})
    task = made(folder, sets=["trec"], lengths=[20000], draws=1)
    (examples,) = everything(task, Answers(nothing)).values()
    shown = examples[0].prompt.text.split("\n")[:-1]
    assert len(shown) == 30
    assert not any(test[3]["text"].lower() in line.lower() for line in shown)
    assert [line for line in shown if train[0]["text"] in line] == [f"Question: {train[0]['text']} Type: HUM:ind"]


def test_what_cannot_be_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fewshot.lengths: 60 given; a demonstration, a question of trec"):
        made(folder, lengths=[60, 2000]).points(Answers(nothing))
    with pytest.raises(InputError, match="webqs"):
        made(write_sets(tmp_path / "other", {"trec/train": trec("train", 9)}), sets=["webqs"]).points(Answers(nothing))


# -- scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "right", "coarse"),
    [
        (" NUM:dist\nQuestion: How far ?", 1, 1),
        (" num:DIST", 1, 1),
        (" The type is NUM: dist.", 1, 1),
        (" NUM:dist Question: Who was Galileo ? Type: HUM:desc", 1, 1),
        (" NUM:date\n", 0, 1),
        (" NUM:distance", 0, 1),
        (" LOC:dist", 0, 0),
        (" NUM:dist or NUM:date", 0, 1),
        (" NUM:dist, LOC:city", 0, 0),
        (" HUM:ind\nNUM:dist", 0, 0),
        (" NUM", 0, 0),
        (" ENUM:dist", 0, 0),
        ("", 0, 0),
    ],
)
def test_a_class_is_right_when_it_and_no_other_is_named(folder: Path, said: str, right: int, coarse: int) -> None:
    example = Example("1", Prompt(""), {"class": "NUM:dist", "class_shown": 2, "draw": 0})
    found = made(folder).score(example, Completion(said, 1, 0.0))
    assert found == {"right": right, "coarse class right": coarse, "right, class shown": right}
    unseen = Example("1", Prompt(""), {**example.expected, "class_shown": 0})
    assert "right, class shown" not in made(folder).score(unseen, Completion(said, 1, 0.0))


@pytest.mark.parametrize(
    ("said", "right", "more"),
    [
        (" jamaican english.\nQuestion: who", 1, 1),
        (" Jamaican Creole English Language", 1, 1),
        (" the Jamaican English Question: what", 1, 1),
        (" They speak Jamaican English there.", 0, 1),
        (" English", 0, 0),
        (" Spanish\nJamaican English", 0, 0),
        (" " + "word " * 11 + "Jamaican English", 0, 0),
        ("", 0, 0),
    ],
)
def test_any_listed_answer_is_right(folder: Path, said: str, right: int, more: int) -> None:
    example = Example("1", Prompt(""), {"answers": ["Jamaican Creole English Language", "Jamaican English"], "draw": 0})
    found = made(folder).score(example, Completion(said, 1, 0.0))
    assert found == {"right": right, "right or more words": more}


# -- subjects whose result is known ------------------------------------------------------------------------


def last_question(prompt: str) -> str:
    return prompt.rpartition("Question: ")[2]


def injected(prompt: str) -> str:
    asked = last_question(prompt)
    for record in trec("test", 40):
        if asked == f"{record['text']} Type:":
            return f" {record['fine']}\nQuestion: and so on"
    number = asked.removesuffix("? Answer:").split()[-1]
    return f" {number}\n"


def echo(prompt: str) -> str:
    return prompt


def echo_in_one_line(prompt: str) -> str:
    return " " + prompt.replace("\n", " ")


def copies_the_last(prompt: str) -> str:
    return " " + prompt.splitlines()[-2].rpartition(": ")[2]


def run(task: Fewshot, subject: Any, folder: Path) -> dict[str, Any]:
    results = evaluate(task, subject, folder)
    return {f"{row.values['tokens']} {row.values['set']}": row for row in results.rows}


@pytest.mark.parametrize("answer", [injected, echo, echo_in_one_line])
def test_one_who_knows_scores_1_and_echoes_score_0(folder: Path, tmp_path: Path, answer: Answer) -> None:
    for key, row in run(made(folder, draws=5, questions=8), Answers(answer), tmp_path / "out").items():
        assert row.samples == 40
        right = row.estimates["right"]
        assert right.value == float(answer is injected), key
        assert all(estimate.value == right.value for estimate in row.estimates.values())
        assert right.high - right.low > 0.05  # 40 samples never make certain


def test_one_who_copies_the_last_demonstration_is_right_where_it_fits(folder: Path, tmp_path: Path) -> None:
    task, subject = made(folder, draws=5, questions=8, sets=["trec"]), Answers(copies_the_last)
    rows = run(task, subject, tmp_path / "out")
    by_draw = [
        [e.prompt.text.splitlines()[-2].endswith(e.expected["class"]) for e in examples]
        for examples in (task._draw(subject, Point(rows["300 trec"].values, 40), draw) for draw in range(5))
    ]
    expected = mean_of([sum(found) / 8 for found in by_draw])
    assert 0 < expected.value < 1
    for row in rows.values():  # the nearest demonstration is the same at every length
        assert row.estimates["right"].value == pytest.approx(expected.value)
        assert row.estimates["right"].low <= max(0, expected.low) + 1e-9
        assert row.estimates["right"].high >= min(1, expected.high) - 1e-9


def test_the_table_says_how_many_demonstrations_and_classes(folder: Path, tmp_path: Path) -> None:
    task = made(folder, draws=2)
    rows = run(task, Answers(nothing), tmp_path / "out")
    examples = everything(task, Answers(nothing))["tokens=300, set=trec"]
    fronts = [examples[0].prompt.text.splitlines()[:-1], examples[4].prompt.text.splitlines()[:-1]]
    notes = rows["300 trec"].notes
    assert notes["demonstrations"] == (len(fronts[0]) + len(fronts[1])) / 2
    classes = sum(len({line.rpartition(" ")[2] for line in front}) for front in fronts) / 2
    assert notes["classes shown"] == f"{classes:.1f} of 50 ({2 * classes:.0f}%)"
    shown = sum(any(line.endswith(e.expected["class"]) for line in e.prompt.text.splitlines()[:-1]) for e in examples)
    assert notes["questions whose class is shown"] == f"{100 * shown / 8:.1f}%"
    assert set(rows["300 webqs"].notes) == {"demonstrations"}
    assert rows["300 webqs"].chance == {}
    # of 60 and 40 records, HUM:ind has 24 and 16, the others 12 and 8
    assert rows["300 trec"].chance["right"] == pytest.approx((24 * 16 + 3 * 12 * 8) / (60 * 40))


def test_it_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    class Stops(Answers):
        def complete(self, prompts: Any, **more: Any) -> Any:
            for completion in super().complete(prompts, **more):
                if len(self.asked) == 6:
                    raise KeyboardInterrupt
                yield completion

    whole = Answers(injected)
    expected = evaluate(made(folder), whole, tmp_path / "whole")
    first = Stops(injected)
    assert evaluate(made(folder), first, tmp_path / "parts").stopped
    second = Answers(injected)
    found = evaluate(made(folder), second, tmp_path / "parts")
    assert found.rows == expected.rows
    assert first.asked[:5] + second.asked == whole.asked
    lines = [(tmp_path / name / "samples.jsonl").read_text("utf-8") for name in ("whole", "parts")]
    assert lines[0] == lines[1]


# -- a focused model ---------------------------------------------------------------------------------------


def test_a_focused_model_reads_the_demonstrations_of_a_draw_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All whole passes that lie in the demonstrations are shared, and the answers are those of each prompt alone."""
    monkeypatch.setattr(reading_pass, "PASS_TOKENS", 1)  # a window
    window = 64
    base = tiny("llama", vocab_size=len(tokenizer("byte_level")))
    model = attach(base, FocusConfig(memory_layers=(1, 2), window=window))
    subject = FocusedSubject(model, tokenizer("byte_level"), "tiny")
    task = made(folder, draws=2, lengths=[700], sets=["trec"])
    fed = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    try:
        (point,) = task.points(subject)
        samples = list(task.samples(subject, point, frozenset()))
    finally:
        hook.remove()
    assert len(samples) == 8
    shared = [sample.details["tokens_read_with_others"] for sample in samples]
    prompts = [sample.details["prompt_tokens"] for sample in samples]
    for all_read, prompt in zip(shared, prompts, strict=True):
        assert all_read % window == 0 and prompt - all_read < 3 * window
    once = 2 * max(shared) + sum(p - s for p, s in zip(prompts, shared, strict=True))
    assert sum(fed) <= once + 8 * task.max_new_tokens < sum(prompts) / 2
    examples = list(task.examples(subject, point))
    for example, sample in zip(examples[2:6], samples[2:6], strict=True):
        (alone,) = subject.complete([example.prompt], max_new_tokens=task.max_new_tokens, stop=task.stop)
        assert alone.text == sample.details["answer"]


# -- the real sets -----------------------------------------------------------------------------------------


@pytest.fixture
def real() -> Path:
    return data_folder("trec")


@pytest.mark.data
def test_one_who_names_demonstrated_classes_at_random_scores_chance(real: Path, tmp_path: Path) -> None:
    rng = random.Random("guesses")

    def guesses(prompt: str) -> str:
        return " " + rng.choice(prompt.splitlines()[:-1]).rpartition(" ")[2]

    task = Fewshot(FewshotOptions(lengths=[2048], sets=["trec"]), Texts(real))
    (row,) = evaluate(task, Answers(guesses), tmp_path / "out").rows
    assert row.samples == 500
    assert row.chance["right"] == pytest.approx(0.0586, abs=5e-4)
    for measure, chance in row.chance.items():
        assert row.estimates[measure].low <= chance <= row.estimates[measure].high, measure
        assert row.estimates[measure].high - row.estimates[measure].low < 0.12


@pytest.mark.data
def test_one_who_knows_the_real_answers_scores_1(real: Path, tmp_path: Path) -> None:
    texts = Texts(real)
    known = {f"{r['text']} Type:": r["fine"] for r in texts.records("trec/test")}
    known |= {f"{r['question']} Answer:": r["answers"][-1] for r in texts.records("webqs/test")}
    assert len(known) == 2532
    task = Fewshot(FewshotOptions(lengths=[1024], draws=4), texts)
    for row in evaluate(task, Answers(lambda prompt: known[last_question(prompt)]), tmp_path / "out").rows:
        assert row.estimates["right"].value == 1
        assert row.samples == 100

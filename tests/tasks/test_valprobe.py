"""VaL Probing: contexts are what they say, scores and spans are FILM's, and known answerers get what they must.

python -m pytest tests/tasks/test_valprobe.py
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from longfocus import FocusConfig, attach
from longfocus.errors import InputError
from longfocus.evaluation.run import evaluate
from longfocus.model import reading_pass
from longfocus.subjects.contract import Completion, Prompt
from longfocus.subjects.local import FocusedSubject
from longfocus.tasks.contract import Example, Row, Sample
from longfocus.tasks.texts import Texts
from longfocus.tasks.valprobe import (
    KINDS,
    ValProbe,
    ValProbeOptions,
    choose,
    equal_parts,
    fill,
    gap,
    guess,
    occurs_once,
    position_of,
    score,
    span_of,
    word_recall,
    write,
)
from tests.machine import data_folder
from tests.models import MEMORY_LAYERS, tiny
from tests.small_tokenizers import tokenizer

STYLES = ("document", "code", "database")
WORDS = (
    "amber basin cobalt dune ember fjord garnet harbour islet jasper kelp lagoon marble nickel opal pewter quartz ridge "
    "sable tundra umber violet willow xenon yarrow zinc acorn birch cedar dahlia elder fern ginger hazel iris juniper"
).split()
COUNT = 400


class Answerer:
    """A subject whose answers are made from the prompt."""

    name, longest = "answerer", None
    tokenizer = tokenizer("byte_level")

    def __init__(self, answer: Callable[[str], str] = lambda text: "") -> None:
        self.answer = answer
        self.asked: list[str] = []

    def about(self) -> dict[str, Any]:
        return {"name": self.name}

    def complete(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: str | None = None, mass: bool = False
    ) -> Iterator[Completion]:
        for prompt in prompts:
            self.asked.append(prompt.text)
            yield Completion(self.answer(prompt.text), len(prompt.text), 0.0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return pieces_in(tmp_path_factory.mktemp("sets"), "hall in {word}, no. {number}")


def pieces_in(folder: Path, description: str) -> Texts:
    """Pieces of each style, with ambiguous ones among them."""
    (folder / "valprobe").mkdir()
    rng = random.Random(0)
    sentences, functions, entities = [], [], []
    for number in range(COUNT):
        words = [f"{rng.choice(WORDS)}{rng.randrange(99)}" for _ in range(14)]
        sentences.append({"sentence": " ".join(words).capitalize() + ".", "piece": " ".join(words[3:11])})
        middle = "return False" if number % 5 == 0 else f"total_{number} = step({rng.choice(WORDS)})"
        lines = [f"    first = {rng.choice(WORDS)}", f"    {middle}", f"    log('{rng.choice(WORDS)}')"]
        name = f"{rng.choice(WORDS)}_{number}_done"
        functions.append({"function_name": name, "function_define": "\n".join(lines), "piece": middle})
        label = f"{rng.choice(WORDS)} {number} hall"
        entities.append(
            {
                "id": f"Q{number + 1}",
                "label": label,
                "dcpt": description.format(word=rng.choice(WORDS[:9]), number=number),
            }
        )
    files = {"document_sentences": sentences, "code_functions": functions, "database_entities": entities}
    for name, records in files.items():
        with gzip.open(folder / "valprobe" / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return Texts(folder)


def made(texts: Texts, **options: Any) -> ValProbe:
    given: dict[str, Any] = {"lengths": [2048], "positions": 4, "samples": 4, "sets": 2, **options}
    return ValProbe(ValProbeOptions(**given), texts)


def all_examples(task: ValProbe, subject: Any) -> list[Example]:
    return [example for point in task.points(subject) for example in task.examples(subject, point)]


# -- contexts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "unigram"])
def test_a_context_holds_as_many_pieces_as_fit_and_no_more(texts: Texts, style: str, kind: str) -> None:
    subject: Any = Answerer()
    subject.tokenizer = tokenizer(kind)
    task = made(texts, styles=[style], lengths=[3000], sets=1)
    (point,) = task.points(subject)
    sizes = [len(subject.tokenizer(e.prompt.text)["input_ids"]) for e in task.examples(subject, point)]
    context = task._composed(subject, style, 3000)
    assert not isinstance(context, str)
    piece = len(subject.tokenizer(write(style, context[0].pieces[:9]))["input_ids"]) // 9
    assert max(sizes) <= 3000
    assert min(sizes) > 3000 - 4 * piece


def test_the_longest_question_fits_whoever_asks_it(texts: Texts) -> None:
    pool = texts.records(KINDS["document"].file)
    long = {"sentence": "The " + "very " * 60 + "end", "piece": "very " * 60}
    pieces = fill(tokenizer("byte_level"), "document", [*pool[:5], long, *pool[5:]], 2048)
    assert long in pieces
    without = fill(tokenizer("byte_level"), "document", [*pool[:5], *pool[5:]], 2048)
    assert len(pieces) < len(without)


@pytest.mark.parametrize("style", STYLES)
def test_asked_pieces_are_where_they_are_said_to_be_and_their_keyword_is_there_once(texts: Texts, style: str) -> None:
    subject = Answerer()
    for example in all_examples(made(texts, styles=[style], samples=8), subject):
        context, instruction = example.prompt.text.split("### Context:\n")[1].split("\n\n### Instruction:\n")
        expected = example.expected
        assert context.count(expected["keyword"]) == 1
        assert expected["keyword"] in instruction
        before = context[: context.index(expected["keyword"])]
        if style == "document":
            assert before.count("\n") == expected["place"]
            assert expected["sentence"] in context and expected["sentence"] not in instruction
        elif style == "code":
            assert before.count("\ndef ") + 1 == expected["place"] + 1
            assert before.rindex(f"def {expected['function_name']}(") == before.rindex("def ")
            assert expected["function_name"] not in instruction
        else:
            assert before.count("\n") == expected["place"]
            behind = context[context.index(expected["keyword"]) :].split("\n")[0]
            assert expected["label"] in behind and expected["dcpt"] in behind
            assert expected["label"] not in instruction
        assert expected["position"] == position_of(span_of(expected["place"], expected["places"], 4), 4)


def test_ambiguous_pieces_stay_in_the_context_and_are_never_asked() -> None:
    pieces = [
        {"function_name": f"f{n}", "function_define": f"    a\n    {line}\n    b", "piece": line}
        for n, line in enumerate(["return 1", "x = 12", "return 1", "x = 1", "y = 3", "y = 33"])
    ]
    chosen = choose("code", pieces, 3, 2, random.Random(0))
    assert chosen == (1, 5)  # "return 1" is there twice, "x = 1" is in "x = 12", "y = 3" in "y = 33"
    assert occurs_once("aa", "baab") and not occurs_once("aa", "aaa") and not occurs_once("c", "ab")


def test_each_span_is_asked_equally_often_and_nothing_twice(texts: Texts) -> None:
    task = made(texts, positions=5, samples=7, sets=3, styles=["document"])
    examples = all_examples(task, Answerer())
    assert len({example.id for example in examples}) == len(examples) == 5 * 7
    for position in {example.expected["position"] for example in examples}:
        by_set = [e.expected["set"] for e in examples if e.expected["position"] == position]
        assert sorted(by_set) == [0, 0, 0, 1, 1, 2, 2]
    assert {example.expected["position"] for example in examples} == {0.1, 0.3, 0.5, 0.7, 0.9}


def test_prompts_of_a_set_stand_side_by_side_and_begin_alike(texts: Texts) -> None:
    examples = all_examples(made(texts, sets=2, samples=8), Answerer())
    contexts = [example.prompt.text.split("### Instruction:")[0] for example in examples]
    runs = 1 + sum(a != b for a, b in pairwise(contexts))
    assert runs == len(set(contexts)) == 3 * 2


def test_examples_depend_on_the_seed_alone(texts: Texts) -> None:
    first = all_examples(made(texts), Answerer())
    assert all_examples(made(texts), Answerer()) == first
    assert all_examples(made(texts, styles=["code"]), Answerer()) == [
        example for example in first if "function_name" in example.expected
    ]
    assert all_examples(made(texts, seed=1), Answerer()) != first


def test_lengths_that_cannot_be_composed_are_refused_with_the_reason(texts: Texts) -> None:
    points = made(texts, lengths=[256, 4096, 1 << 20], positions=30, sets=1, samples=1).points(Answerer())
    reasons = {int(point.values["tokens"]): point.refused for point in points if point.values["style"] == "document"}
    assert "fewer than positions=30" in str(reasons[256])
    assert reasons[4096] is None
    assert "do not fill 1M" in str(reasons[1 << 20])


def test_a_missing_or_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="document_sentences"):
        made(Texts(tmp_path)).points(Answerer())
    (tmp_path / "valprobe").mkdir()
    with gzip.open(tmp_path / "valprobe" / "document_sentences.jsonl.gz", "wt") as file:
        file.write('{"sentence": "a b"}\n')
    with pytest.raises(InputError, match="line 1: no piece"):
        made(Texts(tmp_path)).points(Answerer())


# -- scores ------------------------------------------------------------------------------------------------


def test_scores_worked_by_hand() -> None:
    assert word_recall("The cat saw the dog.", "the cat") == 2 / 4  # the, cat, saw, dog.
    assert word_recall("The cat saw the dog.", "a DOG. SAW") == 2 / 4
    assert word_recall("The cat saw the dog.", "dog") == 0  # words are cut at white space only
    assert score("document", {"sentence": "A b c"}, "the sentence is: a b c") == 1
    assert score("code", {"function_name": "parse_row."}, " `parse_row` it is") == 1
    assert score("code", {"function_name": "parse_row"}, "Parse_Row") == 0
    assert score("code", {"function_name": "row"}, "parse_row") == 1  # as FILM: a substring
    entity = {"label": "Blue Hall.", "dcpt": "Hall in Fjord"}
    assert score("database", entity, "it is BLUE hall") == 1
    assert score("database", entity, "a hall in fjord, I think") == 1
    assert score("database", entity, "blue house in fjord") == 0
    for style, right in (("document", {"sentence": "A"}), ("code", {"function_name": "f"}), ("database", entity)):
        assert score(style, right, "") == 0
        assert score(style, right, " \n") == 0


def test_only_the_first_words_of_an_answer_count() -> None:
    entity = {"label": "blue hall", "dcpt": "hall in fjord"}
    assert score("database", entity, "word " * 126 + "blue hall") == 1
    assert score("database", entity, "word " * 127 + "blue hall") == 0
    assert score("database", entity, "  word\n" * 126 + "blue hall tail") == 1
    assert score("code", {"function_name": "f_x"}, "word " * 128 + "f_x") == 0


def test_guessing_is_what_repeating_or_naming_another_piece_scores(texts: Texts) -> None:
    sentence = {"sentence": "a b c d e", "piece": "b c"}
    assert guess("document", [sentence], 0) == 2 / 5
    entities = [{"id": str(n), "label": f"hall {n}", "dcpt": "hall" if n < 3 else "mill"} for n in range(5)]
    assert guess("database", entities, 0) == 2 / 4 + 2 / 4  # all other labels hold "hall"
    assert guess("database", entities, 4) == 1 / 4
    functions = [{"function_name": name, "function_define": "", "piece": ""} for name in ("get", "get_all", "put")]
    assert guess("code", functions, 0) == 1 / 2 and guess("code", functions, 1) == 0


# -- Avg and Gap -------------------------------------------------------------------------------------------


def as_plot_py(
    scored: list[tuple[int, int, float]], places: int, span: int, leave_out: bool
) -> tuple[list[float], ...]:
    """Span values, Avg and Gap in the order in which FILM's script takes them, from (set, place, score)."""
    values = []
    for begin in range(0, places, span):
        last = begin + span - (1 if leave_out else 0)
        means = []
        for number in sorted({s for s, _, _ in scored}):
            found = [score for s, place, score in scored if s == number and begin <= place < last]
            means.append(sum(found) / len(found))
        values.append(sum(means) / len(means))
    return values, [sum(values) / len(values), max(values) - min(values)]


def scored_rows(
    texts: Texts, scored: list[tuple[int, int, float]], places: int, spans: int, **options: Any
) -> list[Row]:
    samples = []
    for number, place, value in scored:
        span = span_of(place, places, spans)
        last = place + 1 == places or span_of(place + 1, places, spans) != span
        details = {"set": number, "last of its span": last, "guess": 0.25}
        values = {"position": position_of(span, spans), "style": "code", "tokens": 32768}
        samples.append(Sample(f"{number} {place}", values, {"score": value}, 1.0, details))
    return made(texts, positions=spans, **options).rows(samples)


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_spans_avg_and_gap_are_those_of_films_script(
    texts: Texts, leave_out: bool, binary: bool, skipped: bool
) -> None:
    """800 places in 16 spans of 50, 4 sets; also where ambiguous places are missing, so that sets are uneven."""
    rng = random.Random(f"{binary} {skipped}")
    scored = []
    for number in range(4):
        for place in range(800):
            if skipped and rng.random() < 0.1 * number:
                continue
            right = rng.random() < 0.3 + 0.6 * abs(place / 400 - 1)
            scored.append((number, place, float(right) if binary else rng.random() * right))
    values, (average, difference) = as_plot_py(scored, 800, 50, leave_out)
    whole, *parts = scored_rows(texts, scored, 800, 16, leave_out_last=leave_out)
    assert [row.estimates["score"].value for row in parts] == pytest.approx(values, abs=1e-12)
    assert [row.values["position"] for row in parts] == [position_of(span, 16) for span in range(16)]
    assert whole.estimates["score"].value == pytest.approx(average, abs=1e-12)
    assert whole.estimates["Gap"].value == pytest.approx(difference, abs=1e-12)
    assert "position" not in whole.values
    assert whole.chance == {"score": pytest.approx(0.25)}
    other, _ = as_plot_py(scored, 800, 50, not leave_out)
    assert other != values, "leaving out the last place changes these values, so the check can fail"
    for row in parts:
        low, high = row.estimates["score"].low, row.estimates["score"].high
        assert 0 <= low <= row.estimates["score"].value <= high <= 1 and high - low < 0.25


def test_the_gap_by_chance_is_that_of_positions_that_do_not_matter(texts: Texts) -> None:
    """Of scores drawn without regard to the position, the Gap lies below its 95% mark about 95 times in 100."""
    below, total = 0, 60
    for trial in range(total):
        rng = random.Random(trial)
        scored = [(place % 2, place, float(rng.random() < 0.4)) for place in range(96)]
        whole = scored_rows(texts, scored, 96, 8)[0]
        usual, most = (float(part.split()[-1].rstrip("%")) / 100 for part in whole.notes["Gap by chance"].split(","))
        assert 0 < usual < most
        below += whole.estimates["Gap"].value <= most + 0.005
    assert below >= 52  # 60 of 0.95 would be 57 ± 1.7


def test_weights_make_sets_and_spans_equal() -> None:
    def sample(position: float, number: int) -> Sample:
        return Sample("", {"position": position}, {"score": 0.0}, 1.0, {"set": number})

    group = [sample(0.25, 0), sample(0.25, 0), sample(0.25, 1), sample(0.75, 0)]
    assert equal_parts(group, by_span=True) == [0.25, 0.25, 0.5, 1.0]
    assert equal_parts(group[:3], by_span=False) == [0.25, 0.25, 0.5]
    assert equal_parts(group[1:], by_span=False) == [0.25, 0.5, 0.25]
    assert equal_parts([group[0], group[2]], by_span=True) == [1.0, 1.0]
    assert gap([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 2], [0.25, 0.25, 1, 1]) == 1.0


# -- known answerers ---------------------------------------------------------------------------------------


def run(task: ValProbe, subject: Any, folder: Path) -> dict[str, Row]:
    """The rows over all positions, by style."""
    results = evaluate(task, subject, folder / "run")
    assert not results.stopped
    return {str(row.values["style"]): row for row in results.rows if "position" not in row.values}


def knowing(task: ValProbe, say: Callable[[Example], str]) -> Answerer:
    """Answers from the expected values of each prompt."""
    known = {example.prompt.text: say(example) for example in all_examples(task, Answerer())}
    return Answerer(known.__getitem__)


def answer_of(example: Example) -> str:
    right = example.expected
    return right.get("sentence") or right.get("function_name") or f"{right['label']}, {right['dcpt']}"


def test_the_injected_answer_scores_1_in_other_surroundings_too(texts: Texts, tmp_path: Path) -> None:
    task = made(texts)
    for number, words in enumerate(("{}", "Sure! I looked it up:\n\n“ {} ” – as asked.")):
        rows = run(task, knowing(task, lambda e, words=words: words.format(answer_of(e))), tmp_path / str(number))
        for style in STYLES:
            assert rows[style].estimates["score"].value == 1, (style, words)
            assert rows[style].estimates["Gap"].value == 0


def test_whoever_repeats_the_whole_context_is_not_right(texts: Texts, tmp_path: Path) -> None:
    """He finds what stands at the beginning; the words of sentences here are all different."""
    task = made(texts, positions=8, lengths=[20_000])
    context = "### Context:\n"
    rows = run(task, Answerer(lambda text: text.split(context)[1].split("\n\n### Instruction")[0]), tmp_path)
    assert rows["code"].estimates["score"].value <= 1 / 8
    assert rows["database"].estimates["score"].value <= 1 / 8
    assert rows["document"].estimates["score"].value < rows["document"].chance["score"]
    whole = run(task, Answerer(lambda text: text), tmp_path / "prompt")
    assert whole["code"].estimates["score"].value <= 1 / 8


def test_whoever_repeats_the_question_scores_the_chance_level(texts: Texts, tmp_path: Path) -> None:
    task = made(texts, styles=["document"])
    rows = run(task, knowing(task, lambda example: example.expected["keyword"]), tmp_path)
    assert rows["document"].estimates["score"].value == pytest.approx(rows["document"].chance["score"], abs=1e-6)
    assert 0.4 < rows["document"].chance["score"] < 0.7  # 8 of 14 words, the first and last of which are not given


def test_another_piece_at_random_scores_chance_within_its_interval(tmp_path: Path) -> None:
    """Descriptions are those of several entities, as in FILM's pieces."""
    task = made(pieces_in(tmp_path, "hall in {word}"), samples=24, styles=["code", "database"])
    rng = random.Random(4)
    known = {example.prompt.text: example.expected for example in all_examples(task, Answerer())}

    def another(text: str) -> str:
        context = text.split("### Context:\n")[1].split("\n\n### Instruction")[0]
        pieces = context.split("\n\n" if "def " in context else "\n")
        return rng.choice([piece for piece in pieces if known[text]["keyword"] not in piece])

    rows = run(task, Answerer(another), tmp_path)
    assert rows["code"].estimates["score"].value == rows["code"].chance["score"] == 0
    estimate, chance = rows["database"].estimates["score"], rows["database"].chance["score"]
    assert estimate.low <= chance <= estimate.high and 0.05 < chance < 0.2


def test_a_model_lost_in_the_middle_shows_as_gap_and_curve(texts: Texts, tmp_path: Path) -> None:
    task = made(texts, positions=4)
    subject = knowing(
        task, lambda e: answer_of(e) if abs(e.expected["place"] / e.expected["places"] - 0.5) > 0.25 else "?"
    )
    results = evaluate(task, subject, tmp_path / "run")
    for style in STYLES:
        curve = [
            row.estimates["score"].value
            for row in results.rows
            if row.values["style"] == style and "position" in row.values
        ]
        assert curve == [1, 0, 0, 1]
        whole = next(row for row in results.rows if row.values["style"] == style and "position" not in row.values)
        assert whole.estimates["score"].value == 0.5 and whole.estimates["Gap"].value == 1
    table = (tmp_path / "run" / "table.md").read_text("utf-8")
    assert "| all | document | 2k | 50%" in table and "Gap by chance" in table


def test_a_stopped_run_goes_on_to_the_same_samples(texts: Texts, tmp_path: Path) -> None:
    def say(text: str) -> str:
        return text[-9:]

    whole = evaluate(made(texts), Answerer(say), tmp_path / "whole")
    subject = Answerer(say)

    def interrupt(point: Any, done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    assert evaluate(made(texts), subject, tmp_path / "parts", step=interrupt).stopped
    again = Answerer(say)
    assert evaluate(made(texts), again, tmp_path / "parts").rows == whole.rows
    assert len(again.asked) == 3 * 4 * 4 - 9
    lines = [(tmp_path / name / "samples.jsonl").read_text("utf-8") for name in ("whole", "parts")]
    assert lines[0] == lines[1]


def test_a_focused_model_reads_a_set_once_for_all_its_questions(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_pass, "PASS_TOKENS", 1)  # a window
    words = tokenizer("byte_level")
    model: Any = tiny("llama", vocab_size=len(words))
    attach(model, FocusConfig(memory_layers=MEMORY_LAYERS, window=256))
    task = made(texts, styles=["database"], positions=2, samples=2, sets=1)
    evaluate(task, FocusedSubject(model, words, "tiny"), tmp_path / "run")
    lines = (tmp_path / "run" / "samples.jsonl").read_text("utf-8").splitlines()
    details = [json.loads(line)["details"] for line in lines]
    assert len(details) == 4
    assert all(d["tokens_read_with_others"] > d["prompt_tokens"] - 2 * 256 for d in details)


# -- FILM's pieces -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def films() -> Texts:
    return Texts(data_folder("valprobe"))


@pytest.mark.data
def test_on_films_pieces_injected_answers_score_1_and_others_almost_never(films: Texts, tmp_path: Path) -> None:
    task = made(films, lengths=[8192], positions=16, samples=2)
    rows = run(task, knowing(task, answer_of), tmp_path / "right")
    for style in STYLES:
        assert rows[style].estimates["score"].value == 1
        assert rows[style].samples == 32
    assert rows["code"].chance["score"] < 0.02
    assert rows["database"].chance["score"] < 0.2  # "scientific article" is the description of many
    assert 0.25 < rows["document"].chance["score"] < 0.5
    echo = run(task, Answerer(lambda text: text), tmp_path / "echo")
    assert echo["code"].estimates["score"].value <= 3 / 32
    assert echo["document"].estimates["score"].value < 0.5

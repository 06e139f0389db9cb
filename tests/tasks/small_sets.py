"""A folder with every set that tasks measure on, made up and small, in the form that docs/evaluate.md gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.tasks.fakes import write_sets

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_LABELS = ("NUM:date", "LOC:city", "HUM:ind", "ENTY:animal", "DESC:def")


def prose(words: int, seed: int | str) -> str:
    """Sentences and paragraphs of made-up words; every word is rare."""
    rng = random.Random(f"prose {seed}")
    made = []
    for _ in range(words):
        made.append("".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3))))
        made.append(rng.choices([" ", "\n", ". ", ".\n", ", ", "\n\n"], [50, 8, 6, 3, 3, 1])[0])
    return "".join(made)


def _documents(part: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{part} {number}",
            "title": f"{part} {number}",
            "text": prose(2500, f"{part} {number}"),
            "source": "here",
        }
        for number in range(4)
    ]


def _trec(part: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{part}-{number}",
            "text": f"What is the {part} {prose(2, number).split()[0]} number {number} ?",
            "coarse": _LABELS[number % 5].split(":")[0],
            "fine": _LABELS[number % 5],
        }
        for number in range(count)
    ]


def _questions(part: str, count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{part}{n}", "question": f"who made the {part} {prose(2, n).split()[0]} {n}?", "answers": [f"Mr. {n}"]}
        for n in range(count)
    ]


def _qasper() -> list[dict[str, Any]]:
    made = []
    for paper in ("alpha", "beta", "gamma"):
        text = f"{paper}\n\n{prose(120, paper)}"
        for number, (truth, kind) in enumerate((("yes", "boolean"), (" ".join(text.split()[20:24]), "extractive"))):
            made.append(
                {
                    "id": f"{paper}{number}",
                    "paper": paper,
                    "title": paper,
                    "full_text": text,
                    "question": f"What about {paper} and {number}?",
                    "answers": [truth, truth],
                    "answer_type": [kind, kind],
                }
            )
    return made


def _pieces(count: int) -> dict[str, list[dict[str, Any]]]:
    sentences, functions, entities = [], [], []
    for number in range(count):
        words = prose(14, number).replace(".", " ").replace(",", " ").split()
        words[4] = f"w{number}"
        sentences.append({"sentence": " ".join(words) + ".", "piece": " ".join(words[2:10])})
        middle = f"    total_{number} = step({words[0]})"
        define = f"    first = {words[1]}\n{middle}\n    log('{words[2]}')"
        functions.append({"function_name": f"{words[3]}_{number}", "function_define": define, "piece": middle.strip()})
        entities.append(
            {"id": f"Q{number + 1}", "label": f"{words[5]} {number}", "dcpt": f"hall {number} of {words[6]}"}
        )
    return {"document_sentences": sentences, "code_functions": functions, "database_entities": entities}


def small_sets(folder: Path) -> Path:
    """Write them; about 0.4 MB."""
    sets: dict[str, Any] = {f"{part}/test": _documents(part) for part in ("books", "code", "arxiv", "isabelle")}
    sets |= {"trec/train": _trec("train", 60), "trec/test": _trec("test", 40)}
    sets |= {"webqs/train": _questions("train", 60), "webqs/test": _questions("test", 40)}
    sets |= {"fewshot/nq_open/train": _questions("train", 60), "fewshot/nq_open/test": _questions("test", 40)}
    sets["qasper/test"] = _qasper()
    sets |= {f"valprobe/{name}": records for name, records in _pieces(200).items()}
    return write_sets(folder, sets)

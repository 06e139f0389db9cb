"""The same questions of three real texts, answered by the default model before and after its fine-tune, side by side.

    python benchmarks/ask_before_after.py --out docs/answers.md          # about 20 minutes on 2 cores

Every answer is greedy and printed as it came, with the first sources; nothing is left out or run again. The
questions were written before any answer was seen. Texts: a held-out novel and a held-out paper of ../shared/data,
and the source code of Python's own `http` package.
"""

from __future__ import annotations

import argparse
import gzip
import http
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import longfocus
from longfocus.commands.options import CLI_DEFAULTS

TEXTS: list[tuple[str, str, list[str]]] = [
    (
        "the house behind the cedars (novel)",
        "books/pg472",
        [
            "What is the name of Rena's brother?",
            "In which town does Molly Walden live?",
            "Who is Frank Fowler?",
            "What is the profession of John Warwick?",
        ],
    ),
    (
        "limbdark.tex (paper about light curves)",
        "arxiv/rodluger/Limbdark.jl/tex/limbdark.tex",
        [
            "Which programming languages is the code written in?",
            "What is the paper about?",
            "Who developed the earlier analytic solution for quadratic limb darkening?",
            "What does the photodynamical model need derivatives for?",
        ],
    ),
    (
        "http (Python package, source code)",
        "http",
        [
            "What is the default HTTP port?",
            "Which class saves cookies in the format of Mozilla browsers?",
            "Which exception is raised when the status line is bad?",
            "Which header does send_head use for the time of the last change?",
        ],
    ),
]


def sources_of(place: str, folder: Path) -> list[Any]:
    """The text as files to read."""
    if place == "http":
        return longfocus.find_sources([str(Path(http.__file__).parent)]).sources
    part, _, name = place.partition("/")
    with gzip.open(common.DATA / part / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        text = next(record["text"] for record in map(json.loads, lines) if record["id"] == name)
    file = folder / (Path(name).name.removesuffix(".tex") + ".txt")
    file.write_text(text, "utf-8")
    return longfocus.find_sources([str(file)]).sources


def answers_of(model_name: str, dtype: str | None, folder: Path) -> tuple[list[list[longfocus.Answer]], list[int]]:
    """Answers by text and question, and the tokens of each text."""
    tokenizer = longfocus.load_tokenizer(model_name)
    model = longfocus.load(model_name, dtype=dtype, **CLI_DEFAULTS)
    found, sizes = [], []
    for title, place, questions in TEXTS:
        memory = longfocus.Memory(model, tokenizer)
        reader = longfocus.Reader(model, tokenizer, memory)
        for source in sources_of(place, folder):
            reader.read(source)
        sizes.append(memory.tokens)
        common.note(f"{model_name}: {title}, {memory.tokens:,} tokens")
        sampling = longfocus.Sampling(max_new_tokens=60)
        found.append(
            [
                longfocus.Conversation(model, tokenizer, memory, sampling).ask(question, sources=2)
                for question in questions
            ]
        )
    return found, sizes


def cell(text: str, limit: int = 400) -> str:
    """Text inside a table's cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= limit else text[:limit] + " …"


def page(before: Any, after: Any, sizes: list[int], settings: dict[str, Any]) -> str:
    """The whole page."""
    lines = [
        "# Answers before and after the fine-tune",
        "",
        "Made by `python benchmarks/ask_before_after.py`: greedy answers of at most 60 tokens, unselected, with the two first "
        "sources by attention mass. The model has 135 million weights: read the sources.",
        "",
        f"Settings: `{json.dumps(settings)}`",
    ]
    for (title, _, questions), old, new, size in zip(TEXTS, before, after, sizes, strict=True):
        lines += ["", f"## {title}, {size:,} tokens"]
        for question, one, two in zip(questions, old, new, strict=True):
            lines += ["", f"**{question}**", "", "| | before (`default-base`) | after (`default`) |", "|---|---|---|"]
            lines.append(f"| answer | {cell(one.text)} | {cell(two.text)} |")
            for rank in range(2):
                cells = []
                for answer in (one, two):
                    found = answer.sources[rank : rank + 1]
                    cells.append(f"{found[0].place}: {cell(found[0].text, 250)}" if found else "")
                lines.append(f"| source {rank + 1} | {cells[0]} | {cells[1]} |")
            lines.append(f"| mass on memory | {one.memory_mass:.2f} | {two.memory_mass:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="default-base")
    parser.add_argument("--after", default="default")
    parser.add_argument("--dtype", choices=common.DTYPES, help="of the weights; as stored unless given")
    parser.add_argument("--out", type=Path, default=Path("out/answers.md"))
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        before, sizes = answers_of(arguments.before, arguments.dtype, Path(folder))
        after, _ = answers_of(arguments.after, arguments.dtype, Path(folder))
    settings = {"dtype": arguments.dtype or "float32", **CLI_DEFAULTS, "longfocus": longfocus.__version__}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page(before, after, sizes, settings), "utf-8")
    print(json.dumps({"out": str(arguments.out), "tokens": sizes}))


if __name__ == "__main__":
    main()

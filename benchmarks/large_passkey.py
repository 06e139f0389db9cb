"""A pass key in a large memory: is it still found among so many other tokens, and does it matter how they are searched?

    python benchmarks/large_passkey.py --sizes 8k,64k,256k,1M --read 256k --tile --on-disk out/m1 --out out/large_passkey

The memory holds `--sizes` tokens of other texts (`large_memory.py`: real text that the model has read, and repeated with noise beyond
`--read`) and one document with a pass key: a prompt of `longfocus eval passkey`, as long as `--document` says, in held-out books. All of the
prompt but its last `--local` tokens, the question among them, is read by itself, as documents of a memory are, and remembered. The
same prompts are asked of every size, each with every retrieval; indexes cover the key's document.

right: share of the keys that are in the answer, with a 95% interval; against dense: prompts that only dense retrieval got right, and that
only this one did.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import common
import large_memory
from large_memory import Prefix
from longfocus import Memory, read_ids
from longfocus.model.cache import FocusCache
from longfocus.settings import size_name, size_of, sizes_of
from longfocus.subjects.local import FocusedSubject
from longfocus.tasks.contract import Example, Point
from longfocus.tasks.passkey import Passkey
from longfocus.tasks.statistics import share_of
from longfocus.tasks.texts import Texts


def prompts(
    subject: FocusedSubject, task: Passkey, tokens: int, samples: int, local: int
) -> list[tuple[Example, list[int], int]]:
    """(what is asked, its token ids, how many of them are remembered)."""
    point = Point({"tokens": tokens, "haystack": "books"}, samples, tokens + task.max_new_tokens)
    made = []
    for example in task.examples(subject, point):
        ids = subject.encode(example.prompt.text)
        made.append((example, ids, len(ids) - local))
    return made


def ask(subject: FocusedSubject, memory: Any, ids: list[int], task: Passkey) -> str:
    """The answer to a prompt's last tokens."""
    cache = FocusCache(subject.model.focus, memory)
    return subject._generate(ids, task.max_new_tokens, task.stop, cache=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    large_memory.add_memory_options(parser, "8k,64k,256k,1M")
    parser.add_argument("--document", default="2k", metavar="TOKENS", help="of the prompt with the key")
    parser.add_argument("--local", type=int, default=32, help="last tokens of the prompt that are not in memory")
    parser.add_argument("--samples", type=int, default=50, help="prompts")
    parser.add_argument("--retrievals", default="dense,exact,approximate")
    parser.add_argument("--out", type=Path, default=Path("out/large_passkey"))
    parser.set_defaults(read_span="8k", k=32)
    arguments = parser.parse_args()
    common.quiet(arguments)
    sizes = sizes_of(arguments.sizes)
    read = large_memory.tokens_read(parser, arguments, sizes)
    model, tokenizer = common.load_focused(arguments)
    subject = FocusedSubject(model, tokenizer, arguments.model)
    task = Passkey(Passkey.Options(samples=arguments.samples), Texts(arguments.data))
    ids = large_memory.real_ids(tokenizer, read, arguments.data, arguments.text.split(","))
    memory: Memory = large_memory.build(model, ids, max(sizes), arguments.on_disk, arguments.noise)
    asked = prompts(subject, task, size_of(arguments.document), arguments.samples, arguments.local)
    places = []
    for _, prompt, remembered in asked:
        document = read_ids(model, prompt[:remembered], memory)
        places.append((document.start, document.start + document.tokens))
    common.note(f"read {len(asked)} documents with keys")

    rows: list[dict[str, Any]] = []
    config = model.focus.config
    for size in sizes:
        whole = Prefix(memory, size, tuple(places))
        if "approximate" in arguments.retrievals:
            whole.index()
        for retrieval in arguments.retrievals.split(","):
            model.focus.config = dataclasses.replace(config, retrieval=retrieval)
            right = []
            for (example, prompt, remembered), place in zip(asked, places, strict=True):
                found = ask(subject, whole.with_ranges(place), prompt[remembered:], task)
                right.append(bool(example.expected["key"] in found))
            rows.append({"tokens": size, "retrieval": retrieval, "right": right})
            common.note(f"{size_name(size)}, {retrieval}: {sum(right)} of {len(right)}")
    model.focus.config = config

    table = []
    for row in rows:
        estimate = share_of(sum(row["right"]), len(row["right"]))
        dense = next(
            (r["right"] for r in rows if r["tokens"] == row["tokens"] and r["retrieval"] == "dense"), row["right"]
        )
        lost = sum(a and not b for a, b in zip(dense, row["right"], strict=True))
        won = sum(b and not a for a, b in zip(dense, row["right"], strict=True))
        table.append(
            [
                size_name(row["tokens"]) + (" (repeated)" if row["tokens"] > read else ""),
                row["retrieval"],
                f"{sum(row['right'])} of {len(row['right'])}",
                f"{estimate.low:.0%} to {estimate.high:.0%}",
                f"−{lost} +{won}",
            ]
        )
    header = ["other tokens in memory", "retrieval", "right", "95% interval", "against dense"]
    common.save_table(arguments, model, common.markdown(header, table), rows)


if __name__ == "__main__":
    main()

"""Does a model find a number in a long text: with its own full attention, and with a memory?

    python benchmarks/passkey.py                                        # the default model, about 5 minutes on 2 cores
    python benchmarks/passkey.py --lengths 400,1000 --prompts 20
    python benchmarks/passkey.py --model out/run --lengths 8k,32k,64k --rows memory --read-span 8k
    python benchmarks/passkey.py --model out/run --lengths 8k,16k --haystack books --depths 0.1,0.5,0.9

Pass-key retrieval as in the paper (section 4.2, after Mohtashami and Jaggi 2023): a random five-digit number at
a random place in a text, asked for at the end; right when the number is in the answer, which is generated until
it holds five digits in a row. Lengths are in tokens (k = 1,024), places from 0, the beginning, to 1.

Haystacks: `filler` is the paper's sentences over and over; `books` and `code` are held-out text of ../shared/data
from a random place on, with the key on lines of its own.

Rows: `full attention` is the plain model with all of the prompt in its window, as far as its positions go; `memory`
is the same model attached, with its local window, everything before that in memory. A column counts only the
prompts whose number lies in memory, not in the window.

Prompts of one length that begin alike (filler, up to the earliest key) are read once so far: the cache is copied
where they part. Windows are the same and are read in the same order, so the numbers are the same to the last bit;
`--check` reads the one that was helped most again from its beginning and compares. Into `--out` go results.json
(all settings), samples.jsonl (each prompt's seed, place, key and answer), table.md and plot.png; they are written
after each length, so what was measured before Ctrl-C is there.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common  # before torch, so that waiting threads do not spin

# isort: split
import torch
import transformers

from longfocus.model.cache import FocusCache
from longfocus.model.focused import read_window
from longfocus.model.windows import plan_steps

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
ROWS = {"full": "full attention", "memory": "memory"}
LONGEST_ANSWER = 10


@dataclass(frozen=True)
class Prompt:
    """One question; all of it follows from seed, length, haystack and place."""

    seed: str
    text: str
    key: str
    depth: float
    """Where the key stands, as a share of the text around it."""


# -- prompts -----------------------------------------------------------------------------------------------


def fact_of(rng: random.Random) -> tuple[str, str]:
    """(the sentence to find, the number in it)."""
    key = str(rng.randint(10000, 99999))
    return f"The pass key is {key}. Remember it. {key} is the pass key.", key


def filler_prompt(tokenizer: Any, length: int, seed: str, place: float | None) -> Prompt:
    """About `length` tokens, never more unless there is no room for one filler."""
    rng = random.Random(seed)
    fact, key = fact_of(rng)
    fixed = len(tokenizer(f"{OPENING}{fact}\n{QUESTION}")["input_ids"])
    fillers = max(1, (length - fixed) // len(tokenizer(f" {FILLER}")["input_ids"]))
    before = rng.randint(0, fillers)
    if place is not None:
        before = round(place * fillers)
    lines = [FILLER] * before + [fact] + [FILLER] * (fillers - before)
    return Prompt(seed, OPENING + " ".join(lines) + "\n" + QUESTION, key, before / fillers)


class Stretch:
    """Held-out text, document after document, as characters and the tokens that they make."""

    def __init__(self, tokenizer: Any, part: str) -> None:
        self.tokenizer = tokenizer
        self.text = "\n\n".join(text for _, text in common.held_out(part))

    def cut(self, start: int, tokens: int) -> str:
        """About `tokens` tokens from a character on, going on at the beginning after the end; whole lines."""
        text, wanted = "", 4 * tokens
        while True:
            text = (self.text[start:] + self.text * (1 + wanted // len(self.text)))[:wanted]
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            if len(offsets) >= tokens:
                break
            wanted *= 2
        text = text[: offsets[tokens - 1][1]]
        return text[: text.rfind("\n") + 1] or text


def text_prompt(tokenizer: Any, stretch: Stretch, length: int, seed: str, place: float | None) -> Prompt:
    """About `length` tokens of real text, the fact between two of its lines."""
    rng = random.Random(seed)
    fact, key = fact_of(rng)
    fixed = len(tokenizer(f"{OPENING}\n{fact}\n\n{QUESTION}")["input_ids"])
    start = stretch.text.rfind("\n", 0, rng.randrange(len(stretch.text))) + 1
    lines = stretch.cut(start, max(1, length - fixed)).splitlines(keepends=True)
    at = rng.random() if place is None else place
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(line))
    before = min(range(len(ends)), key=lambda index: abs(ends[index] - at * ends[-1]))
    text = f"{OPENING}{''.join(lines[:before])}{fact}\n{''.join(lines[before:])}\n{QUESTION}"
    return Prompt(seed, text, key, ends[before] / ends[-1])


def prompts_of(tokenizer: Any, length: int, arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts of one length; with `--depths`, that many at each place in turn."""
    places = [float(part) for part in arguments.depths.split(",")] if arguments.depths else [None]
    stretch = None if arguments.haystack == "filler" else stretch_of(tokenizer, arguments.haystack)
    made = []
    for number in range(arguments.prompts):
        for place in places:
            seed = f"{arguments.seed} {length} {number}" + ("" if place is None else f" {place}")
            if stretch is None:
                made.append(filler_prompt(tokenizer, length, seed, place))
            else:
                made.append(text_prompt(tokenizer, stretch, length, seed, place))
    return made


_stretches: dict[str, Stretch] = {}


def stretch_of(tokenizer: Any, part: str) -> Stretch:
    """Joined once."""
    if part not in _stretches:
        _stretches[part] = Stretch(tokenizer, part)
    return _stretches[part]


# -- answers -----------------------------------------------------------------------------------------------


class FiveDigits(transformers.StoppingCriteria):
    """Stop when the answer holds five digits in a row."""

    def __init__(self, tokenizer: Any, prompt_tokens: int) -> None:
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = [self.tokenizer.decode(row[self.prompt_tokens :]) for row in input_ids]
        done = [re.search(r"\d{5}", text) is not None for text in texts]
        return torch.tensor(done, device=input_ids.device)


def generated(model: Any, tokenizer: Any, ids: torch.Tensor, cache: FocusCache | None = None) -> str:
    """The answer, greedily."""
    ids = ids.to(model.device)
    more = {} if cache is None else {"cache": cache}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        num_beams=1,
        pad_token_id=tokenizer.pad_token_id or 0,
        stopping_criteria=[FiveDigits(tokenizer, ids.shape[1])],
        **more,
    )
    return tokenizer.decode(out[0, ids.shape[1] :])


class SharedReading:
    """Caches that have read what prompts have in common, window by window as each would have been read alone."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.focus.config
        self.ids: list[int] = []
        """What `cache` has read: whole windows."""
        self.cache = FocusCache(model.focus)

    def windows_alike(self, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """Where windows end that both prompts begin with and that leave the rest to be cut as before."""
        alike = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        ends = set(self.ends(other, alike))
        return [end for end in self.ends(one, alike) if end in ends]

    def ends(self, ids: Sequence[int], alike: int) -> list[int]:
        """Ends of stored windows up to `alike` after which the steps for the rest are those of the whole prompt."""
        steps = plan_steps(len(ids), 0, self.config)
        found, end, local = [], 0, 0
        for number, step in enumerate(steps):
            end, local = end + step.tokens, local - step.drop + step.tokens
            if end > alike or not step.store or end == len(ids):
                break
            full = step.tokens == self.config.window_tokens - (self.config.overlap if number else 0)
            if full and plan_steps(len(ids) - end, local, self.config) == steps[number + 1 :]:
                found.append(end)
        return found

    def read_up_to(self, ids: Sequence[int], end: int) -> None:
        """Read on, until the windows before `end` are read."""
        while len(self.ids) < end:
            room = self.config.window_tokens - (self.config.overlap if self.ids else 0)
            part = list(ids[len(self.ids) : len(self.ids) + room])
            read_window(self.model, torch.tensor([part]), self.cache)
            self.ids += part

    def caches(self, prompts: Sequence[Sequence[int]]) -> Iterator[FocusCache]:
        """For each prompt in turn, a cache that has read its beginning, as far as that is shared."""
        for number, ids in enumerate(prompts):
            if self.ids != list(ids[: len(self.ids)]) or (
                self.ids and len(self.ids) not in self.ends(ids, len(self.ids))
            ):
                self.ids, self.cache = [], FocusCache(self.model.focus)
            following = prompts[number + 1] if number + 1 < len(prompts) else None
            ends = self.windows_alike(ids, following) if following is not None else []
            if ends and ends[-1] > len(self.ids):
                self.read_up_to(ids, ends[-1])
            if following is None:
                yield self.cache
                self.ids, self.cache = [], FocusCache(self.model.focus)
            else:
                yield copy.deepcopy(self.cache)


def same_logits(model: Any, ids: torch.Tensor, shared: FocusCache) -> bool:
    """Whether going on from a shared beginning gives the very logits of reading the prompt from its beginning."""
    with torch.no_grad():
        alone = model(ids.to(model.device), logits_to_keep=1).logits
        after = model(ids[:, shared.seen :].to(model.device), cache=copy.deepcopy(shared), logits_to_keep=1).logits
    return torch.equal(alone, after)


# -- a length ----------------------------------------------------------------------------------------------


class Bench:
    """The models, and where samples go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows = [ROWS[name] for name in ROWS if name in arguments.rows.split(",")]
        self.focused, self.tokenizer = common.load_focused(arguments)
        self.plain = common.load_plain(arguments.model, arguments) if ROWS["full"] in self.rows else None
        self.longest_plain = common.longest_plain(self.plain) if self.plain is not None else 0
        self.samples = (arguments.out / "samples.jsonl").open("w", encoding="utf-8")

    def length(self, length: int) -> dict[str, Any]:
        """Ask all prompts of a length; a record of counts."""
        prompts = sorted(prompts_of(self.tokenizer, length, self.arguments), key=lambda prompt: prompt.depth)
        encoded = [self.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
        local = [plan_steps(len(ids), 0, self.focused.focus.config)[-1].tokens for ids in encoded]
        far = [
            prompt.key not in self.tokenizer.decode(ids[-kept:])
            for prompt, ids, kept in zip(prompts, encoded, local, strict=True)
        ]
        result: dict[str, Any] = {
            "tokens": length,
            "longest_prompt_tokens": max(map(len, encoded)),
            "prompts": len(prompts),
            "prompts_beyond": sum(far),
            "rows": {},
        }
        for row in self.rows:
            if row == ROWS["full"] and result["longest_prompt_tokens"] + LONGEST_ANSWER > self.longest_plain:
                continue
            counts: dict[str, Any] = {"right": 0, "right_beyond": 0, "thirds": [[0, 0], [0, 0], [0, 0]], "seconds": 0.0}
            begun = time.perf_counter()
            for number, (said, shared) in enumerate(self.answers(row, encoded)):
                seconds, begun = time.perf_counter() - begun, time.perf_counter()
                prompt = prompts[number]
                right = prompt.key in said
                third = min(2, int(3 * prompt.depth))
                counts["right"] += right
                counts["right_beyond"] += right and far[number]
                counts["thirds"][third][0] += right
                counts["thirds"][third][1] += 1
                counts["seconds"] += seconds
                sample = {
                    "row": row,
                    "tokens": length,
                    "prompt_tokens": len(encoded[number]),
                    "prompt_seed": prompt.seed,
                    "depth": round(prompt.depth, 4),
                    "beyond_window": far[number],
                    "key": prompt.key,
                    "answer": said,
                    "right": right,
                    "tokens_read_with_others": shared,
                    "seconds": round(seconds, 2),
                }
                self.samples.write(json.dumps(sample, ensure_ascii=False) + "\n")
                self.samples.flush()
                done = f"{counts['right']} of {number + 1} right (of {len(prompts)}), {seconds:.1f} s"
                common.note(f"{common.size_name(length)}, {row}: {done}")
            counts["interval"] = common.wilson(counts["right"], len(prompts))
            result["rows"][row] = counts
        if self.arguments.check and ROWS["memory"] in self.rows:
            self.check(length, encoded)
        return result

    def answers(self, row: str, encoded: list[list[int]]) -> Iterator[tuple[str, int]]:
        """(answer, tokens of the prompt that were read together with other prompts) of each prompt."""
        if row == ROWS["full"]:
            for ids in encoded:
                yield generated(self.plain, self.tokenizer, torch.tensor([ids])), 0
            return
        for ids, cache in zip(encoded, SharedReading(self.focused).caches(encoded), strict=True):
            shared = cache.seen
            yield generated(self.focused, self.tokenizer, torch.tensor([ids]), cache), shared

    def check(self, length: int, encoded: list[list[int]]) -> None:
        """Compare with a reading from the beginning, where most was shared."""
        best, most = None, 0
        for ids, cache in zip(encoded, SharedReading(self.focused).caches(encoded), strict=True):
            if cache.seen > most:
                best, most = (ids, cache), cache.seen
        if best is None:
            common.note(f"check at {common.size_name(length)}: no two prompts begin with the same window.")
        elif same_logits(self.focused, torch.tensor([best[0]]), best[1]):
            common.note(f"check at {common.size_name(length)}: {most:,} tokens read with others, the same logits.")
        else:
            raise SystemExit(f"check at {length}: other logits when {most} tokens were read with others")


# -- results -----------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """The counts of both rows; then, of the memory, its interval and thirds."""
    header = [
        "prompt tokens",
        "full attention",
        "memory",
        "memory, number beyond the window",
        "memory, 95% interval",
        "first third",
        "middle",
        "last third",
    ]
    lines = []
    for result in results:
        full, memory = (result["rows"].get(row) for row in ROWS.values())
        cells = [f"{result['tokens']:,}"]
        cells.append(f"{full['right']} of {result['prompts']}" if full else "")
        if memory:
            low, high = memory["interval"]
            cells += [
                f"{memory['right']} of {result['prompts']}",
                f"{memory['right_beyond']} of {result['prompts_beyond']}",
                f"{100 * low:.0f}–{100 * high:.0f}%",
                *(f"{right} of {total}" for right, total in memory["thirds"]),
            ]
        else:
            cells += [""] * 6
        lines.append(cells)
    text = common.markdown(header, lines)
    return text.replace("|---|", "|---:|", 1)


def plot(results: list[dict[str, Any]], path: Path, title: str) -> None:
    made, (axis,), plt = common.figure(1)
    for shift, (row, colour) in enumerate(zip(ROWS.values(), ("tab:orange", "tab:blue"), strict=True)):
        points = [
            (result["tokens"], result["rows"][row], result["prompts"]) for result in results if row in result["rows"]
        ]
        if not points:
            continue
        x = [tokens * (1.02 if shift else 0.98) for tokens, _, _ in points]
        y = [100 * counts["right"] / total for _, counts, total in points]
        low = [max(0.0, at - 100 * counts["interval"][0]) for at, (_, counts, _) in zip(y, points, strict=True)]
        high = [max(0.0, 100 * counts["interval"][1] - at) for at, (_, counts, _) in zip(y, points, strict=True)]
        axis.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=row, color=colour)
    ticks = [result["tokens"] for result in results]
    axis.set(xscale="log", xlim=(min(ticks) / 1.4, max(ticks) * 1.4), ylim=(-3, 103), title=title)
    axis.set(xlabel="prompt tokens", ylabel="right, % (95% interval)")
    axis.set_xticks(ticks, [common.size_name(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="best")
    made.savefig(path, dpi=120)
    plt.close(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model_options(parser)
    parser.add_argument("--lengths", default="400,1000,2000,4000", help="prompt lengths in tokens (k = 1,024)")
    parser.add_argument("--prompts", type=int, default=10, help="prompts per length (and per place, with --depths)")
    parser.add_argument("--haystack", choices=("filler", "books", "code"), default="filler")
    parser.add_argument("--depths", metavar="X,X,…", help="places of the key, 0 to 1; random unless given")
    parser.add_argument("--rows", default="full,memory", help="full, memory, or both")
    parser.add_argument("--check", action="store_true", help="compare shared readings with reading from the beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/passkey"), help="folder for the results")
    arguments = parser.parse_args()
    unknown = set(arguments.rows.split(",")) - set(ROWS)
    if unknown or arguments.prompts < 1:
        parser.error(f"--rows: {arguments.rows} given, expected full, memory or full,memory; --prompts at least 1.")
    if arguments.depths and not all(0 <= float(part) <= 1 for part in arguments.depths.split(",")):
        parser.error(f"--depths: {arguments.depths} given, expected places from 0 to 1.")
    common.quiet(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments)
    about = common.about(arguments, bench.focused)
    results: list[dict[str, Any]] = []
    stopped = False
    try:
        for length in common.sizes_of(arguments.lengths):
            results.append(bench.length(length))
            common.write_json(arguments.out / "results.json", {"about": about, "results": results})
            (arguments.out / "table.md").write_text(table(results) + "\n", "utf-8")
            title = f"Pass key in {arguments.haystack}, {about['model_name']}"
            plot(results, arguments.out / "plot.png", title)
    except KeyboardInterrupt:
        stopped = True
        common.note("Stopped; the lengths that were finished, and all samples, are written.")
    print(table(results))
    print(json.dumps({"out": str(arguments.out), "stopped": stopped, "results": results, **about}))
    if stopped:
        raise SystemExit(130)


if __name__ == "__main__":
    main()

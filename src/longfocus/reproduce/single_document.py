"""What d and w in training do for one long document in memory (section 5.4, figure 9; appendix K, table 11).

d documents were seen in training, and w earlier windows of each. Two ways: fine-tuned from a plain model and read on books
(figure 9), and trained from scratch and read on papers (table 11).
"""

from __future__ import annotations

from pathlib import Path

from longfocus.reproduce import arxiv_models as arxiv
from longfocus.reproduce import continued_models as continued
from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Better, Claim
from longfocus.reproduce.experiment import Line, Published, Scale, Told, of_perplexity

TUNED, SCRATCH = "tuned", "scratch"
GROUPS = {TUNED: "books, fine-tuned from a plain model (figure 9)", SCRATCH: "papers, trained from scratch (table 11)"}
_BOTH = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""d and w."""


def _line(way: str, d: int, w: int) -> str:
    return f"{way}-d{d}-w{w}"


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    on_books = {**continued.options(name), "texts": [lm.books(name)]}
    on_papers = arxiv.options(name)
    lines = []
    for way, options in ((TUNED, on_books), (SCRATCH, on_papers)):
        for d, w in _BOTH:
            if way == TUNED:
                model = continued.crossbatch(f"base-d{d}-w{w}", name, texts, w, {"mix": {"d": d, "w": w}})
            else:
                model = arxiv.crossbatch(name, texts, d, w)
            lines.append(Line(_line(way, d, w), f"d = {d}, w = {w}", model, options=options, group=GROUPS[way]))
    departures = [
        *continued.DEPARTURES.get(name, ()),
        continued.SILENT,
        *arxiv.DEPARTURES.get(name, ()),
        lm.CHOSEN,
        lm.TWO_WINDOWS,
    ]
    return Scale(
        lines=lines,
        seeds=lm.SEEDS[name],
        options={},
        about=f"fine-tuned: {continued.ABOUT[name]}; from scratch: {arxiv.ABOUT[name]}",
        departures=list(dict.fromkeys(departures)),
    )


def _claims() -> list[Claim]:
    found: list[Claim] = []
    for way, where in ((TUNED, "books (figure 9)"), (SCRATCH, "papers (table 11)")):
        pairs = [((2, 1), (1, 1)), ((2, 2), (1, 2)), ((1, 2), (1, 1)), ((2, 2), (2, 1)), ((1, 2), (2, 1))]
        for (d, w), (than_d, than_w) in pairs:
            text = f"{where}: d = {d}, w = {w} is better than d = {than_d}, w = {than_w}"
            found.append(Better(text, _line(way, d, w), _line(way, than_d, than_w), True, 1))
    return found


_64K, _128K = 64_512.0, 129_024.0

EXPERIMENT = of_perplexity(
    name="single-document",
    title="One long document",
    paper="section 5.4 and appendix K, figure 9 and table 11",
    scale=scale,
    axis_title="tokens before the window",
    published=Published(
        where="figure 9, table 11",
        lines={
            _line(TUNED, 1, 1): {_64K: Told(23.8, "about")},
            _line(TUNED, 2, 1): {_64K: Told(23.2, "about")},
            _line(TUNED, 2, 2): {_64K: Told(22.4, "about")},
            _line(SCRATCH, 1, 1): {_128K: Told(2.187)},
            _line(SCRATCH, 2, 1): {_128K: Told(2.171)},
            _line(SCRATCH, 1, 2): {_128K: Told(2.152)},
            _line(SCRATCH, 2, 2): {_128K: Told(2.148)},
        },
        note=f"figure 9 read off, with 64k of context, which stand at 64,512 before its window of 1,024. Table 11: {arxiv.COUNTED}",
    ),
    claims=_claims(),
    where={"setting": "single"},
)

"""A short-context model extended by fine-tuning (section 5.2, table 3): FoT, Memorizing Transformer and Transformer-XL from one base.

Four domains, contexts growing from two windows on. Transformer-XL is read as it was trained, each window with the one before in
all layers at its true distance, so that it has one number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longfocus.reproduce import continued_models as continued
from longfocus.reproduce import language_models as lm
from longfocus.reproduce.claims import Alike, Better, Claim, Falls
from longfocus.reproduce.experiment import Line, Published, Scale, Told, of_perplexity

FOT, MT, XL = "fot", "memorizing", "transformer-xl"
DOMAINS = {
    "books": "books (PG-19)",
    "code": "code (GitHub)",
    "arxiv": "papers (arXiv)",
    "isabelle": "proofs (Isabelle)",
}
_TITLES = {FOT: "FoT", MT: "Memorizing Transformer", XL: "Transformer-XL"}
_SHORT, _LONG = 1024.0, 64_512.0
"""Contexts that are 2k and 64k with the window of 1,024."""


def scale(name: str, texts: Path) -> Scale:
    """What is done at a scale; no texts are read."""
    window, layers = continued.WINDOW[name], int(lm.SHAPES[name]["layers"])
    drawn = {"drawn": [{"d": 2}, {"d": continued.PLACES[name]}]}
    models = {
        FOT: continued.crossbatch("base-d2-or-128", name, texts, 1, drawn),
        MT: continued.tuned("base-memorizing", name, texts, "memorizing", {"memory": lm.MEMORY[name], "k": lm.K[name]}),
        XL: continued.tuned("base-transformer-xl", name, texts, "transformer_xl", {}),
    }
    all_layers = list(range(layers))
    as_trained = {"memory_layers": all_layers, "window": window, "memory_positions": "absolute", "read_span": window}
    reading: dict[str, dict[str, Any]] = {FOT: {}, MT: {}, XL: as_trained}
    sets = {domain: lm.books(name) if domain == "books" else domain for domain in DOMAINS}
    lines = []
    for domain, group in DOMAINS.items():
        for kind, model in models.items():
            where: dict[str, str | int] = {"text": sets[domain], **({"context": window} if kind == XL else {})}
            lines.append(Line(f"{kind}-{domain}", _TITLES[kind], model, focus=reading[kind], where=where, group=group))
    return Scale(
        lines=lines,
        seeds=lm.SEEDS[name],
        options={**continued.options(name), "texts": list(sets.values())},
        about=continued.ABOUT[name],
        departures=(*continued.DEPARTURES.get(name, ()), continued.SILENT),
    )


_TABLE: dict[str, dict[str, tuple[float | None, float | None]]] = {
    FOT: {"books": (23.74, 22.65), "code": (6.72, 5.32), "arxiv": (8.17, 6.81), "isabelle": (5.63, 4.44)},
    MT: {"books": (24.03, 23.24), "code": (8.10, 7.26), "arxiv": (9.39, 8.60), "isabelle": (7.34, None)},
    XL: {"books": (23.57, None), "code": (6.85, None), "arxiv": (8.21, None), "isabelle": (5.76, None)},
}
"""Kind -> domain -> (with 2k, with 64k of context); None: not in our notes."""


def _claims() -> list[Claim]:
    found: list[Claim] = []
    for domain, group in DOMAINS.items():
        fot, mt, xl = (f"{kind}-{domain}" for kind in (FOT, MT, XL))
        found += [
            Falls(f"{group}: FoT gains by contexts beyond two windows (table 3)", fot, least=1),
            Better(f"{group}: FoT is better than the Memorizing Transformer throughout (table 3)", fot, mt, True, 1),
            Alike(
                f"{group}: FoT and Transformer-XL differ by at most 3% with one window before (table 3)",
                fot,
                xl,
                0.03,
                1,
            ),
        ]
    return found


EXPERIMENT = of_perplexity(
    name="extending",
    title="Extending the context of a trained model",
    paper="section 5.2, table 3",
    scale=scale,
    axis_title="tokens before the window",
    published=Published(
        where="table 3",
        lines={
            f"{kind}-{domain}": {
                x: Told(value) for x, value in zip((_SHORT, _LONG), values, strict=True) if value is not None
            }
            for kind, domains in _TABLE.items()
            for domain, values in domains.items()
        },
        note="the paper counts the window of 1,024 too: its 2k and 64k of context stand at 1,024 and 64,512 before the window.",
    ),
    claims=_claims(),
    where={"setting": "single"},
)

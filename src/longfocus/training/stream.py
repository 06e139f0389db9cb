"""From a recipe's data section to the batches of a run, and back to any step of it.

`open_mixture` tokenises what is to be tokenised (once, with a progress bar) and mixes it; `Batches` turns the
windows of each step into the tensors that a model's forward takes. The position in the data is part of every
checkpoint, so a resumed run goes on with the next window and reads nothing again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from longfocus.data.dictionary import DictionaryDocuments
from longfocus.data.mixture import Mixture
from longfocus.data.pieces import Pieces
from longfocus.data.retrieval_text import RetrievalText
from longfocus.data.streamed import StreamedSource
from longfocus.data.token_cache import Progress, TokenizedSource, tokenize_source
from longfocus.data.tokens import leading_ids
from longfocus.data.windows import StepWindows, WindowStream
from longfocus.errors import ConfigError
from longfocus.training.recipes import Data, DictionarySource, Recipe, RetrievalSource, TextSource

IGNORED = -100


def open_mixture(
    data: Data,
    tokenizer: Any,
    cache: Path,
    *,
    seed: int,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Mixture:
    """The mixture of a recipe.

    Args:
        cache: folder of tokenised sources, used unless the recipe names one.
        progress: told while a source is tokenised.

    Raises:
        InputError, ConfigError: a source cannot be read, or its settings do not fit.
    """
    folder = Path(data.cache) if data.cache else cache
    opened: dict[str, Any] = {}
    for source in data.sources:
        if isinstance(source, TextSource):
            spec = source.spec()
            opened[source.name] = (
                StreamedSource(spec, tokenizer) if source.stream else tokenize_source(spec, tokenizer, folder, progress)
            )
    for source in data.sources:
        if isinstance(source, RetrievalSource):
            hay = _hay([opened[name] for name in source.hay], tokenizer) if source.hay else None
            opened[source.name] = RetrievalText(
                tokenizer,
                hay,
                seed=seed,
                tokens=source.tokens,
                plain_hay=source.plain_hay,
                chat=source.chat,
                spacing=source.spacing,
                far=source.far,
                lone=source.lone,
                name=source.name,
            )
        elif isinstance(source, DictionarySource):
            opened[source.name] = DictionaryDocuments(source.form, seed=seed, name=source.name)
    for source in data.sources:
        if isinstance(source, TextSource) and source.pieces_of is not None:
            opened[source.name] = Pieces(opened[source.name], source.pieces_of)
    return Mixture(
        [opened[source.name] for source in data.sources],
        [source.share for source in data.sources],
        seed=seed,
        minimum_tokens=[getattr(source, "minimum_tokens", 0) for source in data.sources],
        join_below=data.join_below,
        separator_ids=tokenizer(data.separator, add_special_tokens=False)["input_ids"],
        leading_ids=leading_ids(tokenizer),  # as when a text is read into a memory
        rank=rank,
        world=world,
    )


def _hay(sources: list[TokenizedSource], tokenizer: Any) -> Callable[[random.Random, int], str]:
    """Pieces of real text, from all sources alike, at a random place of a random document."""

    def take(rng: random.Random, characters: int) -> str:
        source = rng.choice(sources)
        text = ""
        while len(text) < characters:
            document = source.document(rng.randrange(source.documents))
            wanted = characters // 2  # tokens: at least two characters each on average, in any real text
            start = rng.randrange(max(1, len(document) - wanted))
            text += tokenizer.decode(document[start : start + wanted]) + " "
        return text[:characters]

    return take


class Batches(IterableDataset):
    """The batches of a run, one after another without end; each is a dict of tensors.

    input_ids int (R, T), lengths int (R,), labels int (R, T): the target of each position itself, -100 for none;
    places, documents, windows int (R,): see `crossbatch.plan.Rows`; number int (): counted from 0.
    """

    def __init__(self, mixture: Mixture, recipe: Recipe, window: int) -> None:
        """
        Args:
            window: tokens of a window of the focused model.
        """
        if recipe.method == "long":
            assert recipe.long is not None
            self.stream = WindowStream(
                mixture, places=recipe.long.rows, window=recipe.long.tokens, windows_per_step=1, stride=1
            )
        elif recipe.method != "crossbatch":
            self.stream = WindowStream(
                mixture,
                places=recipe.carried_places,
                window=window,
                windows_per_step=1,
                stride=1,
                whole_documents=recipe.data.strict,
            )
        else:
            assert recipe.crossbatch is not None
            part = recipe.crossbatch
            self.stream = WindowStream(
                mixture,
                places=part.places,
                window=window,
                windows_per_step=part.windows_per_step,
                stride=part.stride_windows,
                whole_documents=recipe.data.strict,
            )
        self.given = 0
        self._states: deque[tuple[int, dict[str, Any]]] = deque(maxlen=2 * recipe.run.gradient_accumulation + 64)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._states.append((self.given, self.stream.state_dict()))
        while True:
            windows = self.stream.next_step()
            number = self.given
            self.given += 1
            self._states.append((self.given, self.stream.state_dict()))
            batch = as_tensors(windows, self.stream.windows_per_step)
            self._only_targets(windows, batch["labels"])
            yield {**batch, "number": torch.tensor(number)}

    def _only_targets(self, windows: StepWindows, labels: torch.Tensor) -> None:
        """Take no loss on what a source does not want predicted (see `data.orders.GeneratorSource.targets`)."""
        for number, source in enumerate(self.stream.mixture.sources):
            targets = getattr(source, "targets", None)
            rows = np.flatnonzero(windows.source == number)
            if targets is None or not len(rows):
                continue
            wanted = np.zeros((len(rows), labels.shape[1]), dtype=bool)
            wanted[:, :-1] = targets(windows.tokens[rows])[:, 1:]
            own = labels[rows]
            own[torch.from_numpy(~wanted)] = IGNORED
            labels[rows] = own

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after so many batches of the run (a loader may have drawn some more)."""
        for given, state in self._states:
            if given == batches:
                return {"batches": batches, "stream": state}
        raise AssertionError(f"position after {batches} batches is not kept")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ConfigError: it is of other data or of another shape of batches.
        """
        try:
            self.stream.load_state_dict(state["stream"])
            self.given = int(state["batches"])
        except KeyError as error:
            raise ConfigError(f"The saved data position lacks {error}; start a new run.") from error


def as_tensors(windows: StepWindows, rows_per_place: int) -> dict[str, torch.Tensor]:
    """Input and targets of one step; rows of a place lie beside each other."""
    rows, width = windows.tokens.shape
    labels = np.full((rows, width), IGNORED, dtype=np.int64)
    labels[:, :-1] = windows.tokens[:, 1:]
    at = np.arange(width)[None]
    labels[at >= windows.lengths[:, None] - 1] = IGNORED
    goes_on = windows.next_token >= 0
    labels[np.flatnonzero(goes_on), windows.lengths[goes_on] - 1] = windows.next_token[goes_on]
    labels[windows.context_only] = IGNORED
    places = np.arange(rows) // rows_per_place
    arrays = {
        "input_ids": windows.tokens,
        "labels": labels,
        "lengths": windows.lengths,
        "places": places,
        "documents": windows.documents,
        "windows": windows.window_index,
    }
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

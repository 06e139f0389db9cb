"""Keys and values of a document's earlier windows, kept from step to step as they were computed: without gradient, and by
weights that are a step older for each window between ("staleness").

    carried = Carried(places=8, tokens=2048)
    seen = carried.begin(documents)            # what each place may see in this step
    ...                                        # the pass; seen.layer(6) gives keys, values, mask
    carried.keep({6: (keys, values)}, lengths) # this step's windows join it

A place's windows are forgotten when it goes on to another document. What is kept is the last `tokens` of each place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longfocus.errors import TrainingError

Pair = tuple[Tensor, Tensor]
"""Keys and values, (P, Hkv, N, D) each, P places."""


@dataclass(frozen=True)
class Seen:
    """What the places hold when a step begins."""

    layers: Mapping[int, Pair]
    """The last columns are the newest."""
    held: np.ndarray
    """int (P,): how many of the last columns are the place's document."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """keys, values (P, Hkv, N, D) and bool (P, N) of what is held; None where no place holds anything."""
        if layer not in self.layers or not self.held.any():
            return None
        key, value = self.layers[layer]
        columns = np.arange(key.shape[2])[None]
        mask = torch.from_numpy(columns >= key.shape[2] - self.held[:, None]).to(key.device)
        return key, value, mask


class Carried:
    """See the module."""

    def __init__(self, places: int, tokens: int) -> None:
        self.places, self.tokens = places, tokens
        self._documents = np.full(places, -1, dtype=np.int64)
        self._held = np.zeros(places, dtype=np.int64)
        self._layers: dict[int, Pair] = {}

    def begin(self, documents: np.ndarray) -> Seen:
        """Forget what belongs to other documents than the places hold now.

        Args:
            documents: int (P,), numbers that are unique to a document.
        """
        assert documents.shape == (self.places,)
        self._held = np.where(self._documents == documents, self._held, 0)
        self._documents = documents.astype(np.int64)
        return Seen(dict(self._layers), self._held)

    def keep(self, layers: Mapping[int, Pair], lengths: np.ndarray) -> None:
        """Add a step's windows.

        Args:
            layers: keys and values (P, Hkv, T, D), padded on the right.
            lengths: int (P,), tokens that are no padding.
        """
        for layer, pair in layers.items():
            before = self._layers.get(layer)
            joined = [self._joined(None if before is None else before[at], pair[at].detach(), lengths) for at in (0, 1)]
            self._layers[layer] = joined[0], joined[1]
        self._held = np.minimum(self._held + lengths, self.tokens)

    def _joined(self, before: Tensor | None, new: Tensor, lengths: np.ndarray) -> Tensor:
        """The last columns of both, each place's newest token in the last one."""
        old = 0 if before is None else before.shape[2]
        both = new if before is None else torch.cat((before, new), 2)
        kept = min(self.tokens, both.shape[2])
        ends = torch.from_numpy(old + lengths).to(new.device)  # one past each place's last token
        index = (ends[:, None] - kept + torch.arange(kept, device=new.device)[None]).clamp(min=0)
        return both.gather(2, index[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, for safetensors."""
        state = {"documents": torch.from_numpy(self._documents), "held": torch.from_numpy(self._held)}
        for layer, (key, value) in self._layers.items():
            state |= {f"{layer}.key": key.contiguous().cpu(), f"{layer}.value": value.contiguous().cpu()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Go on from a state.

        Raises:
            TrainingError: it is of another number of places.
        """
        if state["documents"].shape != (self.places,):
            raise TrainingError(
                f"The checkpoint carries windows of {len(state['documents'])} places, and the recipe has {self.places}; go on "
                "with the same recipe, or start anew with --fresh."
            )
        self._documents, self._held = state["documents"].numpy().copy(), state["held"].numpy().copy()
        names = sorted({int(name.partition(".")[0]) for name in state if "." in name})
        self._layers = {n: (state[f"{n}.key"].to(device), state[f"{n}.value"].to(device)) for n in names}

"""FocusedModel: what a model can do once it is attached. Inputs of any length, windows, memory, generate.

`attach` mixes this class in front of the model's own class, so that the object stays what it was
(`isinstance`, `save_pretrained`, adapters) and its inner layers run unchanged; only `forward` and
`generate` see the windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from longfocus.attention.context import AdditionalContext
from longfocus.errors import UnsupportedCallError
from longfocus.model.attention_function import NAME
from longfocus.model.cache import FocusCache
from longfocus.model.focus import Focus
from longfocus.model.reading_pass import pass_tokens, read_side_by_side, windows_per_pass
from longfocus.model.training_pass import read_rows
from longfocus.model.windows import Step, plan_steps

if TYPE_CHECKING:
    from longfocus.memory.asked import AskedMemory


class FocusedModel:
    """Mixed into the class of an attached model."""

    focus: Focus
    config: Any

    def new_cache(self, memory: AskedMemory | None = None, *, last_window: int | None = None) -> FocusCache:
        """An empty cache, to be passed as `cache=`, that reads `memory` and continues from call to call.

        Raises:
            MemoryMismatchError: the memory was made by another model or with other options.
        """
        if memory is not None:
            memory.check(self)
        return FocusCache(self.focus, memory, last_window=last_window)

    # -- forward -----------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: FocusCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        memory: AskedMemory | None = None,
        context: AdditionalContext | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read any number of tokens, window by window.

        With `context=` it is a training pass instead (see `training_pass.read_rows`): each row is one window, memory
        layers see the context, and `lengths=` and `shift_labels=` say what is padding and what is to be predicted.

        Args:
            input_ids: int (B, T), T of any size; or `inputs_embeds` (B, T, hidden).
            attention_mask: (B, T) or (B, seen + T), 0 at padding, which may lie anywhere: masked tokens
                are not fed at all, so a prompt gives the same logits alone and in a padded batch.
            position_ids: not needed; positions are counted inside the window. Values that are not the
                consecutive ones of the mask are refused.
            cache: continue from it (see `new_cache`).
            labels: int (B, T), -100 where no loss is taken; the loss is that of the base model.
            use_cache: return a cache to continue from; default as in the model's config.
            logits_to_keep: as in transformers: 0 all, n the last n columns, or a tensor of columns.
            memory: read by every row.
            kwargs: as for the base model.

        Returns:
            CausalLMOutputWithPast; logits (B, kept, vocabulary), 0 in columns that hold padding.

        Raises:
            UnsupportedCallError: an argument that windows cannot honour.
            MemoryMismatchError: the memory was made by another model or with other options.
        """
        return_dict = kwargs.pop("return_dict", None)
        if context is not None:
            if memory is not None or cache is not None or input_ids is None:
                raise UnsupportedCallError("forward: context= takes input_ids, and no memory or cache.")
            self._check_call(None, kwargs)
            given = {name: value for name, value in kwargs.items() if value is not None}  # wrappers hand on every name
            return read_rows(self.focus, input_ids, given.pop("lengths", None), context, **given)
        loss_kwargs = {k: kwargs.pop(k) for k in ("num_items_in_batch",) if k in kwargs}
        old_cache = kwargs.pop("past_key_values", None)
        cache = self._check_call(cache if cache is not None else old_cache, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise UnsupportedCallError("forward: give input_ids or inputs_embeds, one of them.")
        source = cast(Tensor, input_ids if input_ids is not None else inputs_embeds)
        rows, columns = source.shape[:2]
        if columns == 0:
            raise UnsupportedCallError("forward: the input is empty; give at least one token.")
        if cache is None:
            cache = self.new_cache(memory)
        elif memory is not None and memory is not cache.memory:
            if cache.seen:
                raise UnsupportedCallError(
                    "forward: the cache already reads another memory; start a new cache for this one."
                )
            memory.check(self)
            cache.read_memory(memory)
        if cache.rows not in (0, rows):
            raise UnsupportedCallError(f"forward: {rows} rows given, but the cache holds {cache.rows}.")
        present = _present(attention_mask, rows, columns)
        _check_positions(position_ids, present)
        if use_cache is None:
            use_cache = bool(getattr(self.config, "use_cache", True))

        wanted_columns = _wanted_columns(logits_to_keep, rows, columns)
        kept = np.zeros(columns, dtype=bool)
        kept[wanted_columns] = True
        blocks = list(self._schedule(present, cache))
        use_cache = self._check_checkpointing(use_cache, one_window=len(blocks) == 1 and cache.seen == 0)
        alone = len(blocks) == 1 and not use_cache and cache.seen == 0
        hidden_wanted = any(kwargs.values()) or bool(getattr(self.config, "output_hidden_states", False))
        may_join = windows_per_pass(self.focus.config) > 1 and cache.side_by_side and not hidden_wanted
        name = "input_ids" if input_ids is not None else "inputs_embeds"
        logits: list[tuple[_Block, int, Tensor]] = []
        hidden: list[tuple[_Block, tuple[Tensor, ...]]] = []
        restore, seen = cache.snapshot(), cache.seen
        try:
            while blocks:
                count = self._side_by_side(blocks, kept, cache) if may_join else 1
                (block, *_), (*_, last) = blocks[:1], blocks[:count]
                del blocks[:count]
                if count > 1:
                    part = source[:, int(block.take[0, 0]) : int(last.take[0, -1]) + 1]
                    read_side_by_side(self.focus, {name: part}, cache)
                    continue
                first = block.first_needed(kept)
                wanted = block.width - first if first is not None else 1
                output = self._run(block, source, input_ids is not None, cache, alone, wanted, kwargs)
                if first is not None:
                    logits.append((block, first, output.logits))
                if output.hidden_states is not None:
                    hidden.append((block, output.hidden_states))
        except BaseException:
            restore()
            raise
        cache.seen = seen + columns
        result_logits = _arrange(_assemble(logits, kept, rows, columns), kept, wanted_columns)
        loss = None
        if labels is not None:
            vocabulary = self.config.get_text_config().vocab_size
            function: Any = cast(Any, self).loss_function
            loss = function(logits=result_logits, labels=labels, vocab_size=vocabulary, **loss_kwargs)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=result_logits,
            cache=cache if use_cache else None,
            hidden_states=_assemble_hidden(hidden, rows, columns),
        )
        return result.to_tuple() if return_dict is False else result

    def _side_by_side(self, blocks: list[_Block], kept: np.ndarray, cache: FocusCache) -> int:
        """How many of the next blocks can be read in one pass: whole windows of one text that are stored, with no logits
        wanted of them and nothing kept of the window before. At least 1."""
        config = self.focus.config
        size = config.window_tokens
        local = int(cache.local_tokens[0]) if cache.rows else 0
        count = 0
        for block in blocks[: pass_tokens(config, cache.own_tokens) // size]:
            whole = block.take.shape == (1, size) and block.is_plain and bool(block.store[0])
            if not whole or int(block.drop[0]) < local or block.first_needed(kept) is not None:
                break
            count, local = count + 1, size
        return max(1, count)

    def _check_call(self, cache: Any, kwargs: dict[str, Any]) -> FocusCache | None:
        if kwargs.get("output_attentions") or getattr(self.config, "output_attentions", False):
            raise UnsupportedCallError(
                "output_attentions: attention weights over a memory are not kept; "
                "see longfocus.analysis for the mass that each part of the memory received."
            )
        implementation = self.config._attn_implementation
        if implementation != NAME:
            raise UnsupportedCallError(
                f"The attention implementation was changed to {implementation!r} after attaching; "
                f"set it back with model.set_attn_implementation({NAME!r}), or detach."
            )
        if cache is not None and not isinstance(cache, FocusCache):
            raise UnsupportedCallError(
                f"cache: a {type(cache).__name__} given, expected a FocusCache; make one with model.new_cache()."
            )
        return cache

    def _check_checkpointing(self, use_cache: bool, *, one_window: bool) -> bool:
        """Layers that are checkpointed get no cache, so a training pass with checkpoints is one window by itself."""
        model: Any = self
        if not (model.training and model.is_activation_checkpointing):
            return use_cache
        if not one_window:
            raise UnsupportedCallError(
                "forward: gradient checkpointing is on, and then one call may hold one window "
                f"({self.focus.config.window_tokens} tokens) and no earlier cache; feed windows one by one, or call model.eval()."
            )
        return False

    def _schedule(self, present: np.ndarray, cache: FocusCache) -> Iterator[_Block]:
        """Blocks of new tokens, each row's windows its own; rows with fewer windows wait, so that all end together."""
        rows = present.shape[0]
        local = cache.local_tokens if cache.rows else np.zeros(rows, dtype=np.int64)
        plans: list[list[Step]] = []
        for row in range(rows):
            new = int(present[row].sum())
            plans.append(plan_steps(new, int(local[row]), self.focus.config, cache.last_window) if new else [])
        columns = [np.flatnonzero(present[row]) for row in range(rows)]
        taken = [0] * rows
        steps = max(map(len, plans))
        for number in range(steps):
            now = [plan[number - steps + len(plan)] if number >= steps - len(plan) else None for plan in plans]
            width = max(step.tokens for step in now if step is not None)
            take = np.full((rows, width), -1, dtype=np.int64)
            for row, step in enumerate(now):
                if step is not None:
                    take[row, width - step.tokens :] = columns[row][taken[row] : taken[row] + step.tokens]
                    taken[row] += step.tokens
            yield _Block(
                take,
                drop=np.array([step.drop if step else 0 for step in now], dtype=np.int64),
                store=np.array([bool(step and step.store) for step in now]),
            )

    def _run(
        self,
        block: _Block,
        source: Tensor,
        is_ids: bool,
        cache: FocusCache,
        alone: bool,
        logits_wanted: int,
        kwargs: dict[str, Any],
    ) -> Any:
        window_pass = cache.open_pass(block.tokens, block.drop, reading=bool(block.store.any()))
        inner: Any = super().forward  # type: ignore[misc]
        output = inner(
            **{"input_ids" if is_ids else "inputs_embeds": block.gather(source)},
            # a finished (4-D) mask makes the models skip their own; ours travel in `focus`
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=source.device),
            position_ids=window_pass.query_positions,
            cache=None if alone else cache,
            use_cache=not alone,
            logits_to_keep=logits_wanted,
            focus=window_pass,
            **kwargs,
        )
        if not alone:
            cache.close_pass(block.store)
        return output

    def read_window(self, ids: Tensor, cache: FocusCache) -> None:
        """Feed one window (1, n) and store it whole: reading into a memory, where no logits are wanted.

        What ordinary layers keep of the window before is the config's `overlap`. See `reading_pass.read_windows`.
        """
        local = int(cache.local_tokens[0]) if cache.rows else 0
        drop = max(0, local - self.focus.config.overlap)
        block = _Block(np.arange(ids.shape[1])[None], drop=np.array([drop]), store=np.array([True]))
        restore = cache.snapshot()
        try:
            with torch.no_grad():
                self._run(block, ids.to(self.focus.device), True, cache, alone=False, logits_wanted=1, kwargs={})
        except BaseException:
            restore()
            raise
        cache.seen += ids.shape[1]

    # -- generate ----------------------------------------------------------------------------------------

    def generate(self, inputs: Tensor | None = None, *, memory: AskedMemory | None = None, **kwargs: Any) -> Any:
        """`transformers`' generate, with inputs of any length and an optional memory.

        Greedy search, sampling, beams, streamers, stopping criteria and batches padded on either side work
        as usual. `cache=` (a FocusCache) continues from an earlier call; pass the whole sequence then, as in
        transformers. `last_window=` (tokens) sets how much of the prompt stays local.

        Raises:
            UnsupportedCallError: assisted generation, `use_cache=False`, or another cache implementation.
            MemoryMismatchError: the memory was made by another model or with other options.
        """
        last_window = kwargs.pop("last_window", None)
        last_window = kwargs.pop("last_context_length", last_window)  # the name in the authors' code
        model: Any = self
        own = model.generation_config
        of_call = kwargs.get("generation_config")
        # what a checkpoint merely ships (a cache for long texts, the cache switched off for training) is overridden
        shipped = {"cache_implementation": None, "use_cache": True}

        def asked(name: str) -> Any:
            """The argument, else the call's generation config, else the model's."""
            given = [kwargs.get(name), getattr(of_call, name, None)]
            given += [] if name in shipped else [getattr(own, name, None)]
            return next((value for value in given if value is not None), None)

        for name, why in _NOT_GENERATED.items():
            if asked(name) is not None:
                raise UnsupportedCallError(f"generate: {name} cannot be used: {why}.")
        if asked("use_cache") is False:
            raise UnsupportedCallError("generate: use_cache=False given; the local window and memory are the cache.")
        old_cache = kwargs.pop("past_key_values", None)
        given_cache = kwargs.pop("cache", None)
        cache = self._check_call(given_cache if given_cache is not None else old_cache, {})
        if cache is None:
            cache = self.new_cache(memory, last_window=last_window)
        elif memory is not None and memory is not cache.memory:
            raise UnsupportedCallError("generate: give the memory when the cache is made: model.new_cache(memory).")
        elif last_window is not None:
            cache.last_window = last_window
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        mask = kwargs.get("attention_mask")
        if cache.seen and ids is not None and ids.shape[1] <= cache.seen and (mask is None or mask.shape == ids.shape):
            raise UnsupportedCallError(
                f"generate: the cache holds {cache.seen} tokens but only {ids.shape[1]} were given; "
                "pass the whole sequence, the tokens already seen and the new ones."
            )
        before = {name: getattr(own, name, None) for name in shipped}
        own.update(**shipped)  # transformers fills gaps of the call's config from the model's
        try:
            return self._generate(inputs, ids, mask, cache, kwargs)
        finally:
            own.update(**before)

    def _generate(
        self, inputs: Tensor | None, ids: Tensor | None, mask: Tensor | None, cache: FocusCache, kwargs: dict[str, Any]
    ) -> Any:
        """Hand over to transformers, with padding on the left."""
        inner: Any = super().generate  # type: ignore[misc]
        if ids is None and mask is not None and not bool((mask[:, -1] != 0).all()):
            raise UnsupportedCallError("generate: inputs_embeds with padding on the right; pad on the left.")
        order = _left_padding_order(ids, mask, cache)
        if order is None:
            return inner(inputs, cache=cache, **kwargs)
        assert ids is not None and mask is not None
        kwargs.pop("input_ids", None)
        kwargs["attention_mask"] = mask.gather(1, order)
        output = inner(ids.gather(1, order), cache=cache, **kwargs)
        sequences = output if isinstance(output, Tensor) else output.sequences
        sequences[:, : ids.shape[1]] = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], 0)
        return output


_NOT_GENERATED = {
    "assistant_model": "assisted generation takes tokens back, and a token that moved to memory stays there",
    "prompt_lookup_num_tokens": "assisted generation takes tokens back, and a token that moved to memory stays there",
    "assistant_early_exit": "assisted generation takes tokens back, and a token that moved to memory stays there",
    "prefill_chunk_size": "a long prompt is read in windows anyway, and chunks would cut it elsewhere",
    "cache_implementation": "a focused model needs its own cache (model.new_cache())",
}


class _Block:
    """New tokens of one pass: for each row, which input columns it takes, right-aligned; -1 is padding."""

    def __init__(self, take: np.ndarray, drop: np.ndarray, store: np.ndarray) -> None:
        self.take, self.drop, self.store = take, drop, store
        self.tokens = take >= 0
        self.width = take.shape[1]

    def first_needed(self, kept: np.ndarray) -> int | None:
        """First position of the block whose logits are wanted in some row; `kept` is bool (T,)."""
        needed = (self.tokens & kept[np.maximum(self.take, 0)]).any(0)
        return int(np.flatnonzero(needed)[0]) if needed.any() else None

    def gather(self, source: Tensor) -> Tensor:
        """The block's (B, width) ids or (B, width, hidden) embeddings; column 0 stands in for padding."""
        if self.is_plain:
            start = int(self.take[0, 0])
            return source[:, start : start + self.width]
        index = torch.from_numpy(np.maximum(self.take, 0)).to(source.device)
        if source.ndim == 3:
            index = index.unsqueeze(-1).expand(-1, -1, source.shape[2])
        return source.gather(1, index)

    @property
    def is_plain(self) -> bool:
        """Every row takes the same consecutive columns."""
        return bool(
            (self.take == np.arange(self.take[0, 0], self.take[0, 0] + self.width)).all() and self.take[0, 0] >= 0
        )


def _present(attention_mask: Tensor | None, rows: int, columns: int) -> np.ndarray:
    """bool (B, T): which of the new columns hold a token."""
    if attention_mask is None:
        return np.ones((rows, columns), dtype=bool)
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < columns:
        raise UnsupportedCallError(
            f"attention_mask: shape {tuple(attention_mask.shape)} given, expected ({rows}, {columns}) or ({rows}, seen + "
            f"{columns}) with 0 at padding."
        )
    return (attention_mask[:, attention_mask.shape[1] - columns :] != 0).cpu().numpy()


def _check_positions(position_ids: Tensor | None, present: np.ndarray) -> None:
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != present.shape[1]:
        return
    given = position_ids.expand(present.shape[0], -1).cpu().numpy()
    for row, held in zip(given, present, strict=True):
        if (np.diff(row[held]) != 1).any():
            raise UnsupportedCallError(
                "position_ids: positions that jump or repeat were given. A focused model counts positions inside its "
                "window; leave position_ids out, and pack several texts as rows of a batch instead."
            )


def _wanted_columns(logits_to_keep: int | Tensor, rows: int, columns: int) -> np.ndarray:
    """Columns whose logits are wanted, in the order of the result: int (K,), or (B, K) when given per row."""
    every = np.arange(columns)
    if isinstance(logits_to_keep, Tensor):
        index = logits_to_keep.cpu().numpy()
        if index.ndim not in (1, 2) or (index.ndim == 2 and (index.shape[0] != rows or index.dtype == bool)):
            raise UnsupportedCallError(
                f"logits_to_keep: shape {index.shape} given, expected columns (K,), a mask ({columns},) or ({rows}, K)."
            )
        try:
            return every[index]
        except IndexError as error:
            raise UnsupportedCallError(f"logits_to_keep: {error}.") from error
    return every if logits_to_keep == 0 else every[max(0, columns - logits_to_keep) :]


def _arrange(logits: Tensor, kept: np.ndarray, wanted: np.ndarray) -> Tensor:
    """Logits (B, kept, V) in the order, and with the repeats, that were asked for."""
    index = (np.cumsum(kept) - 1)[wanted]
    if wanted.ndim == 1:
        if len(index) == logits.shape[1] and (index == np.arange(len(index))).all():
            return logits
        return logits[:, torch.from_numpy(index).to(logits.device)]
    at = torch.from_numpy(index).to(logits.device)
    return logits.gather(1, at.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))


def _assemble(found: list[tuple[_Block, int, Tensor]], kept: np.ndarray, rows: int, columns: int) -> Tensor:
    """Logits (B, kept, V) from those of the blocks."""
    place = np.cumsum(kept) - 1
    total = int(kept.sum())
    if all(block.is_plain for block, _, _ in found):
        parts = []
        for block, first, logits in found:
            wanted = kept[block.take[0, first:]]
            parts.append(
                logits if wanted.all() else logits[:, torch.from_numpy(np.flatnonzero(wanted)).to(logits.device)]
            )
        if sum(part.shape[1] for part in parts) == total:
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    like = found[0][2] if found else None
    if like is None:
        raise UnsupportedCallError("attention_mask: every token is masked; there is nothing to read.")
    result = like.new_zeros(rows, total, like.shape[-1])
    for block, first, logits in found:
        take = block.take[:, first:]
        row, position = np.nonzero((take >= 0) & kept[np.maximum(take, 0)])
        to = torch.from_numpy(place[take[row, position]]).to(logits.device)
        at = torch.from_numpy(row).to(logits.device)
        result = result.index_put((at, to), logits[at, torch.from_numpy(position).to(logits.device)])
    return result


def _assemble_hidden(
    found: list[tuple[_Block, tuple[Tensor, ...]]], rows: int, columns: int
) -> tuple[Tensor, ...] | None:
    if not found:
        return None
    everything = np.ones(columns, dtype=bool)
    states = len(found[0][1])
    return tuple(
        _assemble([(block, 0, hidden[number]) for block, hidden in found], everything, rows, columns)
        for number in range(states)
    )


def _left_padding_order(ids: Tensor | None, mask: Tensor | None, cache: FocusCache) -> Tensor | None:
    """Column order that moves padding to the left in every row; None where no row ends in padding."""
    if ids is None or mask is None or mask.shape != ids.shape or bool((mask[:, -1] != 0).all()):
        return None
    if cache.seen:
        raise UnsupportedCallError("generate: right padding cannot follow what the cache holds; pad on the left.")
    return torch.sort((mask != 0).to(torch.int8), dim=1, stable=True).indices

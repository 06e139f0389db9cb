"""FocusCache: the local window of every layer, and what has moved from it into memory.

Columns and rows. Local keys and values are tensors (B, Hkv, L, D) whose last column is the newest token.
A column may hold no token in some row (padding); `valid` says which do. With `overlap`, the first columns
are tokens that are in memory already, and memory layers must not see them twice: `stored` says which.
Positions are counted inside the window, per row, over valid columns: 0, 1, 2, …

Ordinary layers hold rotated keys. When the oldest tokens leave, the positions of the rest become smaller,
and their keys are rotated back by as much. Memory layers hold unrotated keys, rotated when attended to,
since a token that moves to memory changes its encoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from longfocus.attention.context import AdditionalContext
from longfocus.errors import MemoryStoreError, UnsupportedCallError
from longfocus.memory.context import MassRecorder, MemoryContext, Part
from longfocus.memory.contract import KVStore
from longfocus.memory.dense import Scratch
from longfocus.memory.ram import RamStore
from longfocus.memory.windows_context import WindowsContext
from longfocus.model.attention_function import WindowPass
from longfocus.positions import rotate

if TYPE_CHECKING:
    from longfocus.memory.asked import AskedMemory
    from longfocus.model.focus import Focus


class LocalLayer(CacheLayerMixin):
    """Keys and values of one layer's local window, in a buffer with room to append."""

    is_sliding = False

    def __init__(self, owner: FocusCache, room: int) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.owner = owner
        self.room = room
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._begin = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def columns(self) -> int:
        """L, without tokens of a pass under way."""
        return 0 if self.keys is None else self.keys.shape[2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, Hkv, T, D) and return the whole window (B, Hkv, L, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            if self.keys is not None and self.values is not None:
                key_states = torch.cat((self.keys, key_states), 2)
                value_states = torch.cat((self.values, value_states), 2)
            self.replace(key_states, value_states)
            return key_states, value_states
        start = self._begin + self.columns
        stop = start + key_states.shape[2]
        if not self._writable(stop):
            self._reserve(key_states, value_states)
            start, stop = self.columns, self.columns + key_states.shape[2]
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        keys, values = (buffer[:, :, self._begin : stop] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def _writable(self, stop: int) -> bool:
        if self._buffers is None or stop > self._buffers[0].shape[2]:
            return False
        return self._buffers[0].is_inference() == torch.is_inference_mode_enabled()

    def _reserve(self, key_states: Tensor, value_states: Tensor) -> None:
        needed = self.columns + key_states.shape[2]
        capacity = max(needed, self.room)
        buffers = []
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            buffer = new.new_empty(new.shape[0], new.shape[1], capacity, new.shape[3])
            if old is not None:
                buffer[:, :, : self.columns] = old
            buffers.append(buffer)
        self._buffers = (buffers[0], buffers[1])
        self._begin = 0

    @property
    def state(self) -> tuple[Any, ...]:
        """What `update`, `trim` and `replace` change; may be set back."""
        return self.keys, self.values, self._buffers, self._begin, self.is_initialized

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self._buffers, self._begin, self.is_initialized = state

    def replace(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Take these tensors as the window; the next `update` copies them into a new buffer."""
        self.keys, self.values = keys, values
        self._buffers, self._begin = None, 0

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        if columns and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]
            self._begin += columns

    def cut(self, columns: int) -> None:
        """Forget the last columns."""
        if columns and self.keys is not None and self.values is not None:
            keep = self.columns - columns
            self.keys, self.values = self.keys[:, :, :keep], self.values[:, :, :keep]

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows."""
        if self.keys is not None and self.values is not None:
            index = index.to(self.keys.device)
            self.replace(self.keys.index_select(0, index), self.values.index_select(0, index))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_max_length(self) -> int:
        return -1


def _no_columns(rows: int) -> list[np.ndarray]:
    """The flags of rows that hold nothing."""
    return [np.zeros((rows, 0), dtype=bool) for _ in range(3)]


class FocusCache(Cache):
    """What a focused model knows between calls: local windows, memory of its own, and the memory it reads.

    Pass it as `cache=` to `forward` or `generate`; a second call continues from the first. The shared
    memory is only read: what slides out of the local window goes to the cache's own records, so that two
    questions to one memory never see each other, and a copy of the cache does not copy the memory.
    """

    def __init__(
        self,
        focus: Focus,
        memory: AskedMemory | None = None,
        *,
        last_window: int | None = None,
        own: KVStore | None = None,
        document_start: int = 0,
        document_stop: int | None = None,
    ) -> None:
        """
        Args:
            focus: what `attach` put on the model.
            memory: read by every row, or None.
            last_window: overrides the config's, for this cache.
            own: where tokens go that leave the window; None: fresh RAM, per row.
            document_start: first record of `own` that may be seen.
            document_stop: one past the last; None: all, also those that this cache adds.
        """
        self.focus = focus
        config = focus.config
        room = config.window_tokens + max(64, config.window_tokens // 8)
        layers = [LocalLayer(self, room) for _ in range(focus.num_layers)]
        super().__init__(layers=layers)
        self.local_layers = layers
        self.read_memory(memory)
        self.last_window = last_window
        self.seen = 0
        """Columns fed so far, padding included: what transformers calls the sequence length."""
        self.valid = np.zeros((0, 0), dtype=bool)
        self.stored = np.zeros((0, 0), dtype=bool)
        self.first = np.zeros((0, 0), dtype=bool)
        """Columns whose token had nothing local before it when it was fed."""
        self.recorder: MassRecorder | None = None
        self._removable: int | None = None  # last columns that `crop` may take back; None: nothing has moved so far
        self._scratch = Scratch()  # of its own: two threads may read one memory at once
        self._own = own
        self._document_start, self._document_stop = document_start, document_stop

    def read_memory(self, memory: AskedMemory | None) -> None:
        """Read this memory, as it is now: what is added to it later is not seen by this cache."""
        self.memory = memory
        self.memory_tokens = memory.tokens if memory is not None else 0
        self._shared = memory.visible() if memory is not None else None

    @property
    def _flags(self) -> Sequence[np.ndarray]:
        """What is known of each column, as bool (B, L) each: `valid`, `stored`, `first`."""
        return self.valid, self.stored, self.first

    @_flags.setter
    def _flags(self, flags: Sequence[np.ndarray]) -> None:
        self.valid, self.stored, self.first = flags

    # -- sizes -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """B; 0 before the first pass."""
        return self.valid.shape[0]

    @property
    def local_tokens(self) -> np.ndarray:
        """int (B,): tokens in each row's local window."""
        return self.valid.sum(1)

    @property
    def own_tokens(self) -> int:
        """Records that this cache has moved to memory itself (of the fullest row)."""
        return 0 if self._own is None else self._own.tokens - self._document_start

    @property
    def is_croppable(self) -> bool:
        """False: assisted generation, which rolls back, is refused; `crop` works while tokens are local."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> FocusCache:
        other = FocusCache(
            self.focus,
            self.memory,
            last_window=self.last_window,
            document_start=self._document_start,
            document_stop=self._document_stop,
        )
        memo[id(self)] = other
        other.memory_tokens, other._shared = self.memory_tokens, self._shared
        other.seen, other._flags = self.seen, [flags.copy() for flags in self._flags]
        other._own, other._removable = copy.deepcopy(self._own, memo), self._removable
        for mine, copied in zip(self.local_layers, other.local_layers, strict=True):
            if mine.keys is not None and mine.values is not None:
                copied.lazy_initialization(mine.keys, mine.values)
                copied.replace(mine.keys.clone(), mine.values.clone())
        return other

    # -- a pass ------------------------------------------------------------------------------------------

    def open_pass(self, tokens: np.ndarray, drop: np.ndarray, *, reading: bool) -> WindowPass:
        """Make room, and describe the pass of the next new columns.

        Args:
            tokens: bool (B, T), which new columns hold a token.
            drop: int (B,), oldest local tokens to let go of in each row first.
            reading: whether the window will be stored (then `read_span` applies).
        """
        if self.rows == 0:
            self._flags = _no_columns(tokens.shape[0])
        self._moves = bool(drop.any())
        if self._moves:
            self._drop(drop)
        device = self.focus.device
        valid = np.concatenate((self.valid, tokens), 1)
        stored = np.concatenate((self.stored, np.zeros_like(tokens)), 1)
        positions = np.maximum(np.cumsum(valid, 1) - 1, 0)
        key_positions = torch.from_numpy(positions).to(device)
        count = tokens.shape[1]
        first = np.concatenate((self.first, tokens & (positions[:, positions.shape[1] - count :] == 0)), 1)
        config = self.focus.config
        base = None
        if config.memory_positions == "absolute":
            base = torch.from_numpy(self._window_base()).to(device)
        window_pass = WindowPass(
            tables=self.focus.tables,
            memory_positions=config.memory_positions,
            query_positions=key_positions[:, key_positions.shape[1] - count :],
            key_positions=key_positions,
            valid=None if valid.all() else torch.from_numpy(valid).to(device),
            unstored=torch.from_numpy(valid & ~stored).to(device) if stored.any() else None,
            context=self._context(config.read_span if reading else None),
            query_base=base,
        )
        self._pending = (valid, stored, first)
        return window_pass

    def open_windows(self, count: int) -> tuple[WindowPass, WindowsContext]:
        """Let go of what is local, and describe a pass whose rows are the next `count` windows of the one text, all full
        and all to be stored (`take_windows`)."""
        if self.rows == 0:
            self._flags = _no_columns(1)
        assert self.rows == 1, "windows of one text"
        self._drop(self.local_tokens)
        config = self.focus.config
        before = self._context(config.read_span)
        assert before is None or isinstance(before, MemoryContext), "see `side_by_side`"
        context = WindowsContext(
            before,
            self.focus.storage,
            self._check_range,
            retrieval=config.retrieval,
            k=config.k,
            scratch=self._scratch,
            span=config.read_span,
            replace_first=config.window_first == "replaced",
            balance_tokens=config.balance_tokens,
            rule=config.k_rule,
            counts=self.focus.k_counts,
        )
        positions = torch.arange(config.window_tokens, device=self.focus.device).expand(count, -1)
        window_pass = WindowPass(
            tables=self.focus.tables,
            memory_positions=config.memory_positions,
            query_positions=positions,
            key_positions=positions,
            valid=None,
            unstored=None,
            context=context,
        )
        return window_pass, context

    def take_windows(self, context: WindowsContext, count: int) -> None:
        """Store the records of a pass over `count` windows; nothing stays local."""
        self._removable = 0
        if self.focus.config.layers:
            self._store_for(1).append(context.records)
        self.seen += count * self.focus.config.window_tokens

    def close_pass(self, store: np.ndarray) -> None:
        """Account for the columns that the layers have appended; store whole windows of rows `store` (bool (B,))."""
        columns = self._pending[0].shape[1] - self.valid.shape[1]
        self._flags = self._pending
        if store.any():
            self._removable = 0
        elif self._moves:
            self._removable = columns
        elif self._removable is not None:
            self._removable += columns
        if store.any():
            self._move(self.valid & store[:, None])

    def snapshot(self) -> Callable[[], None]:
        """A function that takes the cache back to this moment, for calls that do not finish (Ctrl-C, an error).

        Nothing is copied: passes write only behind what is there, and records are only appended.
        """
        layers = [layer.state for layer in self.local_layers]
        state = (self._flags, self.seen, self._removable, self._own)
        tokens = self._own.tokens if self._own is not None else 0

        def restore() -> None:
            for layer, before in zip(self.local_layers, layers, strict=True):
                layer.state = before
            self._flags, self.seen, self._removable, self._own = state
            if self._own is not None:
                self._own.rewind(tokens)

        return restore

    @property
    def side_by_side(self) -> bool:
        """Whether windows may be read in one pass: nothing is recorded, and what they read may be seen by several at once."""
        return self.recorder is None and (self._shared is None or self._shared.side_by_side)

    def _context(self, span: int | None) -> AdditionalContext | None:
        shared = self._shared
        if self.memory is not None and shared is not None and not self.memory.is_current(shared):
            raise MemoryStoreError(
                f"{self.memory.label} was compacted or cleared after this cache began to read it; start a new cache."
            )
        own = Part(self._own, self._document_start, self._document_stop) if self._own is not None else None
        if (shared is None or not shared.tokens) and (own is None or not own.tokens):
            return None
        config = self.focus.config
        if config.retrieval == "approximate" and span is None and isinstance(shared, Part) and shared.search is None:
            memory: Any = self.memory
            shared.search = memory.search(tuple(shared.pieces()))
        options: dict[str, Any] = {
            "retrieval": config.retrieval,
            "k": config.k,
            "rerank": config.rerank,
            "scratch": self._scratch,
            "span": span,
            "balance_tokens": config.balance_tokens,
            "recorder": self.recorder,
            "rule": config.k_rule,
            "counts": self.focus.k_counts,
        }
        return shared.context(own, **options) if shared is not None else MemoryContext(None, own, **options)

    # -- moving tokens to memory -------------------------------------------------------------------------

    def _drop(self, count: np.ndarray) -> None:
        """Let go of each row's oldest `count` tokens (but of no anchor); those not yet in memory move there."""
        order = np.cumsum(self.valid, 1)
        anchors = self._anchors(count, order)
        leaving = self.valid & ~anchors & (order <= (count + anchors.any(1))[:, None])
        self._move(leaving)
        self.valid = self.valid & ~leaving
        self.stored = self.stored & ~leaving
        if anchors.any():
            self._shift_back(self._close_up(np.where(anchors, 0, count[:, None])))
            return
        used = np.flatnonzero(self.valid.any(0))
        trim = int(used[0]) if used.size else self.valid.shape[1]
        self._flags = [flags[:, trim:] for flags in self._flags]
        for layer in self.local_layers:
            layer.trim(trim)
        if self.valid.shape[1]:
            self._shift_back(count[:, None])

    def _anchors(self, count: np.ndarray, order: np.ndarray) -> np.ndarray:
        """bool (B, L): the first tokens of windows that lose `count` tokens but keep others."""
        stays = (count > 0) & (count < order[:, -1] - 1) if order.shape[1] else count > 0
        if not self.focus.config.anchored or not stays.any():
            return np.zeros_like(self.valid)
        return self.valid & self.first & (order == 1) & stays[:, None]

    def _close_up(self, by: np.ndarray) -> np.ndarray:
        """Lay the valid columns of each row side by side, all rows ending together; gives `by` (B, L) of the new columns."""
        width = int(self.valid.sum(1).max())
        kept = np.argsort(self.valid, 1, kind="stable")[
            :, self.valid.shape[1] - width :
        ]  # what is not valid comes first
        self._flags = [np.take_along_axis(flags, kept, 1) for flags in self._flags]
        index = torch.from_numpy(kept).to(self.focus.device)[:, None, :, None]
        for layer in self.local_layers:
            if layer.keys is not None and layer.values is not None:
                layer.replace(*(torch.take_along_dim(each, index, 2) for each in (layer.keys, layer.values)))
        return np.take_along_axis(by, kept, 1)

    def _shift_back(self, count: np.ndarray) -> None:
        by = torch.from_numpy(count.astype(np.int64)).to(self.focus.device)
        for index, layer in enumerate(self.local_layers):
            if index not in self.focus.tables and layer.keys is not None:
                layer.replace(self.focus.rotary(index).shift_back(layer.keys, by), layer.values)

    def _move(self, columns: np.ndarray) -> None:
        """Append the memory layers' keys and values of these columns (bool (B, L)) unless they are stored."""
        moving = columns & ~self.stored
        used = np.flatnonzero(moving.any(0))
        if not used.size:
            return
        if not self.focus.config.layers:  # windows alone: there is no memory to move to
            self.stored = self.stored | moving
            return
        low, high = int(used[0]), int(used[-1]) + 1
        rows, first, after = self._replaced(moving)
        end = max(high, int(after.max(initial=0)) + 1)
        records: dict[int, Tensor] = {}
        with torch.no_grad():
            for index in self.focus.config.layers:
                layer = self.local_layers[index]
                assert layer.keys is not None and layer.values is not None
                keys = self._encode(index, layer.keys[:, :, low:end], low, end)
                record = torch.stack((keys, layer.values[:, :, low:end]), 2).permute(0, 3, 2, 1, 4)
                if len(rows):
                    record[rows, first - low] = record[rows, after - low]
                self._check_range(index, record[:, : high - low])
                records[index] = record[:, : high - low]
            self._store_for(moving.shape[0]).append(records, moving[:, low:high])
        self.stored = self.stored | moving

    def _replaced(self, moving: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns of moving tokens whose record is replaced, and the columns of those that take their place."""
        if self.focus.config.window_first == "kept":
            return (np.zeros(0, dtype=np.int64),) * 3
        rows, first = np.nonzero(moving & self.first)
        later = self.valid[rows] & (np.arange(self.valid.shape[1])[None] > first[:, None])
        alone = ~later.any(1)
        return rows[~alone], first[~alone], later.argmax(1)[~alone]

    def _check_range(self, index: int, record: Tensor) -> None:
        """Refuse keys and values of a layer that are too large for how they are stored."""
        storage = self.focus.storage
        if storage.largest >= torch.finfo(record.dtype).max:
            return
        largest = float(record.abs().max())
        if storage.largest < largest < torch.inf:
            raise UnsupportedCallError(
                f"memory_dtype: {storage.name} holds numbers up to {storage.largest:,.6g}, and layer {index} "
                f"made one of {largest:,.6g}; use bfloat16 or float32."
            )

    def _encode(self, index: int, keys: Tensor, low: int, high: int) -> Tensor:
        positions = self.focus.config.memory_positions
        if positions == "none":
            return keys
        table = self.focus.tables[index]
        if positions == "first":
            return table.as_first(keys)
        inside = np.maximum(np.cumsum(self.valid, 1) - 1, 0)[:, low:high]
        absolute = torch.from_numpy(inside + self._window_base()[:, None]).to(keys.device)
        return rotate(keys, *table.anywhere(absolute))

    def _window_base(self) -> np.ndarray:
        """int (B,): tokens of the text before each row's local window."""
        shared = self.memory_tokens
        own = np.zeros(self.rows, dtype=np.int64)
        if isinstance(self._own, RamStore) and self._own.rows == self.rows:
            own = self._own.row_counts()
        elif self._own is not None:
            own += self._own.tokens
        return shared + own - (self.stored & self.valid).sum(1)

    def _store_for(self, rows: int) -> KVStore:
        if self._own is None:
            self._own = self.focus.new_store(rows)
        return self._own

    # -- what transformers asks of a cache ---------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed so far, in memory or local."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows follow their beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, repeat or reorder rows."""
        index = indices.cpu().numpy()
        if self._own is not None and self._own.tokens:
            if not isinstance(self._own, RamStore):
                raise UnsupportedCallError("Rows of a cache that writes into a saved memory cannot be reordered.")
            self._own.select_rows(indices.cpu())
        elif self._own is not None:
            self._own = None
        self._flags = [flags[index] for flags in self._flags]
        for layer in self.local_layers:
            layer.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as if they had never been fed.

        Args:
            tokens_to_remove: their number, negative as transformers writes it (-3 removes three).

        Raises:
            UnsupportedCallError: some of them are in memory already, or padding lies among them.
        """
        if tokens_to_remove > 0:
            raise UnsupportedCallError(
                f"crop: {tokens_to_remove} given; write -{tokens_to_remove} to remove that many tokens."
            )
        count = -tokens_to_remove
        if count == 0:
            return
        local = self.valid.shape[1]
        removable = local if self._removable is None else min(local, self._removable)
        if count > removable:
            raise UnsupportedCallError(
                f"crop: {count} tokens asked back, but only {removable} are still local as they were fed; "
                "the others have moved to memory and stay there."
            )
        if not self.valid[:, local - count :].all():
            raise UnsupportedCallError(
                "crop: padding lies among the last tokens; crop works on rows that end together."
            )
        self._flags = [flags[:, : local - count] for flags in self._flags]
        for layer in self.local_layers:
            layer.cut(count)
        self.seen -= count
        if self._removable is not None:
            self._removable -= count

    def reset(self) -> None:
        """Forget everything but the shared memory."""
        for layer in self.local_layers:
            layer.replace(None, None)
        self.seen, self._removable = 0, None
        self._flags = _no_columns(0)
        self._own = None

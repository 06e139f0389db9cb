"""Focus: what `attach` puts on a model. The resolved options, and what they need to know of the model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError
from longfocus.k_rule import KRule
from longfocus.memory.adaptive_k import KCounts
from longfocus.memory.fingerprint import model_fingerprint
from longfocus.memory.geometry import MemoryGeometry
from longfocus.memory.quantiser import require_faiss
from longfocus.memory.ram import RamStore
from longfocus.memory.storage import StorageDtype, storage_dtype
from longfocus.model.families import Anatomy
from longfocus.model.gates import has_gates
from longfocus.positions import RotaryTable


class Focus:
    """A model's memory layers and how they are fed. Made by `attach`; read-only afterwards."""

    def __init__(self, model: PreTrainedModel, config: FocusConfig) -> None:
        """
        Raises:
            UnsupportedModelError: the model's family cannot carry memory layers.
            ConfigError: the options do not fit the model, or need a library that is not installed.
        """
        self.anatomy = Anatomy(model)
        self.config = config.resolve(self.anatomy.num_layers, self.anatomy.longest_window)
        self._fingerprint: tuple[tuple[tuple[int, int], ...], str] | None = None
        for layer in self.config.layers:
            sliding = self.anatomy.sliding_window(layer)
            if sliding is not None and sliding < self.config.window_tokens:
                full = [i for i in range(self.num_layers) if self.anatomy.sliding_window(i) is None]
                raise ConfigError(
                    f"memory_layers: layer {layer} sees only {sliding} tokens by itself, fewer than the window of "
                    f"{self.config.window_tokens}, so tokens between would be lost. Choose a window of at most {sliding}"
                    + (f", or layers among {full}." if full else ".")
                )
        if self.config.retrieval == "approximate":
            require_faiss()
        if self.config.k_rule is not None:
            self._check_rule(self.config.k_rule)
        self.k_counts = KCounts()
        """What `k_rule` has done since the model was attached, or since this was replaced by a fresh one."""
        unfit = self.storage.why_not(self.anatomy.head_dim)
        if unfit is not None:
            raise ConfigError(f"memory_dtype: {unfit}.")
        self.tables: dict[int, RotaryTable] = {layer: self.anatomy.rotary(layer) for layer in self.config.layers}

    def __repr__(self) -> str:
        return f"<Focus of {type(self.model).__name__}: {self.config}>"

    def _check_rule(self, rule: KRule) -> None:
        if has_gates(self.model):
            raise ConfigError(
                "k_rule: this model joins its memory by gates, for which normalisers decide nothing; leave it out."
            )
        heads = int(self.model.config.get_text_config().num_attention_heads)
        rule.check(self.config.layers, heads, self.config.window_tokens, self.config.balance_tokens)

    @property
    def model(self) -> PreTrainedModel:
        """The model that this belongs to."""
        return self.anatomy.model

    @property
    def num_layers(self) -> int:
        """Layers of the model, memory layers included."""
        return self.anatomy.num_layers

    @property
    def device(self) -> torch.device:
        """Where the model's embeddings are."""
        return self.model.get_input_embeddings().weight.device

    @property
    def storage(self) -> StorageDtype:
        """How memory records are written."""
        return storage_dtype(self.config.memory_dtype or self.model.dtype)

    def rotary(self, layer: int) -> RotaryTable:
        """Rotary table of any layer."""
        return self.anatomy.rotary(layer)

    def new_store(self, rows: int = 1) -> RamStore:
        """An empty store in RAM for this model's records."""
        return RamStore(
            self.config.layers,
            self.anatomy.kv_heads,
            self.anatomy.head_dim,
            self.storage,
            rows=rows,
            device=self.config.memory_device or self.device,
        )

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights as they are now; taken again when a weight was changed or replaced."""
        state = tuple((weight.data_ptr(), weight._version) for weight in self.model.parameters())
        if self._fingerprint is None or self._fingerprint[0] != state:
            self._fingerprint = (state, model_fingerprint(self.model))
        return self._fingerprint[1]

    @property
    def geometry(self) -> MemoryGeometry:
        """What a memory must agree with to be read by this model."""
        return MemoryGeometry(
            model=self.fingerprint,
            model_name=Path(getattr(self.model.config, "_name_or_path", "") or self.model.config.model_type).name,
            model_dtype=str(self.model.dtype).removeprefix("torch."),
            layers=self.config.layers,
            kv_heads=self.anatomy.kv_heads,
            head_dim=self.anatomy.head_dim,
            dtype=self.storage.name,
            window=self.config.window_tokens,
            overlap=self.config.overlap,
            memory_positions=self.config.memory_positions,
        )

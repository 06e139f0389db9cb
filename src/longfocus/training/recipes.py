"""The validated form of a recipe: one commented YAML file a run. Unknown keys and impossible values are errors here,
before anything is loaded; each names the key and what is allowed.

    recipe = Recipe.read("recipes/smollm2-135m.yaml", ["run.steps=20"])

This module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from longfocus.config import FocusConfig
from longfocus.crossbatch.plan import NAMED_MIXES, Choice, Mix, Share, check_mix, documents
from longfocus.crossbatch.schedules import ByAccuracy, Drawn, Schedule, Switched, constant
from longfocus.data.dictionary import DictionaryFormat
from longfocus.data.source_spec import Kind, SourceSpec
from longfocus.errors import ConfigError
from longfocus.settings import apply_change, load_yaml, validated

Positive = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Part(BaseModel):
    """A section of a recipe."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Scratch(_Part):
    """A model that begins from drawn weights: an ordinary `transformers` Llama (`training.scratch`)."""

    layers: Positive
    hidden: Positive
    """Width of the residual stream."""
    heads: Positive
    """Query heads; hidden / heads is the width of one."""
    kv_heads: Positive | None = None
    """Heads of keys and values. None: as many."""
    intermediate: Positive
    """Width inside the gated MLP."""
    tokenizer: str = "bytes"
    """bytes: a text's UTF-8 bytes. ids: made-up data without text, each id written as its number. Else the tokenizer of
    a folder, a hub id, "default-base"."""
    vocabulary: Positive | None = None
    """Token ids. None: those of the tokenizer; must be given for `ids`."""
    longest: Positive = 2048
    """Positions that the config names; nothing is allocated for them."""
    rope_base: Annotated[float, Field(gt=1)] = 10_000.0
    deviation: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the drawn matrices. Narrow models want more, about 1 / sqrt(hidden)."""
    tie: bool = True
    """Head and embeddings are one matrix."""
    temperature: bool = False
    """Learn a temperature for each head of the memory layers (the paper's models from scratch). It scales the head's queries,
    so the result has it folded into q_proj and stays an ordinary checkpoint."""

    @model_validator(mode="after")
    def _fits(self) -> Scratch:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: {self.heads} given, expected heads of an even width in hidden ({self.hidden})")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} given, expected a divisor of heads ({self.heads})")
        if self.tokenizer == "ids" and self.vocabulary is None:
            raise ValueError("vocabulary: missing; tokenizer: ids has none of its own")
        return self


def _model_form(value: Any) -> str:
    return "name" if isinstance(value, str) else "scratch"


ModelSpec = Annotated[Annotated[str, Tag("name")] | Annotated[Scratch, Tag("scratch")], Discriminator(_model_form)]


class DocumentsMix(_Part):
    """d documents of w windows each (the paper's analysis)."""

    d: Positive
    """Documents seen: the row's own and d - 1 others."""
    w: Positive = 1
    """Earlier windows of the own document, and windows of each other one."""


class SharesMix(_Part):
    """Parts of the batch with (positives, negatives) of their own (LongLLaMA)."""

    shares: list[tuple[float, int, int]]
    """(part of the batch, positives, negatives); parts add up to 1."""


def _mix_form(value: Any) -> str:
    if isinstance(value, str):
        return "name"
    return "shares" if isinstance(value, SharesMix) or (isinstance(value, dict) and "shares" in value) else "documents"


MixSpec = Annotated[
    Annotated[Literal["local", "longllama_3b", "longllama_7b"], Tag("name")]
    | Annotated[DocumentsMix, Tag("documents")]
    | Annotated[SharesMix, Tag("shares")],
    Discriminator(_mix_form),
]


def _mix(spec: MixSpec) -> Mix:
    if isinstance(spec, str):
        return NAMED_MIXES[spec]
    if isinstance(spec, DocumentsMix):
        return documents(spec.d, spec.w)
    return check_mix(tuple(Share(*part) for part in spec.shares))


class Stage(_Part):
    """A mix from a part of the run on."""

    after: Annotated[float, Field(ge=0, lt=1)]
    """Part of the run's steps, 0 for the first stage."""
    mix: MixSpec


class Crossbatch(_Part):
    """Which windows rows see while training (see `longfocus.crossbatch`). Give one of mix, stages, drawn, by_accuracy."""

    places: Positive = 4
    """Documents side by side, in each process."""
    windows_per_step: Positive = 8
    """Windows of each place in a step."""
    stride: Positive | None = None
    """Windows by which a document moves on. None: windows_per_step (several new windows a step, the authors' later
    code). 1 with windows_per_step 2: previous and current window (the paper's analysis)."""
    mix: MixSpec | None = None
    """One mix throughout."""
    stages: list[Stage] | None = None
    """Mixes one after another (d = 2, then 64 for the last tenth)."""
    drawn: list[MixSpec] | None = None
    """Each step draws one."""
    by_accuracy: tuple[MixSpec, float, MixSpec] | None = None
    """[first mix, training accuracy that must be reached, mix from then on]."""
    negatives: Choice = "next"
    """next: documents of the next places (the paper); random: any; hard: those whose keys score highest."""
    negative_copies: Annotated[float, Field(ge=1)] = 1.0
    """Each negative counts as often as this, as if so many equal windows were in the batch. Ours, not the paper's: it
    trains for memories far larger than a batch, at no cost."""
    contrast: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an explicit contrastive loss, meaned over the memory layers and added to the loss: the negative logarithm of the share
    that positives have of the additional attention (`crossbatch.contrast`). Ours; the paper has none. `loss` in the log holds it."""
    across_processes: bool = False
    """Windows of other processes serve as negatives too."""

    @model_validator(mode="after")
    def _one_schedule(self) -> Crossbatch:
        given = [name for name in ("mix", "stages", "drawn", "by_accuracy") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{given or 'nothing'} given, expected exactly one of mix, stages, drawn, by_accuracy")
        if self.stride is not None and self.stride > self.windows_per_step:
            raise ValueError(
                f"stride: {self.stride} given, expected at most windows_per_step ({self.windows_per_step})"
            )
        after = [stage.after for stage in self.stages or []]
        if self.stages is not None and (after[:1] != [0] or after != sorted(set(after))):
            raise ValueError(f"stages: after {after} given, expected 0 first and then rising parts of the run")
        self.schedule(1000)  # impossible mixes show now
        return self

    @property
    def stride_windows(self) -> int:
        """The stride, filled in."""
        return self.stride or self.windows_per_step

    def schedule(self, steps: int) -> Schedule:
        """The schedule over a run of so many steps."""
        if self.mix is not None:
            return constant(_mix(self.mix))
        if self.stages is not None:
            begins = {min(int(stage.after * steps), steps - 1): _mix(stage.mix) for stage in self.stages}
            return Switched(sorted(begins.items()))  # in a short run the later of two stages that begin together
        if self.drawn is not None:
            return Drawn([_mix(spec) for spec in self.drawn])
        assert self.by_accuracy is not None
        first, threshold, then = self.by_accuracy
        return ByAccuracy(_mix(first), _mix(then), threshold)


class Rope(_Part):
    """Scaled positions for ordinary long fine-tuning, as `transformers` knows them."""

    type: Literal["linear", "dynamic", "yarn"]
    """linear: position interpolation; dynamic: dynamic NTK; yarn: YaRN."""
    factor: Annotated[float, Field(gt=1)]
    """Context grows by this factor."""


class Long(_Part):
    """Ordinary long-context fine-tuning of the plain model: one document a row, all layers see all of it."""

    rows: Positive = 1
    """Documents side by side, in each process."""
    tokens: Positive = 2048
    """Tokens of a row."""
    rope: Rope | None = None


class Memorizing(_Part):
    """Memorizing Transformer (a baseline): memory layers see earlier windows of their document as they were computed when it
    was their turn, without gradient. One new window of each place a step."""

    places: Positive = 4
    """Documents side by side, in each process."""
    memory: Positive = 2048
    """Tokens of each place that are remembered."""
    k: Positive | None = 32
    """Keys per query and head. None: all that are remembered."""
    combine: Literal["concatenation", "gate"] = "concatenation"
    """concatenation: one softmax over window and memory. gate: a learned share for each head (`longfocus.model.gates`)."""
    gate_bias: float = 0.0
    """Every head's share is sigmoid of this at first."""


class TransformerXL(_Part):
    """Transformer-XL (a baseline): all layers see the window before, without gradient, at its true distance. One new window of
    each place a step; the result is a plain model."""

    places: Positive = 4
    """Documents side by side, in each process."""
    cache: Positive | None = None
    """Tokens that are carried on. None: one window."""


class Lora(_Part):
    """Low-rank adapters through peft."""

    r: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: list[str] | None = None
    """Module names; None: the projections that `what` names."""
    modules_to_save: list[str] | None = None
    """Trained whole beside the adapters, for instance embeddings and norms."""
    merge: bool = False
    """Save an ordinary checkpoint with the adapters merged in, instead of an adapter."""


class Train(_Part):
    """What is trained."""

    what: Literal["memory_attention", "attention", "layers", "all"] = "memory_attention"
    """memory_attention: q, k, v, o of the memory layers. attention: of all layers. layers: everything inside the
    layers of `layers`. all: every weight."""
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Restrict to these layers (for `attention` and `layers`)."""
    names: list[str] | None = None
    """Restrict further to parameters whose name contains one of these, for instance [q_proj, k_proj]."""
    lora: Lora | None = None

    @model_validator(mode="after")
    def _layers(self) -> Train:
        if self.layers is not None and self.what in ("memory_attention", "all"):
            raise ValueError(f"layers: given with what: {self.what}, which has its own; use what: attention or layers")
        if self.what == "layers" and not self.layers:
            raise ValueError("layers: missing; what: layers trains what is named there")
        return self


class RetrievalSource(_Part):
    """Made-up facts strewn in text and asked for later (`longfocus.data.retrieval_text`); synthetic."""

    kind: Literal["retrieval"]
    name: str = "retrieval"
    share: Annotated[float, Field(gt=0)]
    hay: list[str] = []
    """Names of other sources whose text is the hay; empty: plain sentences only."""
    tokens: tuple[Positive, Positive] = (2048, 8192)
    """Shortest and longest document."""
    plain_hay: Annotated[float, Field(ge=0, le=1)] = 0.4
    chat: Annotated[float, Field(ge=0, le=1)] = 0.3
    spacing: tuple[Positive, Positive] = (20, 120)
    """Fewest and most words between facts."""
    far: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Part of the documents that state all facts first and ask for each once, later on."""
    lone: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Part of the documents with few facts in much hay, asked for at the end."""

    @model_validator(mode="after")
    def _ranges(self) -> RetrievalSource:
        for name in ("tokens", "spacing"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: [{low}, {high}] given, expected the smaller number first")
        if self.far + self.lone > 1:
            raise ValueError(f"far, lone: {self.far} and {self.lone} given, expected parts that add up to at most 1")
        return self


class DictionarySource(_Part):
    """Made-up dictionaries and questions about them, in token ids (`longfocus.data.dictionary`); the loss is taken on answers
    only."""

    kind: Literal["dictionary"]
    name: str = "dictionary"
    share: Annotated[float, Field(gt=0)] = 1.0
    symbols: Annotated[int, Field(ge=2)] = 60
    """Ids that keys and values are made of; four special ones follow them."""
    key_tokens: Positive = 4
    value_tokens: Positive = 4
    window: Positive = 256
    """Tokens of the definitions, and of the questions; a document is both."""

    @property
    def form(self) -> DictionaryFormat:
        """How records are written."""
        return DictionaryFormat(self.symbols, self.key_tokens, self.value_tokens, 0, self.window)

    @model_validator(mode="after")
    def _possible(self) -> DictionarySource:
        _ = self.form
        return self


class TextSource(_Part):
    """Documents of files or of a hub dataset (`longfocus.data.source_spec`)."""

    kind: str = "text"
    """text, jsonl, parquet, code or hub."""
    name: str
    share: Annotated[float, Field(gt=0)]
    minimum_tokens: Annotated[int, Field(ge=0)] = 0
    """Shorter documents are left out."""
    pieces_of: Positive | None = None
    """Longer documents are cut into pieces of at most so many tokens, each a document of its own, so that a short run sees
    a bit of many. None: documents stay whole."""
    stream: bool = False
    """Tokenise while training, in the source's own order, instead of once into the cache."""
    paths: list[str] = []
    text_field: str = "text"
    id_field: str = "id"
    suffixes: list[str] | None = None
    encoding: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def spec(self) -> SourceSpec:
        """Where the documents lie."""
        values = self.model_dump(exclude={"share", "minimum_tokens", "pieces_of", "stream"})
        return SourceSpec.from_dict(values)

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in get_args(Kind):  # an unknown kind is taken for one of these: say what else there is
            raise ValueError(
                f"{kind!r} given, expected one of {', '.join((*get_args(Kind), 'retrieval', 'dictionary'))}"
            )
        return kind

    @model_validator(mode="after")
    def _check(self) -> TextSource:
        self.spec()
        if self.stream and self.pieces_of is not None:
            raise ValueError("pieces_of: given with stream; only tokenised sources are cut")
        return self


def _source_form(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in ("retrieval", "dictionary") else "text"


Source = Annotated[
    Annotated[TextSource, Tag("text")]
    | Annotated[RetrievalSource, Tag("retrieval")]
    | Annotated[DictionarySource, Tag("dictionary")],
    Discriminator(_source_form),
]


class Data(_Part):
    """What is read, in which shares of tokens."""

    sources: Annotated[list[Source], Field(min_length=1)]
    join_below: Annotated[int, Field(ge=0)] = 0
    """A document with fewer tokens is joined with the next ones of its source."""
    separator: str = "\n\n"
    """Stands between joined documents."""
    strict: bool = False
    """Refuse documents that are longer than what a place reads in a step, instead of reading them over several steps. (No
    token is ever cut; shorter documents too may begin in one step and end in the next.)"""
    cache: str | None = None
    """Folder of tokenised sources. None: in the user's cache folder."""

    @model_validator(mode="after")
    def _names(self) -> Data:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources: the names {names} are not all different")
        for source in self.sources:
            if isinstance(source, RetrievalSource):
                texts = [other.name for other in self.sources if isinstance(other, TextSource) and not other.stream]
                unknown = [name for name in source.hay if name not in texts]
                if unknown:
                    raise ValueError(f"hay: {unknown} given, expected names of tokenised sources: {', '.join(texts)}")
        return self


class Optimizer(_Part):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)]
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class Run(_Part):
    """How long, how precise, what is kept."""

    steps: Positive | None = None
    """Optimizer steps; or `tokens`."""
    tokens: Positive | None = None
    """Tokens in all, of all processes; rounded up to whole steps."""
    gradient_accumulation: Positive = 1
    gradient_checkpointing: bool = False
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 products where the machine is fast at them (CUDA, AMX, AVX512-BF16), float32 elsewhere. With bfloat16, weights
    that are not trained are held in bfloat16 too; trained ones, and all weights of the result, stay float32."""
    device: Literal["auto", "cpu"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    save_every: Positive = 50
    """Steps between checkpoints."""
    keep: Positive = 2
    """Checkpoints kept."""
    log_every: Positive = 10
    report_to: list[str] = []
    """For instance [tensorboard] or [wandb]."""
    push_to_hub: str | None = None
    """Repository to upload the result to."""
    output: str = "out/train"
    """Folder of checkpoints, log and result."""

    @model_validator(mode="after")
    def _length(self) -> Run:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("steps, tokens: give one of them")
        return self


class Recipe(_Part):
    """A whole run."""

    model: ModelSpec = "default-base"
    """Folder, hub id, "default-base" for the model that comes along, or "default" to train its fine-tune further; or the
    shape of a model to train from scratch (layers, hidden, heads, …)."""
    method: Literal["crossbatch", "long", "memorizing", "transformer_xl"] = "crossbatch"
    """crossbatch: the Focused Transformer's training. Baselines: long: ordinary long-context fine-tuning; memorizing:
    Memorizing Transformer; transformer_xl: Transformer-XL."""
    focus: dict[str, Any] = {}
    """FocusConfig: memory_layers, window, …"""
    crossbatch: Crossbatch | None = None
    long: Long | None = None
    memorizing: Memorizing | None = None
    transformer_xl: TransformerXL | None = None
    train: Train = Train()
    data: Data
    optimizer: Optimizer
    run: Run
    trainer: dict[str, Any] = {}
    """Further arguments of transformers.TrainingArguments, as they are (fsdp, logging, hub, …)."""

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        FocusConfig.from_dict(self.focus)
        if getattr(self, self.method) is None:
            raise ValueError(f"method: {self.method!r} given, expected a section of that name too")
        if isinstance(self.model, Scratch):
            self._from_scratch(self.model)
        if self.crossbatch is not None and self.crossbatch.contrast and self.run.gradient_checkpointing:
            raise ValueError(
                f"crossbatch.contrast: {self.crossbatch.contrast} given with run.gradient_checkpointing, which does not keep the scores; "
                "leave one of them out"
            )
        part = self.train.lora is not None or self.train.names is not None
        if part and self.method == "memorizing" and self.memorizing is not None and self.memorizing.combine == "gate":
            raise ValueError(
                "memorizing.combine: 'gate' given with train.lora or train.names, which would not train the gates"
            )
        if self.method == "transformer_xl" and self.train.lora is not None:
            raise ValueError(
                "train.lora: given with method: transformer_xl, whose result is a plain model; leave it out"
            )
        for source in self.data.sources:
            if isinstance(source, DictionarySource):
                self._with_dictionary(source)
        return self

    def _from_scratch(self, model: Scratch) -> None:
        if self.train.what != "all" or self.train.names is not None or self.train.lora is not None:
            raise ValueError("train: a model from scratch is trained whole; give what: all, without names and lora")
        self.focus_config.resolve(model.layers, model.longest)
        if model.temperature and self.method in ("long", "transformer_xl"):
            raise ValueError(f"model.temperature: given with method: {self.method}, which has no memory layers")

    def _with_dictionary(self, source: DictionarySource) -> None:
        form, model = source.form, self.model
        if not isinstance(model, Scratch) or model.tokenizer != "ids" or (model.vocabulary or 0) < form.vocabulary:
            raise ValueError(
                f"data: {source.name} is made of {form.vocabulary} ids and no text; give a model from scratch with tokenizer: ids "
                f"and vocabulary: {form.vocabulary} or more"
            )
        if self.method == "long":
            assert self.long is not None
            if self.long.tokens != 2 * form.window:
                raise ValueError(
                    f"long.tokens: {self.long.tokens} given, expected a document of {2 * form.window} tokens"
                )
        elif self.focus_config.window != form.window:
            raise ValueError(
                f"focus.window: {self.focus_config.window} given, expected {source.name}'s window, {form.window}"
            )

    @property
    def model_name(self) -> str:
        """What messages call the model."""
        if isinstance(self.model, str):
            return self.model
        return f"a new Llama of {self.model.layers} layers and width {self.model.hidden}"

    @property
    def focus_config(self) -> FocusConfig:
        """The options of the focused model."""
        return FocusConfig.from_dict(self.focus)

    @property
    def carried_places(self) -> int:
        """Places of the methods that carry windows on."""
        part = self.memorizing if self.method == "memorizing" else self.transformer_xl
        assert part is not None
        return part.places

    def tokens_per_step(self, window: int, processes: int = 1) -> int:
        """New tokens of an optimizer step, when no row is padded."""
        if self.method == "long":
            assert self.long is not None
            rows = self.long.rows * self.long.tokens
        elif self.method == "crossbatch":
            assert self.crossbatch is not None
            rows = self.crossbatch.places * self.crossbatch.stride_windows * window
        else:
            rows = self.carried_places * window
        return rows * self.run.gradient_accumulation * processes

    def steps(self, window: int, processes: int = 1) -> int:
        """Optimizer steps of the run."""
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.tokens is not None
        return -(-self.run.tokens // self.tokens_per_step(window, processes))

    @classmethod
    def read(cls, path: Path | str, changes: Sequence[str] = ()) -> Recipe:
        """Read a YAML file and apply `key.key=value` changes.

        Raises:
            ConfigError: no such file, not YAML, an unknown key, an impossible value.
        """
        path = Path(path)
        try:
            raw = load_yaml(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"recipe {path}: {error.strerror}. Give the path of a YAML file.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"recipe {path}: expected keys and values (model:, data:, …).")
        for change in changes:
            apply_change(raw, change)
        return cls.check(raw, str(path))

    @classmethod
    def check(cls, raw: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """Validate plain data.

        Raises:
            ConfigError: names every wrong key and what is allowed there.
        """
        return validated(cls, raw, where)

    def dump(self) -> str:
        """YAML of everything, defaults included; `read` gives an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

"""What a recipe will cost, before it is run: weights trained, FLOPs, peak memory, hours. Checked against measured steps.

    made = plan(Recipe.read("recipes/longllama-3b.yaml"), device="h100", devices=8, config="recipes/configs/open_llama_3b")
    made.tokens_per_s, made.hours, made.memory["peak"]

The model is built on the meta device (shapes without numbers), so a plan takes seconds for any size. FLOPs are those of
matrix products, as they are computed: ordinary layers of a window go through a mask and so pay for the whole
square of scores, memory layers on a CPU skip the later half. Time is FLOPs over what the device sustains (its peak times
a usual utilisation), and the bytes that element-wise work moves over the memory's speed: in small models that is half
of it. Not in it: reading and tokenising data, exchange between devices, checkpoints.

`measure` runs a few real steps on this machine instead, on random tokens: cost does not depend on which tokens they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from longfocus.crossbatch.attend import _BLOCK_SCORES
from longfocus.crossbatch.plan import Contexts, Mix, Rows, plan_contexts
from longfocus.crossbatch.schedules import Drawn, Switched
from longfocus.errors import ConfigError, ModelNotFoundError
from longfocus.model.families import Anatomy
from longfocus.model.token_loss import _PIECE_LOGITS
from longfocus.training.recipes import Recipe


@dataclass(frozen=True)
class Device:
    """One device, from its data sheet (dense products, no sparsity)."""

    float32: float
    """Peak FLOP/s of float32 products."""
    bfloat16: float
    memory_bytes: float
    bytes_per_s: float
    """Of its memory."""


_GB = 1e9
DEVICES: dict[str, Device] = {
    "a100": Device(19.5e12, 312e12, 80 * _GB, 2.0e12),
    "a100-40gb": Device(19.5e12, 312e12, 40 * _GB, 1.6e12),
    "h100": Device(67e12, 989e12, 80 * _GB, 3.35e12),
    "h200": Device(67e12, 989e12, 141 * _GB, 4.8e12),
    "b200": Device(80e12, 2250e12, 180 * _GB, 8.0e12),
    "l4": Device(30e12, 121e12, 24 * _GB, 0.3e12),
    "l40s": Device(91e12, 362e12, 48 * _GB, 0.86e12),
    "rtx3090": Device(36e12, 71e12, 24 * _GB, 0.94e12),
    "rtx4090": Device(83e12, 165e12, 24 * _GB, 1.0e12),
}
UTILISATION = 0.5
"""Part of the peaks that products and element-wise work usually reach; an assumption."""
_CPU_UTILISATION = 0.7
_CORE_FLOPS = {"AVX2": 55e9, "AVX512": 130e9}  # float32 products on one core, measured
_AMX_CORE_FLOPS = 890e9  # bfloat16 products on one core with matrix tiles, measured
_CPU_BYTES_PER_S = 15e9
_DRAWS = 16  # tables drawn to find how many windows a row sees


def device(name: str) -> Device:
    """A device by name; `cpu` is this machine, with as many cores as PyTorch may use.

    Raises:
        ConfigError: an unknown name.
    """
    if name == "cpu":
        cores = torch.get_num_threads()
        peak = _CORE_FLOPS.get(torch.backends.cpu.get_cpu_capability(), 40e9)
        narrow = _AMX_CORE_FLOPS if torch.cpu._is_amx_tile_supported() else 1e9
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(cores * peak, cores * narrow, float(memory), _CPU_BYTES_PER_S)
    if name not in DEVICES:
        raise ConfigError(
            f"--device: {name!r} given, expected one of cpu, {', '.join(DEVICES)}; or give --flops-per-s."
        )
    return DEVICES[name]


# -- the model's shape -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """A linear layer and what of its derivative is taken."""

    inputs: int
    outputs: int
    trained: bool
    input_grad: bool
    """Something before it is trained."""

    @property
    def forward(self) -> int:
        """FLOPs a token."""
        return 2 * self.inputs * self.outputs

    @property
    def backward(self) -> int:
        """FLOPs a token."""
        return self.forward * (self.trained + self.input_grad)


@dataclass(frozen=True)
class Layer:
    """One decoder layer, as far as cost goes."""

    memory: bool
    incoming: list[Linear]
    """To queries, keys and values."""
    outgoing: list[Linear]
    """From the heads' outputs."""
    attention_grad: bool
    """Queries, keys or values have a gradient."""
    mlp: list[Linear]
    mlp_between: int
    """Numbers a token that the element-wise part between the linear layers keeps for its derivative."""
    norm_numbers: int
    """Numbers a token (in float32) that norms keep."""
    backward: bool
    """There is a derivative to take in it at all."""

    @property
    def linears(self) -> list[Linear]:
        """All of them."""
        return [*self.incoming, *self.outgoing, *self.mlp]


@dataclass(frozen=True)
class Shape:
    """A model, as far as cost goes."""

    layers: list[Layer]
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    head_trained: bool
    weights: int
    trained: int
    trained_linear: int
    """Of those, in linear layers: the ones that bfloat16 products keep a copy of."""
    window: int
    memory_layers: tuple[int, ...]
    softcap: bool
    """Scores are bent, which no fused kernel does: attention is written out in plain products."""


def build_shape(recipe: Recipe, config: Path | str | None = None) -> Shape:
    """The shape of a recipe's model, without its weights.

    Args:
        config: folder with a config.json to take in place of the recipe's model (offline).

    Raises:
        ModelNotFoundError: no config there; says how to name one.
        ConfigError, UnsupportedModelError: as for training.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from longfocus.config import FocusConfig
    from longfocus.model import longllama
    from longfocus.model.attach import attach
    from longfocus.model.load import _raw_config, resolve
    from longfocus.training import parts
    from longfocus.training.run import _with_lora

    try:
        path = resolve(str(config) if config is not None else recipe.model)
        raw = _raw_config(path)
    except ModelNotFoundError as error:
        if config is not None:
            raise
        raise ModelNotFoundError(
            f"{error} A plan needs only the model's config.json: give --config FOLDER (for the OpenLLaMA models "
            "recipes/configs/open_llama_3b and open_llama_7b)."
        ) from error
    options: dict[str, Any]
    if longllama.is_longllama(raw):
        loaded, focus = longllama.read_config(raw)
        options = focus.to_dict()
    else:
        loaded = AutoConfig.from_pretrained(path)
        options = dict(getattr(loaded, "longfocus", None) or {})
    if hasattr(loaded, "longfocus"):
        del loaded.longfocus
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(loaded, dtype=torch.float32)
    if recipe.method == "crossbatch":
        model = attach(model, FocusConfig.from_dict({**options, **recipe.focus}))
        anatomy, resolved = model.focus.anatomy, model.focus.config
    else:
        anatomy = Anatomy(model)
        resolved = recipe.focus_config.resolve(anatomy.num_layers, None)
    names = parts.select(model, recipe.train, resolved.layers)
    wrapped = model if recipe.train.lora is None else _with_lora(model, recipe.train.lora, names)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    # activation checkpointing in transformers lets the embeddings' output have a gradient, trained or not
    grad = _trained(embeddings) or recipe.run.gradient_checkpointing
    layers = []
    for index in range(anatomy.num_layers):
        crossbatch = recipe.method == "crossbatch" and index in resolved.layers
        layer, grad = _layer(anatomy, index, grad, crossbatch)
        layers.append(layer)
    weights = list(wrapped.parameters())
    linear = {
        id(module.weight): module.weight.numel()
        for module in wrapped.modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    return Shape(
        layers=layers,
        hidden=int(model.config.hidden_size),
        vocabulary=int(head.weight.shape[0]),
        heads=int(model.config.num_attention_heads),
        kv_heads=anatomy.kv_heads,
        head_dim=anatomy.head_dim,
        head_trained=bool(head.weight.requires_grad),
        weights=sum(weight.numel() for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        trained_linear=sum(linear.values()),
        window=resolved.window_tokens,
        memory_layers=resolved.layers if recipe.method == "crossbatch" else (),
        softcap=getattr(model.config, "attn_logit_softcapping", None) is not None,
    )


def _layer(anatomy: Anatomy, index: int, grad: bool, memory: bool) -> tuple[Layer, bool]:
    """A layer, and whether what leaves it has a gradient. `grad`: whether what enters it has."""
    layer, attention = anatomy.layer(index), anatomy.attentions[index]
    entered = grad
    norms = [
        module
        for module in layer.modules()
        if not isinstance(module, nn.Linear) and _own_weight(module) is not None and "Norm" in type(module).__name__
    ]
    inside = {id(module) for module in attention.modules()}
    outer = [norm for norm in norms if id(norm) not in inside]
    grad = grad or any(_trained(norm) for norm in outer[:1])
    *before, after = _projections(attention)
    incoming: list[Linear] = []
    attention_grad = grad or any(_trained(norm) for norm in norms if id(norm) in inside)
    for projection in before:
        incoming += _linears(projection, grad)
        attention_grad = attention_grad or _trained(projection)
    outgoing = _linears(after, attention_grad)
    grad = attention_grad or _trained(after)
    mlp: list[Linear] = []
    between = 0
    others = [child for child in layer.children() if child is not attention and _has_linear(child)]
    for other in others:
        *first, last = _projections(other)
        grad = grad or any(_trained(norm) for norm in outer[1:])
        made = [_linears(projection, grad) for projection in first]
        mlp += [linear for found in made for linear in found]
        width = sum(found[0].outputs for found in made)
        grad = grad or any(_trained(projection) for projection in first)
        final = _linears(last, grad)
        mlp += final
        if grad:  # a gate keeps its argument, its value and the other factor; without a gate only the argument is kept
            between = width + (final[0].inputs if width > final[0].inputs else 0)
        grad = grad or _trained(last)
    width = int(anatomy.model.config.hidden_size)
    norm_numbers = 0
    for number, norm in enumerate(outer):
        has_input_grad = entered if number == 0 else grad
        norm_numbers += width * (has_input_grad + _trained(norm))
    if attention_grad:  # norms of queries and of keys, in this order
        inner = [norm for norm in norms if id(norm) in inside]
        for norm, heads in zip(inner, (int(anatomy.model.config.num_attention_heads), anatomy.kv_heads), strict=False):
            norm_numbers += anatomy.head_dim * heads * (1 + _trained(norm))
    return Layer(memory, incoming, outgoing, attention_grad, mlp, between, norm_numbers, grad), grad


def _own_weight(module: nn.Module) -> Any:
    return module._parameters.get("weight")


def _trained(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())


def _projections(module: nn.Module) -> list[nn.Module]:
    """A module's linear layers (or adapters around them) in order; the last one leads out of it."""
    return [child for child in module.children() if _has_linear(child)]


def _linears(projection: nn.Module, input_grad: bool) -> list[Linear]:
    return [
        # the second factor of an adapter comes after the first, which is trained
        Linear(
            inner.in_features, inner.out_features, inner.weight.requires_grad, input_grad or ".lora_B." in f".{name}."
        )
        for name, inner in projection.named_modules()
        if isinstance(inner, nn.Linear)
    ]


# -- what a step feeds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One micro-batch of one process, every row full."""

    rows: int
    row_tokens: int
    targets: int
    """Tokens that a loss is taken on: those that were not fed in the step before."""
    mean_windows: float
    """Additional windows a row sees, over the run."""
    most_windows: float
    """The same under the largest mix of the run."""
    widest_row: int
    """Windows that one row sees at most."""

    @property
    def tokens(self) -> int:
        """Tokens fed."""
        return self.rows * self.row_tokens


def step_of(recipe: Recipe, window: int, devices: int = 1) -> Step:
    """What a step of a recipe feeds, from its own planner of contexts."""
    if recipe.method == "long":
        assert recipe.long is not None
        return Step(recipe.long.rows, recipe.long.tokens, recipe.long.rows * recipe.long.tokens, 0.0, 0.0, 0)
    part = recipe.crossbatch
    assert part is not None
    steps = recipe.steps(window, devices)
    schedule = part.schedule(steps)
    places = part.places * (devices if part.across_processes else 1)
    seen = [_windows_seen(mix, places, part.windows_per_step, part.negatives) for mix in schedule.mixes]
    means = [mean for mean, _ in seen]
    if isinstance(schedule, Switched):
        begun = [first for first, _ in schedule.stages] + [steps]
        lasting = [max(0, after - first) for first, after in itertools.pairwise(begun)]
        mean = sum(a * b for a, b in zip(means, lasting, strict=True)) / max(1, sum(lasting))
    elif isinstance(schedule, Drawn):
        mean = statistics.mean(means)
    else:  # switched by accuracy, no one knows when: as if from the start
        mean = means[-1]
    rows = part.places * part.windows_per_step
    targets = part.places * part.stride_windows * window
    return Step(rows, window, targets, mean, max(means), max(widest for _, widest in seen))


def _windows_seen(mix: Mix, places: int, windows: int, choice: Any) -> tuple[float, int]:
    """(mean, most) additional windows of a row, over a few drawn tables; long documents, one in each place."""
    if all(part.positives == part.negatives == 0 for part in mix):
        return 0.0, 0
    place = np.repeat(np.arange(places), windows)
    rows = Rows(place, place.copy(), np.tile(np.arange(windows), places), np.ones(len(place), dtype=np.int64))
    draws = _DRAWS if len(place) <= 64 else 2
    counts = [
        _count(plan_contexts(rows, mix, choice=choice, generator=np.random.default_rng(draw)), rows)
        for draw in range(draws)
    ]
    return float(np.mean(counts)), int(np.max(counts))


def _count(table: Contexts, rows: Rows) -> np.ndarray:
    others = np.array([(rows.documents != document).sum() for document in rows.documents])
    hard = np.minimum(table.wanted_hard, others)
    return (table.positives >= 0).sum(1) + (table.negatives >= 0).sum(1) + hard


# -- FLOPs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """FLOPs of one micro-batch of one process."""

    linear_forward: float = 0.0
    linear_backward: float = 0.0
    attention_forward: float = 0.0
    """Local windows of all layers."""
    attention_backward: float = 0.0
    memory_local: float = 0.0
    """Of those, in memory layers, both ways."""
    additional: float = 0.0
    """Additional windows in memory layers, both ways."""
    additional_most: float = 0.0
    """The same under the largest mix of the run."""
    recomputed: float = 0.0
    """Forward a second time, for activation checkpointing."""

    @property
    def forward(self) -> float:
        """Without additional windows."""
        return self.linear_forward + self.attention_forward

    @property
    def backward(self) -> float:
        """Without additional windows."""
        return self.linear_backward + self.attention_backward

    @property
    def total(self) -> float:
        """Everything that is computed."""
        return self.forward + self.backward + self.additional + self.recomputed

    @property
    def memory_attention(self) -> float:
        """What memory layers' attention itself takes, recomputation aside."""
        return self.memory_local + self.additional


def count_flops(shape: Shape, step: Step, *, masked: bool, checkpointing: bool = False, on_cpu: bool = False) -> Flops:
    """FLOPs of matrix products.

    Args:
        masked: ordinary layers meet a mask, and so compute scores that it then hides.
        on_cpu: there memory layers use a fused kernel, which skips what is later; elsewhere plain products.
    """
    totals = dict.fromkeys((entry.name for entry in dataclasses.fields(Flops)), 0.0)
    n, width = step.row_tokens, shape.heads * shape.head_dim
    square, half = n * n, n * (n + 1) / 2
    fused = on_cpu and not shape.softcap
    for layer in shape.layers:
        whole = not fused if layer.memory else masked or shape.softcap
        pairs = square if whole else half
        forward = 4 * width * pairs * step.rows
        # the derivative's four products, and the scores again where they were not kept
        products = 8 if shape.softcap and not layer.memory else 10
        backward = products * width * pairs * step.rows if layer.attention_grad else 0.0
        linear = sum(one.forward for one in layer.linears) * step.tokens
        totals["linear_forward"] += linear
        totals["linear_backward"] += sum(one.backward for one in layer.linears) * step.tokens
        totals["attention_forward"] += forward
        totals["attention_backward"] += backward
        again = checkpointing and layer.backward
        # all but the last product, whose result nothing needs
        totals["recomputed"] += (linear - layer.mlp[-1].forward * step.tokens + forward) * again
        if layer.memory:
            ways = 4 * (1 + again) + (10 if layer.attention_grad else 0)
            totals["memory_local"] += forward + backward
            totals["additional"] += ways * width * square * step.mean_windows * step.rows
            totals["additional_most"] += ways * width * square * step.most_windows * step.rows
    head = 2 * shape.hidden * shape.vocabulary * step.targets
    reached = shape.layers[-1].backward
    totals["linear_forward"] += head
    totals["linear_backward"] += head * (reached + shape.head_trained)
    return Flops(**totals)


def count_traffic(shape: Shape, step: Step, *, dtype: torch.dtype, checkpointing: bool = False) -> float:
    """Bytes that element-wise work of one micro-batch reads and writes, roughly.

    Counted in passes over a tensor: norms and residuals 22 over the hidden state, rotation 10 over queries and keys,
    gates 5, the loss 12 over the logits; the derivative takes twice the forward's.
    """
    narrow = 2 if dtype == torch.bfloat16 else 4
    rotated = 10 * 4 * (shape.heads + shape.kv_heads) * shape.head_dim
    total = 0.0
    for layer in shape.layers:
        gate = 5 * narrow * (layer.mlp[-1].inputs if layer.mlp else 0)
        times = 1 + layer.backward * (2 + checkpointing)
        total += times * (22 * 4 * shape.hidden + rotated + gate) * step.tokens
    return total + 12 * 4 * shape.vocabulary * step.targets


# -- memory ------------------------------------------------------------------------------------------------


def count_memory(
    shape: Shape,
    step: Step,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    devices: int = 1,
    on_cpu: bool = False,
) -> dict[str, float]:
    """Bytes on one device at the fullest moment of a step, by part; `peak` is not their sum (see below).

    Weights and optimizer states are always there. While the backward pass runs, gradients grow as activations go, so
    the peak is the larger of the two, unless gradients of an earlier micro-batch or another process are kept too.
    The program itself (interpreter, libraries, CUDA context) comes on top: 0.5 to 1 GB.
    """
    wide, narrow = 4, 2 if dtype == torch.bfloat16 else 4
    shards = devices if recipe.trainer.get("fsdp") else 1
    checkpointing = recipe.run.gradient_checkpointing
    memory = {
        "weights": wide * shape.weights / shards,
        "gradients": wide * shape.trained / shards,
        "optimizer": 2 * wide * shape.trained / shards,
    }
    plain = recipe.method == "long"
    kept = [_kept(layer, shape, step.row_tokens, narrow, plain) * step.tokens for layer in shape.layers]
    cast = [
        narrow * sum(one.inputs * one.outputs for one in layer.linears if one.trained or one.input_grad)
        for layer in shape.layers
    ]
    entering = wide * shape.hidden * step.tokens
    final = entering * (2 if shape.head_trained else 1)  # the last norm's
    if checkpointing:
        memory["activations"] = final + sum(entering for layer in shape.layers if layer.backward)
        memory["one layer's activations"] = max(kept, default=0.0)
    else:
        memory["activations"] = final + sum(kept)
        memory["one layer's activations"] = 0.0
    memory["narrow copies of weights"] = 0.0
    if narrow < wide:
        if shards > 1:  # gathered in bfloat16 for a layer and the next one
            held = 2 * max(cast, default=0.0)
        else:
            held = narrow * shape.trained_linear + max(cast, default=0.0) if checkpointing else sum(cast)
        memory["narrow copies of weights"] = held
    memory["loss"] = _loss_bytes(shape, step, plain, narrow)
    widest = max((max(layer.mlp_between, 4 * shape.hidden) for layer in shape.layers if layer.backward), default=0)
    memory["working"] = (narrow * (widest + shape.hidden) + 2 * wide * shape.hidden) * step.tokens
    memory["gathered contexts"] = _gathered_bytes(shape, step, narrow, on_cpu) if shape.memory_layers else 0.0
    doubled = devices > 1 and shards == 1  # buckets that are exchanged between processes
    before = memory["gradients"] * ((recipe.run.gradient_accumulation > 1) + doubled)
    unsharded = wide * shape.weights / max(1, len(shape.layers)) * 2 if shards > 1 else 0.0
    memory["exchange"] = unsharded + (memory["gradients"] if doubled else 0.0)
    top = max(memory["loss"], memory["one layer's activations"] + max(memory["working"], memory["gathered contexts"]))
    during = memory["activations"] + memory["narrow copies of weights"] + top + before + unsharded
    memory["peak"] = memory["weights"] + memory["optimizer"] + max(during, memory["gradients"] * (1 + doubled))
    return memory


def _kept(layer: Layer, shape: Shape, row_tokens: int, narrow: int, plain: bool) -> float:
    """Bytes a token that a layer keeps for its derivative."""
    numbers = 0.0
    for group in (layer.incoming, layer.outgoing, layer.mlp):
        inputs = [one.inputs for one in group if one.trained]
        # in float32 linear layers of one input share it; in bfloat16 each has a copy of its own
        numbers += sum(inputs if narrow < 4 else set(inputs))
    numbers += layer.mlp_between
    extra = 0.0
    if layer.attention_grad:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        if layer.memory:
            numbers += 2 * queries + 3 * keys  # queries and output; keys by position, keys as context, values
        else:
            numbers += 2 * queries + 2 * (keys if plain else queries)  # a mask makes keys and values be repeated
            if shape.softcap:
                numbers += 3 * shape.heads * row_tokens  # bent scores and weights
        extra = 4 * shape.heads
        if narrow == 4 and any(one.trained and one.inputs == queries for one in layer.outgoing):
            numbers -= queries  # the output projection's input is the output itself
    return narrow * numbers + 4 * layer.norm_numbers + extra


def _loss_bytes(shape: Shape, step: Step, plain: bool, narrow: int) -> float:
    targets = step.targets
    if plain:  # transformers' own loss: logits, their float32 form, its softmax, the gradient
        return targets * shape.vocabulary * (narrow + 3 * 4)
    logits = min(_PIECE_LOGITS, targets * shape.vocabulary)
    pieces = logits * (4 if narrow == 4 else 4 + 2 + 2)
    head = shape.vocabulary * shape.hidden
    held = 4.0 * step.tokens * shape.hidden + (narrow * head if narrow < 4 else 0)
    return pieces + held + (8.0 * head if shape.head_trained else 0)


def _gathered_bytes(shape: Shape, step: Step, narrow: int, on_cpu: bool) -> float:
    """One row's gathered windows and the derivatives of a memory layer, in float32."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    row = step.widest_row * step.row_tokens * 2 * keys
    gathered = row * (narrow + 4)
    derivatives = 4.0 * step.tokens * (queries + 3 * keys)
    if on_cpu:
        return gathered + derivatives
    # the plain form holds one block of scores, its weights and their derivatives, and everything once in float32
    scores = min(_BLOCK_SCORES, step.rows * shape.heads * step.row_tokens**2)
    return gathered + derivatives + 4.0 * 4 * scores + 4.0 * step.tokens * (2 * queries + 2 * keys)


# -- the plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a run will take. Numbers of tokens and FLOPs are of all devices together, memory is of one."""

    model: str
    method: str
    weights: int
    trained: int
    memory_layers: tuple[int, ...]
    window: int
    mean_windows: float
    """Additional windows a row sees, over the run."""
    most_windows: float
    """The same under the largest mix of the run."""
    flops_per_token: dict[str, float]
    """forward, backward, recomputed, additional (mean), additional_most, total; each for a token of the loss."""
    tokens_per_step: int
    steps: int
    tokens: int
    memory: dict[str, float]
    """Bytes on one device, by part, and `peak`."""
    device: str
    devices: int
    precision: str
    device_memory: float
    """Bytes that the device has."""
    flops_per_s: float
    """Sustained by one device."""
    tokens_per_s: float
    hours: float
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the peak, and 1 GB for the program itself, go into the device's memory."""
        return self.memory["peak"] + 1e9 <= self.device_memory

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**dataclasses.asdict(self), "trained_share": self.trained / self.weights, "fits": self.fits}


def plan(
    recipe: Recipe,
    *,
    device: str = "cpu",
    devices: int = 1,
    flops_per_s: float | None = None,
    config: Path | str | None = None,
) -> Plan:
    """What a recipe will take.

    Args:
        device: name of a device (`DEVICES`, or `cpu` for this machine).
        devices: how many, one process each.
        flops_per_s: what one device sustains in such training; None: its peak times its usual utilisation.
        config: as `build_shape`.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError: as training would, or an unknown device.
    """
    kind = _device(device)
    if devices < 1:
        raise ConfigError(f"--devices: {devices} given, expected 1 or more.")
    shape = build_shape(recipe, config)
    step = step_of(recipe, shape.window, devices)
    dtype = _dtype(recipe, device)
    crossbatch = recipe.method == "crossbatch"
    on_cpu = device == "cpu"
    flops = count_flops(shape, step, masked=crossbatch, checkpointing=recipe.run.gradient_checkpointing, on_cpu=on_cpu)
    notes = []
    if flops_per_s is None:
        usual = _CPU_UTILISATION if on_cpu else UTILISATION
        peak = kind.bfloat16 if dtype == torch.bfloat16 else kind.float32
        wide = 0.0 if on_cpu else flops.memory_attention
        seconds = ((flops.total - wide) / peak + wide / kind.float32) / usual
        traffic = count_traffic(shape, step, dtype=dtype, checkpointing=recipe.run.gradient_checkpointing)
        seconds += traffic / (kind.bytes_per_s * usual)
        if wide:
            notes.append("attention of memory layers is counted in float32, as it is computed on this device")
        notes.append(f"{usual:.0%} of the device's peaks assumed; --flops-per-s or --measure replaces it")
    else:
        seconds = flops.total / flops_per_s
    if devices > 1:
        notes.append("exchange between devices is not counted")
    tokens_per_step = recipe.tokens_per_step(shape.window, devices)
    steps = recipe.steps(shape.window, devices)
    tokens_per_s = devices * step.targets / seconds
    each = step.targets
    return Plan(
        model=recipe.model,
        method=recipe.method,
        weights=shape.weights,
        trained=shape.trained,
        memory_layers=shape.memory_layers,
        window=shape.window if crossbatch else step.row_tokens,
        mean_windows=step.mean_windows,
        most_windows=step.most_windows,
        flops_per_token={
            "forward": flops.forward / each,
            "backward": flops.backward / each,
            "recomputed": flops.recomputed / each,
            "additional": flops.additional / each,
            "additional_most": flops.additional_most / each,
            "total": flops.total / each,
        },
        tokens_per_step=tokens_per_step,
        steps=steps,
        tokens=steps * tokens_per_step,
        memory=count_memory(shape, step, recipe, dtype=dtype, devices=devices, on_cpu=on_cpu),
        device=device,
        devices=devices,
        precision=str(dtype).removeprefix("torch."),
        device_memory=kind.memory_bytes,
        flops_per_s=flops.total / seconds,
        tokens_per_s=tokens_per_s,
        hours=steps * tokens_per_step / tokens_per_s / 3600,
        notes=notes,
    )


_device = device


def _dtype(recipe: Recipe, name: str) -> torch.dtype:
    """The dtype of products on the device planned for (`run.precision` decides for the machine at hand)."""
    from longfocus.training.run import precision

    if recipe.run.precision == "auto" and name != "cpu":
        return torch.bfloat16
    return precision(recipe.run.precision, "cpu")


# -- measured steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A few real steps on this machine."""

    steps: int
    seconds_per_step: float
    """Median, the first step left out."""
    tokens_per_s: float
    peak_bytes: int
    """Most memory in use, without the program itself."""
    program_bytes: int
    """Interpreter and libraries."""


def measure(recipe: Recipe, steps: int = 2) -> Measured:
    """Run a warm-up step and so many more of the recipe in this one process; nothing is kept.

    Raises:
        ModelNotFoundError: the weights are not here (a plan alone needs none).
    """
    from transformers import TrainerCallback
    from transformers.trainer_utils import SaveStrategy

    from longfocus.training.run import _quiet, arguments, build_model
    from longfocus.training.stream import Batches
    from longfocus.training.trainer import CrossbatchTrainer

    class Watch(TrainerCallback):
        """Notes how long steps take, and after the first what the program itself holds: libraries are all loaded then."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.begun = 0.0
            self.program = 0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.begun)
            if len(self.seconds) == 1:
                states = [value for state in kwargs["optimizer"].state.values() for value in state.values()]
                held = [*kwargs["model"].parameters(), *filter(torch.is_tensor, states)]
                _return_freed()
                self.program = _status("VmRSS") - sum(tensor.numel() * tensor.element_size() for tensor in held)
                _forget_peak()

    with tempfile.TemporaryDirectory() as folder:
        changes = {"output": folder, "steps": steps + 1, "tokens": None, "report_to": [], "push_to_hub": None}
        alone = {name: value for name, value in recipe.trainer.items() if not name.startswith("fsdp")}
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=changes), "trainer": alone})
        model = build_model(recipe)
        crossbatch = recipe.method == "crossbatch"
        window = model.focus.config.window_tokens if crossbatch else 0
        given = arguments(recipe, steps + 1)
        given.save_strategy = SaveStrategy.NO
        watch = Watch()
        text: Any = _RandomText(int(model.config.vocab_size), recipe.tokens_per_step(window))
        trainer = CrossbatchTrainer(model, recipe, Batches(text, recipe, window), given, callbacks=[watch])
        _quiet(trainer)
        trainer.train()
    seconds = statistics.median(watch.seconds[1:])
    on_gpu = torch.cuda.is_available() and recipe.run.device != "cpu"
    peak = torch.cuda.max_memory_allocated() if on_gpu else max(0, _status("VmHWM") - watch.program)
    return Measured(steps, seconds, recipe.tokens_per_step(window) / seconds, peak, watch.program)


class _RandomText:
    """Stands for a mixture: one long document after another, of random tokens."""

    world, rank = 1, 0

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self.vocabulary, self.tokens = vocabulary, tokens
        self.generator = np.random.default_rng(0)

    def next_document(self) -> Any:
        from longfocus.data.mixture import Drawn as Document

        return Document(0, ("random",), self.generator.integers(3, self.vocabulary, 16 * self.tokens), None)

    def remember(self, drawn: Any) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}


def _status(name: str) -> int:
    """Bytes, from what Linux says of this process; 0 elsewhere."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)


def _return_freed() -> None:
    """Let the allocator give back what it keeps for later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    """Loading and the first step may have taken more than training will."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

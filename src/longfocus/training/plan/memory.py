"""Bytes on one device at the fullest moment of a step: weights, optimizer, gradients, activations, the loss.

Activations are counted layer by layer, as what each operation keeps for its derivative.
"""

from __future__ import annotations

import torch

from longfocus.crossbatch.attend import BLOCK_SCORES
from longfocus.model.token_loss import PIECE_LOGITS
from longfocus.training.plan.shape import Layer, Shape
from longfocus.training.plan.step import Step
from longfocus.training.recipes import Recipe


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
    logits = min(PIECE_LOGITS, targets * shape.vocabulary)
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
    scores = min(BLOCK_SCORES, step.rows * shape.heads * step.row_tokens**2)
    return gathered + derivatives + 4.0 * 4 * scores + 4.0 * step.tokens * (2 * queries + 2 * keys)

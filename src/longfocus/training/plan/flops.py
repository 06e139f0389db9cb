"""The work of a step: FLOPs of its matrix products, and the bytes that element-wise work moves.

FLOPs are counted as they are computed: ordinary layers of a window go through a mask and so pay for the whole
square of scores, memory layers on a CPU skip the later half. Moved bytes are a rough count; in small models they
take half of the time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from longfocus.training.plan.shape import Shape
from longfocus.training.plan.step import Step


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

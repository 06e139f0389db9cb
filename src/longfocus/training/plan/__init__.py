"""What a recipe will cost, before it is run: weights trained, FLOPs, peak memory, hours. Checked against measured steps.

    made = plan(Recipe.read("recipes/longllama-3b.yaml"), device="h100", devices=8, config="recipes/configs/open_llama_3b")
    made.tokens_per_s, made.hours, made.memory["peak"]

`shape` is the model without its weights, `step` what one micro-batch feeds it, and from these two `flops` counts what
is computed and moved and `memory` what is held. `devices` is the table of devices, `estimate` puts all of it
together, `measured` runs a few real steps on this machine instead.
"""

from longfocus.training.plan.devices import DEVICES, UTILISATION, Device, device
from longfocus.training.plan.estimate import Plan, plan
from longfocus.training.plan.flops import Flops, count_flops, count_traffic
from longfocus.training.plan.measured import Measured, measure
from longfocus.training.plan.memory import count_memory
from longfocus.training.plan.shape import Layer, Linear, Shape, build_shape
from longfocus.training.plan.step import Step, step_of

__all__ = [
    "DEVICES",
    "UTILISATION",
    "Device",
    "Flops",
    "Layer",
    "Linear",
    "Measured",
    "Plan",
    "Shape",
    "Step",
    "build_shape",
    "count_flops",
    "count_memory",
    "count_traffic",
    "device",
    "measure",
    "plan",
    "step_of",
]

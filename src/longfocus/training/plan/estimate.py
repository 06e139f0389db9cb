"""The plan itself: FLOPs, moved bytes and a device's speed together give tokens per second and hours.

Time is FLOPs over what the device sustains (its peak times a usual utilisation), and moved bytes over the memory's
speed. Not in it: reading and tokenising data, exchange between devices, checkpoints.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longfocus.errors import ConfigError
from longfocus.training.plan.devices import CPU_UTILISATION, UTILISATION
from longfocus.training.plan.devices import device as find_device
from longfocus.training.plan.flops import count_flops, count_traffic
from longfocus.training.plan.memory import count_memory
from longfocus.training.plan.shape import build_shape
from longfocus.training.plan.step import step_of
from longfocus.training.recipes import Recipe


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
    kind = find_device(device)
    if recipe.method not in ("crossbatch", "long"):
        raise ConfigError(f"method: {recipe.method!r} given; a plan knows crossbatch and long.")
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
        usual = CPU_UTILISATION if on_cpu else UTILISATION
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
        model=recipe.model_name,
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


def _dtype(recipe: Recipe, name: str) -> torch.dtype:
    """The dtype of products on the device planned for (`run.precision` decides for the machine at hand)."""
    from longfocus.training.run import precision

    if recipe.run.precision == "auto" and name != "cpu":
        return torch.bfloat16
    return precision(recipe.run.precision, "cpu")

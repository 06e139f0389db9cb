"""Devices by name: their peaks, memory and its speed, and what part of those training usually reaches.

GPUs are as their data sheets say; the CPU's peaks come from products timed on one core.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from longfocus.errors import ConfigError


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
CPU_UTILISATION = 0.7
"""The same for the peak of `cpu`."""
_CORE_FLOPS = {"AVX2": 55e9, "AVX512": 130e9}  # float32 products on one core, measured
_AMX_CORE_FLOPS = 890e9  # bfloat16 products on one core with matrix tiles, measured
_BF16_CORE_FLOPS = 450e9  # the same with AVX-512's bfloat16 instructions
_CPU_BYTES_PER_S = 15e9


def device(name: str) -> Device:
    """A device by name; `cpu` is this machine, with as many cores as PyTorch may use.

    Raises:
        ConfigError: an unknown name.
    """
    if name == "cpu":
        cores = torch.get_num_threads()
        peak = _CORE_FLOPS.get(torch.backends.cpu.get_cpu_capability(), 40e9)
        narrow = 1e9
        if torch.cpu._is_amx_tile_supported():
            narrow = _AMX_CORE_FLOPS
        elif torch.cpu._is_avx512_bf16_supported():
            narrow = _BF16_CORE_FLOPS
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(cores * peak, cores * narrow, float(memory), _CPU_BYTES_PER_S)
    if name not in DEVICES:
        raise ConfigError(
            f"--device: {name!r} given, expected one of cpu, {', '.join(DEVICES)}; or give --flops-per-s."
        )
    return DEVICES[name]

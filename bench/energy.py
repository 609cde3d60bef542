"""Energy of a GPU: joules by NVML's counter, which is updated some ten times a second."""

from __future__ import annotations

from collections.abc import Callable

import torch

Counter = Callable[[], float]
"""Return the joules that a GPU has taken since its driver was loaded."""


def counter(device: torch.device) -> Counter | None:
    """Return the counter of a device; None without a GPU, without nvidia-ml-py, or where NVML has no counter."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())

    def joules() -> float:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    try:
        joules()
    except pynvml.NVMLError:
        return None
    return joules

"""Where a measurement was taken: chip, driver, versions, clocks, and the matrix rate of the same run."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch

import fa4
from fa4.runtime.device import chip_of

from .timing import measure


def slug(device: str) -> str:
    """A device's name as names of files have it."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def clocks() -> dict[str, str]:
    """Present clocks, power and temperature of the first GPU as nvidia-smi tells them; empty without a GPU."""
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {name: value.strip() for name, value in zip(fields, values)}


def _driver() -> str:
    query = ["nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """The commit of the checkout, with "-dirty" if tracked files differ from it; "unknown" without git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def facts(device: torch.device) -> dict:
    """What does not change during a run."""
    names = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "triton")
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "chip": str(chip_of(device)),
        "threads": torch.get_num_threads(),
        "driver": _driver() if device.type == "cuda" else "",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "python": platform.python_version(),
        "versions": {"fa4-kernels": fa4.__version__} | {name: _version(name) for name in names},
    }


def copy_gbps(device: torch.device) -> float:
    """GB/s of a copy, bytes read and bytes written: 2 GiB on a GPU, or a sixteenth of its memory if that is less; 64
    MiB elsewhere."""
    size = 64 << 20
    if device.type == "cuda":
        size = min(2 << 30, torch.cuda.get_device_properties(device).total_memory // 16)
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / measure(lambda: y.copy_(x), device).median_ms / 1e6


def gemm_tflops(device: torch.device) -> float:
    """TFLOP/s of a square matrix product: 8192 in bf16 on a GPU, 1024 in fp32 on a CPU; random data."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / measure(lambda: a @ b, device).median_ms / 1e9

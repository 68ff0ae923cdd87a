"""Which accelerator is meant, what it can do, and how its machines are linked. Needs no torch.

A device that is not in the catalogue is unknown, never another one's figures: its memory can be given by the user.
"""

import difflib
import os
import platform
import re
from collections.abc import Mapping

from dit.config import UsageError
from dit.planner.catalogue import CATALOGUE, DTYPES, GENERATIONS, NODES, USUAL_NODE, Device, Link, Node

__all__ = ["CATALOGUE", "GENERATIONS", "NODES", "Device", "Link", "Node", "attention_kernel", "cpu_device",
           "custom_device", "default_node", "find_device", "find_node", "parse_bytes"]

ATTENTION_KERNELS = ("flash", "efficient", "cudnn", "math")


def cpu_device() -> Device:
    """This machine's CPU: what the operating system says of it. Peaks and bandwidth are None until calibrated."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = f"CPU ({platform.machine()}, {cores} cores)"
    return Device(name, ("cpu",), memory, dict.fromkeys(DTYPES), None, "cpu", cores, None, None,
                  {"memory_bytes": "the operating system", "num_sms": "the operating system: cores it may use"})


def custom_device(memory_bytes: int, *, name: str = "custom", generation: str = "unknown",
                  peak_flops: Mapping[str, float] | None = None, memory_bandwidth: float | None = None) -> Device:
    """A device that the catalogue lacks. Without peaks and bandwidth only its memory can be planned, not its time."""
    if memory_bytes < 1 << 28:
        raise UsageError(f"--device-memory {memory_bytes}: a device has at least 256MiB; write for example 24GiB")
    if generation not in GENERATIONS:
        raise UsageError(f"device generation {generation}: unknown; one of {', '.join(GENERATIONS)}")
    peaks = dict.fromkeys(DTYPES) | dict(peak_flops or {})
    numbers = ("memory_bytes", "peak_flops", "memory_bandwidth")
    return Device(name, (), memory_bytes, peaks, memory_bandwidth, generation, None, None, None,
                  dict.fromkeys(numbers, "given by the user"))


def _key(name: str) -> str:
    """A device name without vendor words, punctuation and case: "NVIDIA GeForce RTX 4090" -> "rtx4090"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct"))


def find_device(name: str) -> Device:
    """A device by the name the driver reports or by a short alias, whatever the case; "cpu" is this machine's.

    Raises UsageError for a name that is not in the catalogue: variants differ, so nothing is guessed.
    """
    if _key(name) == "cpu":
        return cpu_device()
    known = {_key(alias): device for device in CATALOGUE for alias in (device.name, *device.aliases)}
    device = known.get(_key(name))
    if device is None:
        near = difflib.get_close_matches(_key(name), known, n=5, cutoff=0.5)
        names = list(dict.fromkeys(known[key].name for key in near))[:3] or [device.name for device in CATALOGUE[-5:]]
        raise UsageError(f"--device {name}: unknown; nearest: {', '.join(names)}; or describe it with "
                         "--device-memory 24GiB")
    return device


_UNITS = {"": 1, "B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)} | {
    f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def parse_bytes(text: str, flag: str = "--device-memory") -> int:
    """Bytes of "24GiB" (2^30), "24GB" (10^9), "512 MiB", "80e9". Raises UsageError naming ``flag``."""
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    unit = match and _UNITS.get(match[2].upper())
    try:
        number = float(match[1]) * unit if unit else None
    except ValueError:
        number = None
    if number is None or not 1 <= number < 1e18:
        raise UsageError(f"{flag} {text}: must be a size above 0, for example 24GiB, 24GB or 80e9")
    return round(number)


def find_node(name: str) -> Node:
    """A node kind by name. Raises UsageError for an unknown one."""
    if name.lower() not in NODES:
        raise UsageError(f"--node {name}: unknown; one of {', '.join(NODES)}")
    return NODES[name.lower()]


def default_node(device: Device) -> Node | None:
    """The kind of machine a device usually sits in, or None where that is not known (a CPU, a custom device)."""
    if device.link is None:
        return None
    return NODES[USUAL_NODE.get(device.name) or USUAL_NODE[device.link.name]]


# ---- attention ----


def attention_kernel(device: Device, dtype: str, head_dim: int, requested: str = "auto",
                     cudnn_first: bool = False) -> str:
    """The kernel that scaled_dot_product_attention takes in training: "flash", "efficient", "cudnn" or "math".

    ``dtype`` is that of the queries: "fp32" (with or without TF32), "fp16" or "bf16". The rules are those of PyTorch's
    ``sdp_utils.cpp`` for dense inputs without mask or dropout: flash, then efficient, then math. PyTorch puts cuDNN
    first on Hopper and data-centre Blackwell in 2.5.0, and again in recent releases with cuDNN above 9.15.0;
    ``cudnn_first`` says that the run has one of those. It saves the same tensors as flash. Raises UsageError where
    ``requested`` cannot run.
    """
    usable = [kernel for kernel in ATTENTION_KERNELS if _why_not(kernel, device, dtype, head_dim) is None]
    if requested == "auto":
        prefers_cudnn = cudnn_first and device.generation in ("sm90", "sm100") and "cudnn" in usable
        order = ("cudnn",) * prefers_cudnn + ("flash", "efficient", "math")
        return next(kernel for kernel in order if kernel in usable)
    if requested not in ATTENTION_KERNELS:
        raise UsageError(f"--attention {requested}: unknown; one of auto, {', '.join(ATTENTION_KERNELS)}")
    if requested not in usable:
        reason = _why_not(requested, device, dtype, head_dim)
        raise UsageError(f"--attention {requested}: {reason}; {' or '.join(usable)} would run")
    return requested


def _why_not(kernel: str, device: Device, dtype: str, head_dim: int) -> str | None:
    """Why a kernel cannot run, or None if it can."""
    half = dtype in ("fp16", "bf16")
    generation = device.generation
    if kernel == "math":
        return None
    if generation == "cpu":
        return None if kernel == "flash" else "does not exist on a CPU"
    if dtype == "bf16" and not device.has_bf16:
        return f"{device.name} has no bf16"
    if kernel in ("flash", "cudnn") and not half:
        return f"needs fp16 or bf16 (--amp), not {dtype}"
    if kernel in ("flash", "cudnn") and not device.has_flash:
        return f"needs compute capability 8.0 or newer, which {device.name} has not"
    if kernel == "cudnn" and generation.startswith("gfx"):
        return "does not exist on ROCm"
    if kernel == "cudnn" and (head_dim > 128 or head_dim % 8):
        return f"needs a head size that is a multiple of 8 and at most 128, not {head_dim}"
    if kernel == "flash" and head_dim > 256:
        return f"needs a head size of at most 256, not {head_dim}"
    if kernel == "flash" and 192 < head_dim <= 224 and generation in ("sm86", "sm89", "sm120"):
        return f"has no backward for a head size of {head_dim} on {device.name}"
    if kernel == "efficient":
        tensor_cores = half or generation not in ("sm70", "sm75")
        multiple = (8 if half else 4) if tensor_cores else 1
        if head_dim % multiple:
            return f"needs a head size that is a multiple of {multiple}, not {head_dim}"
    return None

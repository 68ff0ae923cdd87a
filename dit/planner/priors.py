"""What a GPU that nobody has measured is expected to reach of its catalogue peaks. Every number says where it comes from.

None of these is fitted to a training run: they are published or widely reproduced rates of single kernels.
"""

import math
from dataclasses import dataclass

from dit.planner.catalogue import Device
from dit.planner.op_class import Work

DISK_BYTES_PER_SECOND = 1e9  # prior: a checkpoint file through torch.save to a local NVMe disk

# Large matrix products over the dense peak. cuBLAS on A100: 255-280 of 312 TFLOP/s in bf16 and fp16, 120-130 of 156 in TF32, 18 of 19.5
# in fp32. H200: 769-798 of 989 (8192 cubed, random data, measured). Power limits hold cards of 300 W and less further below.
GEMM_EFFICIENCY = {"fp32": 0.92, "tf32": 0.80, "fp16": 0.82, "bf16": 0.82}
TILE = 128  # rows and columns of an output tile of the usual kernels
K_OVERHEAD = 96  # prologue and epilogue of a tile, as if the inner dimension were so much longer
MAX_SPLITS = 16  # cuBLAS splits a long inner dimension to fill the device

# Over peak: FlashAttention-2 paper, figures 4 and 6 (A100, head sizes 64 and 128): forward 0.5-0.7, backward 0.4-0.6; less here for
# head sizes that are padded (72 to 96) and short sequences.
ATTENTION_EFFICIENCY = {"attention forward": 0.50, "attention backward": 0.40}
# Convolutions of a VAE's encoder under cuDNN, over the peak of the dtype.
CONVOLUTION_EFFICIENCY = {"fp32": 0.75, "tf32": 0.45, "fp16": 0.45, "bf16": 0.45}

# Bytes over the datasheet's bandwidth: a copy reaches 0.85-0.90 (A100 1.75 of 2.04 TB/s, H200 4.3 of 4.8 TB/s measured).
BANDWIDTH_EFFICIENCY = {
    "elementwise": 0.85, "copy": 0.75, "norm": 0.70, "reduction": 0.70, "indexing": 0.50, "optimizer": 0.80, "ema": 0.80,
    "gemm": 0.85, "batched gemm": 0.80, "attention forward": 0.80, "attention backward": 0.70, "convolution": 0.70, "view": 1.0}

KERNEL_FLOOR_SECONDS = 2.5e-6  # the shortest kernel, start to end, as profilers show it on A100 and H100
# Python, dispatcher, autograd and launch of one operation on a server CPU of 2020 and later.
HOST_SECONDS = {"forward": 9e-6, "backward": 7e-6, "other": 7e-6}
VIEW_HOST_SECONDS = 2.5e-6
_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Rates:
    """A device's dense peaks per dtype (operations per second), bandwidth (bytes per second) and multiprocessors."""

    peaks: dict[str, float]
    bandwidth: float
    num_sms: int
    tf32: bool


def rates(device: Device, tf32: bool) -> Rates:
    """Raises ValueError where the device's peaks or bandwidth are not known."""
    if not device.memory_bandwidth or not device.peak_flops.get("fp32"):
        raise ValueError(f"{device.name}: no peaks are known, so no time can be planned; name a catalogue device")
    peaks = {dtype: peak for dtype, peak in device.peak_flops.items() if peak}
    return Rates(peaks, device.memory_bandwidth, device.num_sms or 100, tf32 and "tf32" in peaks)


def device_seconds(work: Work, rates: Rates) -> tuple[float, bool]:
    """(seconds on the device, whether arithmetic rather than memory decides) of one operation."""
    if work.cls == "view":
        return 0.0, False
    dtype = _DTYPE.get(work.key.rsplit(" ", 1)[-1], "fp32")
    if dtype == "fp32" and rates.tf32 and work.cls in ("gemm", "batched gemm", "convolution"):
        dtype = "tf32"
    peak = rates.peaks.get(dtype, rates.peaks["fp32"])
    traffic = work.bytes / (rates.bandwidth * BANDWIDTH_EFFICIENCY[work.cls])
    arithmetic = work.flops / peak / _efficiency(work, dtype, rates.num_sms) if work.flops else 0.0
    return max(arithmetic, traffic, KERNEL_FLOOR_SECONDS), arithmetic > traffic


def _efficiency(work: Work, dtype: str, num_sms: int) -> float:
    if work.cls == "convolution":
        return CONVOLUTION_EFFICIENCY[dtype] if "general" in work.key else 0.3
    if work.cls in ATTENTION_EFFICIENCY:
        head_size = work.size[-1]
        padded = next((size for size in (32, 64, 96, 128, 160, 192, 256) if size >= head_size), head_size)
        return ATTENTION_EFFICIENCY[work.cls] * head_size / padded
    batch, m, n, k = work.size if len(work.size) == 4 else (1.0, *work.size)
    return GEMM_EFFICIENCY[dtype] * filled(batch, m, n, k, num_sms) * k / (k + K_OVERHEAD)


def filled(batch: float, m: float, n: float, k: float, num_sms: int) -> float:
    """Share of the device's multiprocessors doing useful work: what tiles and whole waves of tiles leave.

    Smaller tiles are tried where large ones would leave most of the device idle, and splits of a long inner dimension.
    """
    best = 0.0
    for tile_m, tile_n, cost in ((TILE, TILE, 1.0), (TILE, TILE // 2, 0.9), (TILE // 2, TILE // 2, 0.8)):
        tiles = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        useful = batch * (m / tile_m) * (n / tile_n) / tiles
        splits = 1
        while splits <= MAX_SPLITS and k / splits >= 4 * TILE or splits == 1:
            waves = tiles * splits / num_sms
            best = max(best, cost * useful * waves / math.ceil(waves) * (1.0 if splits == 1 else 0.95))
            splits *= 2
    return best


def host_seconds(work: Work, phase: str) -> float:
    """Seconds the host needs to hand one operation to the device."""
    if work.cls == "view":
        return VIEW_HOST_SECONDS
    return HOST_SECONDS.get(phase, HOST_SECONDS["other"])

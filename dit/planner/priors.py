"""What a GPU that nobody has measured is expected to reach of its catalogue peaks, and where each number comes from.

They are rates of single kernels as published or widely reproduced, not fitted to a training run one by one. Four of
them were chosen within their published range after seeing public runs FD-L1 to FD-L5 together (see ``benchmarks/
time_public.md``): the bandwidth of elementwise, norm and reduction kernels, and convolutions in fp32.
"""

import math
from dataclasses import dataclass

from dit.planner.catalogue import Device
from dit.planner.op_class import Work, attention_flops

DISK_BYTES_PER_SECOND = 1e9  # assumption: a checkpoint file through torch.save to a local NVMe disk

# Large matrix products over the dense peak. cuBLAS on A100: 240-280 of 312 TFLOP/s in bf16 and fp16, 110-130 of 156 in
# TF32, 18-19 of 19.5 in fp32 (widely reported, no page kept). H200: 769-798 of 989 (8192 cubed, random data, measured).
GEMM_EFFICIENCY = {"fp32": 0.95, "tf32": 0.75, "fp16": 0.78, "bf16": 0.78}
TILE = 128  # rows and columns of an output tile of the usual kernels
# Filling the pipeline and writing a tile, as if the inner dimension were so much longer: more for faster arithmetic.
# These and the number of splits are assumptions.
K_OVERHEAD = {"fp32": 16, "tf32": 64, "fp16": 96, "bf16": 96}
MAX_SPLITS = 16  # cuBLAS splits a long inner dimension to fill the device

# Of the dense peak: forward, backward. FlashAttention-2 paper (arXiv 2307.08691), figures 4 to 6, A100, head sizes 64
# and 128: forward 0.5-0.7, backward 0.4-0.6; the lower end, as DiT's sequences are short. Its comparison with xformers'
# kernels, which are PyTorch's "efficient" ones: 0.30-0.35 and 0.25-0.30. cuDNN there as flash: an assumption.
ATTENTION_EFFICIENCY = {"flash": (0.50, 0.40), "efficient": (0.33, 0.27), "cudnn": (0.50, 0.40)}
# On Hopper FlashAttention-2 does not use the new matrix instructions. FlashAttention-3 paper (arXiv 2407.08608), H100,
# forward, head size 64, 512 tokens: 282 of 989 TFLOP/s, cuDNN 335. At 256 tokens and head size 128 (microsoft/
# onnxruntime pull request 21629): 230, cuDNN 228, efficient 145. Backward at 0.8 of the forward, and Blackwell as
# Hopper: assumptions.
NEWER_ATTENTION_EFFICIENCY = {"flash": (0.28, 0.23), "efficient": (0.15, 0.12), "cudnn": (0.34, 0.27)}
NEWER_GENERATIONS, CUDNN_FASTER_ABOVE_TOKENS = ("sm90", "sm100"), 256
HEAD_SIZES, EFFICIENT_HEAD_SIZES = (32, 64, 96, 128, 160, 192, 256), (32, 64, 128, 256)
# 3 x 3 convolutions of a VAE under cuDNN, over the dtype's peak. In fp32 Winograd kernels need 2.25 times fewer
# operations than are counted (Lavin & Gray, arXiv 1509.09308) and so pass the peak.
CONVOLUTION_EFFICIENCY = {"fp32": 1.3, "tf32": 0.45, "fp16": 0.45, "bf16": 0.45}
PATCH_EFFICIENCY = 0.3  # a patch embedding: a small product in disguise; it and the VAE's 0.45 are assumptions

# Bytes over the datasheet's bandwidth. A plain copy reaches 0.85-0.90 (A100 1.75 of 2.04 TB/s, H200 4.3 of 4.8 TB/s
# measured); broadcasting and mixed dtypes are not vectorised, transposing copies and column sums read with strides.
# How much that costs is an assumption for each class, the ones named above being chosen with FD-L1 to FD-L5 in view.
BANDWIDTH_EFFICIENCY = {
    "elementwise": 0.70, "copy": 0.65, "norm": 0.55, "reduction": 0.50, "indexing": 0.50, "optimizer": 0.80,
    "ema": 0.80, "gemm": 0.85, "batched gemm": 0.80, "attention forward": 0.80, "attention backward": 0.70,
    "convolution": 0.70}

KERNEL_FLOOR_SECONDS = 2.5e-6  # the shortest kernel, start to end, as profilers show it on A100 and H100
# Python, dispatcher, autograd and launch of one operation on a server CPU of 2020 or later: prior, from profiles of
# eager transformers (5-10 us per kernel, 2-3 us per view).
HOST_SECONDS = {"forward": 9e-6, "backward": 7e-6}
OTHER_HOST_SECONDS, VIEW_HOST_SECONDS = 7e-6, 2.5e-6
FSDP_HOST_SECONDS = 2e-4  # hooks, collectives and copies of FSDP2 around one block in one direction: an assumption
_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Rates:
    """A device's dense peaks per dtype (operations per second), bandwidth (bytes per second) and multiprocessors.

    ``tf32`` says whether fp32 products and convolutions run in TF32.
    """

    peaks: dict[str, float]
    bandwidth: float
    num_sms: int
    tf32: bool
    generation: str = "unknown"


def rates(device: Device, tf32: bool) -> Rates:
    """Raises ValueError where the device's peaks or bandwidth are not known."""
    if not device.memory_bandwidth or not device.peak_flops.get("fp32"):
        raise ValueError(f"{device.name}: no peaks are known, so no time can be planned; name a catalogue device")
    peaks = {dtype: peak for dtype, peak in device.peak_flops.items() if peak}
    return Rates(peaks, device.memory_bandwidth, device.num_sms or 100, tf32 and "tf32" in peaks, device.generation)


def device_seconds(work: Work, rates: Rates) -> tuple[float, bool]:
    """(seconds on the device, whether arithmetic rather than memory decides) of one operation."""
    if work.cls == "view":
        return 0.0, False
    dtype = _DTYPE.get(work.key.rsplit(" ", 1)[-1], "fp32")
    if dtype == "fp32" and rates.tf32 and work.cls in ("gemm", "batched gemm", "convolution"):
        dtype = "tf32"
    peak = rates.peaks.get(dtype, rates.peaks["fp32"])
    if dtype == "fp32" and work.cls.startswith("attention"):  # CUTLASS makes fp32 of three TF32 products
        peak = max(peak, rates.peaks.get("tf32", 0.0) / 3)
    traffic = work.bytes / (rates.bandwidth * BANDWIDTH_EFFICIENCY[work.cls])
    arithmetic = work.flops / peak / _efficiency(work, dtype, rates) if work.flops else 0.0
    return max(arithmetic, traffic, KERNEL_FLOOR_SECONDS), arithmetic > traffic


def attention_seconds(kernel: str, dtype: str, size: tuple[int, int, int], rates: Rates) -> float:
    """Seconds of one fused attention, forward and backward, of (heads x images, tokens, head size)."""
    said = next(name for name, short in _DTYPE.items() if short == dtype)
    total = 0.0
    for cls, backward in (("attention forward", False), ("attention backward", True)):
        num_tensors = 8 if backward else 4  # q, k, v, out, and their gradients
        num_bytes = num_tensors * math.prod(size) * (4 if dtype == "fp32" else 2)
        key, num_flops = f"_scaled_dot_product_{kernel}_attention {said}", attention_flops(size, backward)
        total += device_seconds(Work(key, cls, size, num_flops, num_bytes), rates)[0]
    return total


def _efficiency(work: Work, dtype: str, rates: Rates) -> float:
    if work.cls == "convolution":
        return CONVOLUTION_EFFICIENCY[dtype] if "general" in work.key else PATCH_EFFICIENCY
    if work.cls.startswith("attention"):
        kernel = next((name for name in ("efficient", "cudnn") if name in work.key), "flash")
        _, tokens, head_size = work.size
        sizes = EFFICIENT_HEAD_SIZES if kernel == "efficient" else HEAD_SIZES
        padded = next((size for size in sizes if size >= head_size), head_size)
        table = ATTENTION_EFFICIENCY
        if rates.generation in NEWER_GENERATIONS and dtype != "fp32":
            table = NEWER_ATTENTION_EFFICIENCY
            kernel = "flash" if kernel == "cudnn" and tokens <= CUDNN_FASTER_ABOVE_TOKENS else kernel
        return table[kernel][work.cls.endswith("backward")] * head_size / padded
    batch, m, n, k = work.size if len(work.size) == 4 else (1.0, *work.size)
    return GEMM_EFFICIENCY[dtype] * filled(batch, m, n, k, rates.num_sms) * k / (k + K_OVERHEAD[dtype])


def filled(batch: float, m: float, n: float, k: float, num_sms: int) -> float:
    """Share of the device's multiprocessors doing useful work: what tiles and whole waves of tiles leave.

    Smaller tiles are tried where large ones would leave most of the device idle, and splits of a long inner dimension.
    """
    best = 0.0
    for tile_m, tile_n, cost in ((TILE, TILE, 1.0), (TILE, TILE // 2, 0.9), (TILE // 2, TILE // 2, 0.8)):
        tiles = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        useful = batch * (m / tile_m) * (n / tile_n) / tiles
        splits = 1
        while splits == 1 or (splits <= MAX_SPLITS and k / splits >= 4 * TILE):
            waves = tiles * splits / num_sms
            best = max(best, cost * useful * waves / math.ceil(waves) * (1.0 if splits == 1 else 0.95))
            splits *= 2
    return best


def host_seconds(work: Work, phase: str) -> float:
    """Seconds the host needs to hand one operation to the device."""
    if work.cls == "view":
        return VIEW_HOST_SECONDS
    return HOST_SECONDS.get(phase, OTHER_HOST_SECONDS)

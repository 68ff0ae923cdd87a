"""The numbers of accelerators, links and machines, each with its source. Looked up through ``dit.planner.hardware``.

Peaks are dense ones (datasheets print sparse ones beside or instead), tensor-core where there is one, with fp32
accumulation (GeForce cards do half of their fp16 figure then). fp32 is what fp32 matrix products get without TF32.
Units: bytes, bytes per second and direction, operations per second, seconds. A datasheet is named by its title, which
is how it is found when its address moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB, GIB = 1 << 20, 1 << 30
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Generation:
    """What all devices of one architecture share.

    ``cublas_workspace_bytes``: one workspace per cuBLAS handle and stream, kept for good, inside the caching allocator.
    Each thread has its own handle, so training holds two per stream: the forward's and the autograd engine's.
    ``context_bytes``: (low, mid, high) of what the driver takes for context and loaded kernels, outside the allocator.
    """

    name: str
    has_bf16: bool
    has_flash: bool
    cublas_workspace_bytes: int
    context_bytes: tuple[int, int, int]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Link:
    """A connection between devices: bytes per second in one direction, seconds per hop, and where both come from."""

    name: str
    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class Device:
    """One accelerator as torch sees it. ``peak_flops`` has all of DTYPES; None: unsupported, or (CPU) to be calibrated.

    ``memory_bytes`` is the total the driver reports, the smallest seen where it differs; less than the label says.
    ``link`` is what collectives inside a node use by default. ``sources`` has one entry per number.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    peak_flops: Mapping[str, float | None]
    memory_bandwidth: float | None
    generation: str
    num_sms: int | None
    board_power_watts: float | None
    link: Link | None
    sources: Mapping[str, str] = field(repr=False)

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 matrix products run in hardware."""
        return GENERATIONS[self.generation].has_bf16

    @property
    def has_flash(self) -> bool:
        """Whether PyTorch's flash attention kernel runs on it."""
        return GENERATIONS[self.generation].has_flash

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes per cuBLAS handle and stream; see :class:`Generation`."""
        return GENERATIONS[self.generation].cublas_workspace_bytes

    @property
    def context_bytes(self) -> tuple[int, int, int]:
        """(low, mid, high) bytes of the driver's context; see :class:`Generation`."""
        return GENERATIONS[self.generation].context_bytes


@dataclass(frozen=True)
class Node:
    """A kind of machine: its devices, the link among them, and its network, in bytes per second of the whole node."""

    name: str
    devices_per_node: int
    link: Link
    network: Link
    source: str

    @property
    def network_bytes_per_second_per_device(self) -> float:
        """The node's network divided among its devices."""
        return self.network.bytes_per_second / self.devices_per_node


# ---- generations ----

_CUBLAS = "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: "
_CONTEXT = "prior, to be calibrated: 0.3-1.2 GiB over all generations, with lazily loaded kernels"


def _generation(name: str, bf16: bool, flash: bool, workspace: int, rule: str,
                context: tuple[int, int, int]) -> Generation:
    return Generation(name, bf16, flash, workspace, tuple(mib * MIB for mib in context),
                      {"cublas_workspace_bytes": _CUBLAS + rule, "context_bytes": _CONTEXT,
                       "has_bf16": "CUDA programming guide, compute capabilities; ROCm data type support",
                       "has_flash": "PyTorch sdp_utils.cpp: sm80 to sm121; on ROCm AOTriton's gfx90a and gfx942"})


_PAIR, _EIGHT = ":4096:2:16:8 = 8.125 MiB", ":4096:8 = 32 MiB on Hopper and data-centre Blackwell"
GENERATIONS: dict[str, Generation] = {generation.name: generation for generation in (
    _generation("sm70", False, False, 8320 << 10, _PAIR, (300, 420, 700)),
    _generation("sm75", False, False, 8320 << 10, _PAIR, (300, 400, 700)),
    _generation("sm80", True, True, 8320 << 10, _PAIR, (380, 500, 900)),
    _generation("sm86", True, True, 8320 << 10, _PAIR, (300, 420, 800)),
    _generation("sm89", True, True, 8320 << 10, _PAIR, (330, 450, 850)),
    _generation("sm90", True, True, 32 * MIB, _EIGHT, (450, 600, 1100)),
    _generation("sm100", True, True, 32 * MIB, _EIGHT, (500, 700, 1230)),
    _generation("sm120", True, True, 8320 << 10, _PAIR, (400, 550, 1000)),
    _generation("gfx90a", True, True, 32 * MIB, "32 MiB by default on ROCm", (300, 600, 1230)),
    _generation("gfx942", True, True, 128 * MIB, "128 MiB on gfx94x", (300, 700, 1230)),
    _generation("unknown", True, True, 32 * MIB, "the largest of the CUDA generations, as the device is unknown",
                (300, 600, 1230)),
    _generation("cpu", True, True, 0, "none on a CPU", (0, 0, 0)),
)}

# ---- links ----

_NCCL = "; latency: NCCL src/graph/tuning.cc, hwLat of Ring/Simple"


def _link(name: str, gigabytes: float, microseconds: float, source: str) -> Link:
    return Link(name, gigabytes * 1e9, microseconds * 1e-6, source + _NCCL)


_PCIE_SOURCE = "PCI Express base specification: 16 lanes at 8, 16 or 32 GT/s with 128b/130b coding"
PCIE3 = _link("PCIe 3.0 x16", 15.75, 5.7, _PCIE_SOURCE)
PCIE4 = _link("PCIe 4.0 x16", 31.5, 5.7, _PCIE_SOURCE)
PCIE5 = _link("PCIe 5.0 x16", 63.0, 5.7, _PCIE_SOURCE)
NVLINK2 = _link("NVLink 2", 150, 3.4, "Tesla V100 datasheet: 300 GB/s in both directions together")
NVLINK3 = _link("NVLink 3", 300, 3.4, "A100 datasheet: 600 GB/s in both directions together")
NVLINK4 = _link("NVLink 4", 450, 3.4, "H100 datasheet: 900 GB/s in both directions together")
NVLINK5 = _link("NVLink 5", 900, 3.4, "Blackwell architecture technical brief: 1.8 TB/s in both directions together")
XGMI2 = _link("Infinity Fabric", 50, 5.7, "Instinct MI250 data sheet: links of 100 GB/s in both directions, one used")
XGMI3 = _link("Infinity Fabric 3", 448, 5.7, "Instinct MI300X data sheet: 7 links of 128 GB/s in both directions")

# ---- devices ----

_SEEN = "total capacity in torch's out-of-memory message, "
_COMMON = "as commonly reported by drivers; no public thread kept as evidence"
_V100 = "NVIDIA V100 datasheet"
_T4 = "NVIDIA T4 datasheet; Turing architecture white paper"
_A10 = "NVIDIA A10 datasheet"
_A100 = ("NVIDIA A100 datasheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
         "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf")
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper, appendix A (FP32 accumulate)"
_ADA = "NVIDIA Ada GPU architecture white paper v2, appendix A (FP32 accumulate)"
_RTX50 = "NVIDIA RTX Blackwell GPU architecture white paper, appendix A (FP32 accumulate)"
_L4, _L40S = "NVIDIA L4 datasheet (halved: it prints sparse peaks)", "NVIDIA L40S datasheet"
_H100 = "NVIDIA H100 datasheet and Hopper architecture white paper (datasheet halved: it prints sparse peaks)"
_H200 = "NVIDIA H200 datasheet (halved: it prints sparse peaks)"
_B200 = "NVIDIA HGX B200 and DGX B200 datasheets, per GPU (halved: they print sparse peaks)"
_GB200 = "NVIDIA GB200 NVL72 datasheet, per GPU (halved: it prints sparse peaks)"
_MI250 = "AMD Instinct MI250 data sheet, half of the card: torch sees its two dies as two devices"
_MI300 = "AMD Instinct MI300X data sheet"


def _device(name: str, aliases: str, generation: str, gib: float, seen: str, tflops: tuple, gigabytes: float,
            watts: float, sms: int, link: Link, source: str) -> Device:
    """A row: memory in GiB, peaks in TFLOP/s in the order of DTYPES (None: unsupported), bandwidth in GB/s."""
    peaks = {dtype: None if peak is None else peak * 1e12 for dtype, peak in zip(DTYPES, tflops, strict=True)}
    numbers = ("peak_flops", "memory_bandwidth", "board_power_watts", "num_sms")
    sources = {"memory_bytes": seen, "link": link.source} | dict.fromkeys(numbers, source)
    return Device(name, tuple(aliases.split()), round(gib * GIB), peaks, gigabytes * 1e9, generation, sms, watts, link,
                  sources)


_NO = None
CATALOGUE: tuple[Device, ...] = (
    _device("Tesla V100-SXM2-16GB", "V100-16GB V100-16 V100-SXM2-16", "sm70", 15.75, _COMMON,
            (15.7, _NO, 125, _NO, _NO), 900, 300, 80, NVLINK2, _V100),
    _device("Tesla V100-SXM2-32GB", "V100 V100-32GB V100-32 V100-SXM2", "sm70", 31.74,
            _SEEN + "liucongg/ChatGLM-Finetuning#73", (15.7, _NO, 125, _NO, _NO), 900, 300, 80, NVLINK2, _V100),
    _device("Tesla V100-PCIE-16GB", "V100-PCIe-16", "sm70", 15.75, _COMMON,
            (14, _NO, 112, _NO, _NO), 900, 250, 80, PCIE3, _V100),
    _device("Tesla V100-PCIE-32GB", "V100-PCIe V100-PCIe-32", "sm70", 31.74, _COMMON,
            (14, _NO, 112, _NO, _NO), 900, 250, 80, PCIE3, _V100),
    _device("Tesla T4", "T4", "sm75", 14.56, _COMMON + "; 14.75 GiB with older drivers, hpcaitech/Open-Sora#697",
            (8.1, _NO, 65, _NO, _NO), 320, 70, 40, PCIE3, _T4),
    _device("NVIDIA A10", "A10-24GB", "sm86", 21.99, _SEEN + "zai-org/CogVLM#236",
            (31.2, 62.5, 125, 125, _NO), 600, 150, 72, PCIE4, _A10),
    _device("NVIDIA A100-SXM4-40GB", "A100-40GB A100-40 A100-SXM-40GB", "sm80", 39.49,
            "deviceQuery in the PC2 cluster's documentation: 42405855232 bytes",
            (19.5, 156, 312, 312, _NO), 1555, 400, 108, NVLINK3, _A100),
    _device("NVIDIA A100-SXM4-80GB", "A100 A100-80GB A100-80 A100-SXM A100-SXM4 A100-SXM-80GB", "sm80", 79.15,
            _COMMON + "; 79.20 GiB in chuanyangjin/fast-DiT's logs",
            (19.5, 156, 312, 312, _NO), 2039, 400, 108, NVLINK3, _A100),
    _device("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe A100-PCIe-40", "sm80", 39.39, _COMMON,
            (19.5, 156, 312, 312, _NO), 1555, 250, 108, PCIE4, _A100),
    _device("NVIDIA A100 80GB PCIe", "A100-PCIe A100-PCIe-80GB", "sm80", 79.15, _COMMON,
            (19.5, 156, 312, 312, _NO), 1935, 300, 108, PCIE4, _A100),
    _device("NVIDIA GeForce RTX 3090", "3090 RTX-3090", "sm86", 23.68, _COMMON,
            (35.6, 35.6, 71, 71, _NO), 936.2, 350, 82, PCIE4, _GA102),
    _device("NVIDIA GeForce RTX 4090", "4090 RTX-4090", "sm89", 23.52, _SEEN + "Soul-AILab/SoulX-FlashTalk#5",
            (82.6, 82.6, 165.2, 165.2, 330.3), 1008, 450, 128, PCIE4, _ADA),
    _device("NVIDIA GeForce RTX 5090", "5090 RTX-5090", "sm120", 31.36,
            _SEEN + "TrajectoryCrafter/TrajectoryCrafter#20",
            (104.8, 104.8, 209.5, 209.5, 419), 1792, 575, 170, PCIE5, _RTX50),
    _device("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada 6000-Ada", "sm89", 44.43,
            _SEEN + "DINGYANB/MTVCrafter#21 (ECC on; about 47.5 with ECC off)",
            (91.1, 182.1, 364.2, 364.2, 728.5), 960, 300, 142, PCIE4, _ADA),
    _device("NVIDIA L4", "L4-24GB", "sm89", 21.95, _COMMON, (30.3, 60, 121, 121, 242.5), 300, 72, 58, PCIE4, _L4),
    _device("NVIDIA L40S", "L40S-48GB", "sm89", 44.39,
            "46068 MiB in nvidia-smi, modal-labs/modal-client#2797; as the L40 of QwenLM/Qwen3-VL#2097 (44.40)",
            (91.6, 183, 362.05, 362.05, 733), 864, 350, 142, PCIE4, _L40S),
    _device("NVIDIA H100 80GB HBM3", "H100 H100-80GB H100-SXM H100-SXM5 H100-SXM5-80GB", "sm90", 79.10,
            _COMMON + "; 79.11 GiB in vllm-project/vllm#27508",
            (67, 494.5, 989.4, 989.4, 1978.9), 3350, 700, 132, NVLINK4, _H100),
    _device("NVIDIA H100 PCIe", "H100-PCIe-80GB", "sm90", 79.10, _COMMON,
            (51, 378, 756, 756, 1513), 2000, 350, 114, PCIE5, _H100),
    _device("NVIDIA H100 NVL", "H100-NVL-94GB", "sm90", 93.00, _SEEN + "ali-vilab/VACE#56",
            (60, 417.5, 835, 835, 1670), 3900, 400, 132, PCIE5, _H100),
    _device("NVIDIA H200", "H200-SXM H200-141GB", "sm90", 139.72, _COMMON,
            (67, 494.5, 989.4, 989.4, 1978.9), 4800, 700, 132, NVLINK4, _H200),
    _device("NVIDIA B200", "B200-SXM B200-180GB", "sm100", 178.35, _COMMON,
            (75, 1125, 2250, 2250, 4500), 7700, 1000, 148, NVLINK5, _B200),
    _device("NVIDIA GB200", "GB200-NVL72", "sm100", 183.5, _COMMON + "; the datasheet says 186 GB per GPU",
            (80, 1250, 2500, 2500, 5000), 8000, 1200, 152, NVLINK5, _GB200),
    _device("AMD Instinct MI250", "MI250 MI250X/MI250", "gfx90a", 63.98, _COMMON + " for one die",
            (45.3, _NO, 181, 181, _NO), 1638.4, 280, 104, XGMI2, _MI250),
    _device("AMD Instinct MI300X", "MI300X-OAM", "gfx942", 191.69, _COMMON,
            (163.4, 653.7, 1307.4, 1307.4, 2614.9), 5300, 750, 304, XGMI3, _MI300),
)


# ---- nodes ----

_NIC = "; latency: NCCL src/graph/tuning.cc, hwLat of Ring/Simple over a network"


def _node(name: str, devices: int, link: Link, network: str, gigabytes: float, source: str) -> Node:
    return Node(name, devices, link, Link(network, gigabytes * 1e9, 14e-6, source + _NIC), source)


NODES: dict[str, Node] = {node.name: node for node in (
    _node("dgx-1", 8, NVLINK2, "4 x 100 Gb/s InfiniBand", 50, "NVIDIA DGX-1 datasheet"),
    _node("hgx-a100", 8, NVLINK3, "8 x 200 Gb/s InfiniBand", 200, "NVIDIA DGX A100 datasheet"),
    _node("hgx-h100", 8, NVLINK4, "8 x 400 Gb/s InfiniBand", 400, "NVIDIA DGX H100 datasheet"),
    _node("hgx-h200", 8, NVLINK4, "8 x 400 Gb/s InfiniBand", 400, "NVIDIA DGX H200 datasheet"),
    _node("hgx-b200", 8, NVLINK5, "8 x 400 Gb/s InfiniBand", 400, "NVIDIA DGX B200 datasheet"),
    _node("gb200-nvl72", 72, NVLINK5, "72 x 400 Gb/s InfiniBand", 3600, "NVIDIA DGX GB200 datasheet"),
    _node("mi300x-platform", 8, XGMI3, "8 x 400 Gb/s", 400, "prior: one 400 Gb/s adapter per device, the usual design"),
    _node("mi250-node", 8, XGMI2, "4 x 200 Gb/s", 100, "prior: one 200 Gb/s adapter per card of two dies"),
    _node("pcie3-box", 8, PCIE3, "25 Gb/s Ethernet", 3.125, "prior: a plain server with one adapter"),
    _node("pcie4-box", 8, PCIE4, "100 Gb/s Ethernet", 12.5, "prior: a plain server with one adapter"),
    _node("pcie5-box", 8, PCIE5, "200 Gb/s Ethernet", 25, "prior: a plain server with one adapter"),
)}

# The kind of machine a device usually sits in: by its name where that says more than its link.
USUAL_NODE: dict[str, str] = {
    "NVIDIA H200": "hgx-h200", "NVIDIA GB200": "gb200-nvl72", NVLINK2.name: "dgx-1", NVLINK3.name: "hgx-a100",
    NVLINK4.name: "hgx-h100", NVLINK5.name: "hgx-b200", XGMI2.name: "mi250-node", XGMI3.name: "mi300x-platform",
    PCIE3.name: "pcie3-box", PCIE4.name: "pcie4-box", PCIE5.name: "pcie5-box"}

"""The catalogue's integrity, the look-up by any name people have for a device, sizes, nodes and attention kernels."""

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit.config import UsageError
from dit.planner.catalogue import DTYPES, _device
from dit.planner.hardware import (
    CATALOGUE,
    GENERATIONS,
    NODES,
    attention_kernel,
    cpu_device,
    custom_device,
    default_node,
    find_device,
    find_node,
    parse_bytes,
)

GIB = 1 << 30
DRIVER_NAMES = {  # what torch.cuda.get_device_name() says -> the label's GB, which no driver reports in full
    "Tesla V100-SXM2-16GB": 16, "Tesla V100-SXM2-32GB": 32, "Tesla V100-PCIE-16GB": 16, "Tesla T4": 16,
    "NVIDIA A10": 24, "NVIDIA A100-SXM4-40GB": 40, "NVIDIA A100-SXM4-80GB": 80, "NVIDIA A100-PCIE-40GB": 40,
    "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA GeForce RTX 3090": 24, "NVIDIA GeForce RTX 4090": 24, "NVIDIA GeForce RTX 5090": 32,
    "NVIDIA RTX 6000 Ada Generation": 48, "NVIDIA L4": 24, "NVIDIA L40S": 48, "NVIDIA H100 80GB HBM3": 80,
    "NVIDIA H100 PCIe": 80, "NVIDIA H100 NVL": 94, "NVIDIA H200": 141, "NVIDIA B200": 180, "NVIDIA GB200": 186,
    "AMD Instinct MI250": 64, "AMD Instinct MI300X": 192,
}
BF16_TFLOPS = {  # ../shared facts: the dense peaks that catalogues get wrong
    "A100": 312, "H100-SXM": 989, "H100-PCIe": 756, "H100-NVL": 835, "H200": 989, "B200": 2250, "L40S": 362,
    "RTX-4090": 165, "RTX-3090": 71,
}


def one_line(error):
    return "\n" not in str(error.value)


# ---- the numbers ----


@pytest.mark.parametrize("device", CATALOGUE, ids=lambda device: device.name)
def test_every_number_is_there_plausible_and_sourced(device):
    assert set(device.peak_flops) == set(DTYPES)
    assert device.generation in GENERATIONS
    for number in ("memory_bytes", "peak_flops", "memory_bandwidth", "board_power_watts", "num_sms", "link"):
        assert getattr(device, number), number
        assert len(device.sources[number]) > 10, number
    assert 10 * GIB < device.memory_bytes < 200 * GIB
    assert 2e11 < device.memory_bandwidth < 1e13
    assert 50 < device.board_power_watts <= 1200
    assert GENERATIONS[device.generation].sources.keys() >= {"cublas_workspace_bytes", "context_bytes", "has_bf16"}


@pytest.mark.parametrize("device", CATALOGUE, ids=lambda device: device.name)
def test_peaks_are_dense_and_in_proportion(device):
    peaks = device.peak_flops
    assert peaks["fp16"] and peaks["fp32"] <= peaks["fp16"]
    assert (peaks["bf16"] is not None) == device.has_bf16
    assert peaks["bf16"] in (None, peaks["fp16"])
    if peaks["tf32"]:
        assert peaks["fp32"] <= peaks["tf32"] <= peaks["fp16"] * 0.51  # tensor cores halve from fp16 to TF32
    if peaks["fp8"]:
        assert 1.95 < peaks["fp8"] / peaks["fp16"] < 2.05  # a sparse figure beside a dense one would show here


@pytest.mark.parametrize(("name", "tflops"), BF16_TFLOPS.items())
def test_dense_bf16_peaks(name, tflops):
    assert find_device(name).peak_flops["bf16"] / 1e12 == pytest.approx(tflops, abs=0.6)


def test_bandwidths_that_tables_confuse():
    assert find_device("L4").memory_bandwidth == 300e9
    assert find_device("A100-40GB").memory_bandwidth == 1555e9
    assert find_device("A100-80GB").memory_bandwidth == 2039e9
    assert find_device("A100-PCIe").memory_bandwidth == 1935e9


@pytest.mark.parametrize(("name", "label_gb"), DRIVER_NAMES.items())
def test_driver_names_and_their_memory(name, label_gb):
    device = find_device(name)
    assert device.name == name
    # GDDR and HBM labels are GiB or GB; what the driver leaves of them is 85 to 100 per cent of the label in GiB
    assert 0.85 * label_gb * GIB < device.memory_bytes <= label_gb * GIB


def test_generation_facts():
    assert find_device("A100").cublas_workspace_bytes == 8320 * 1024
    assert find_device("H100").cublas_workspace_bytes == find_device("B200").cublas_workspace_bytes == 32 << 20
    assert not find_device("V100").has_bf16 and not find_device("T4").has_flash
    assert find_device("3090").has_bf16 and find_device("3090").has_flash
    for generation in GENERATIONS.values():
        low, mid, high = generation.context_bytes
        assert low <= mid <= high <= 1.21 * GIB
        assert generation.name == "cpu" or low >= 0.29 * GIB
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_device("A100").memory_bytes = 1


# ---- look-up ----


@pytest.mark.parametrize(("alias", "name"), [
    ("A100", "NVIDIA A100-SXM4-80GB"), ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
    ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
    ("H100", "NVIDIA H100 80GB HBM3"), ("h100-sxm", "NVIDIA H100 80GB HBM3"), ("RTX-4090", "NVIDIA GeForce RTX 4090"),
    ("4090", "NVIDIA GeForce RTX 4090"), ("rtx 4090", "NVIDIA GeForce RTX 4090"), ("MI300X", "AMD Instinct MI300X"),
    ("V100", "Tesla V100-SXM2-32GB"), ("nvidia t4", "Tesla T4"), ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
    ("GB200", "NVIDIA GB200"), ("AMD Instinct MI250X / MI250", "AMD Instinct MI250"),
])
def test_short_names(alias, name):
    assert find_device(alias).name == name


def test_no_alias_means_two_devices():
    seen = {}
    for device in CATALOGUE:
        for alias in (device.name, *device.aliases):
            assert find_device(alias) is device
            assert seen.setdefault(alias.lower(), device) is device


@pytest.mark.parametrize(("unknown", "near"), [
    ("H100-SMX", "H100"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090"), ("NVIDIA H200 NVL", "H200"),
    ("TPU v5", ""),
])
def test_unknown_is_said_to_be_unknown_in_one_line(unknown, near):
    with pytest.raises(UsageError, match="unknown") as error:
        find_device(unknown)
    assert one_line(error) and "--device-memory 24GiB" in str(error.value)
    assert unknown in str(error.value) and near in str(error.value)


def test_this_cpu_is_measured_not_invented():
    cpu = find_device("CPU")
    assert cpu == cpu_device()
    assert cpu.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > GIB // 4
    assert 1 <= cpu.num_sms <= os.cpu_count()
    assert set(cpu.peak_flops.values()) == {None} and cpu.memory_bandwidth is None and cpu.link is None
    assert cpu.context_bytes == (0, 0, 0)


def test_custom_device():
    device = custom_device(24 * GIB)
    assert device.memory_bytes == 24 * GIB
    assert set(device.peak_flops) == set(DTYPES) and set(device.peak_flops.values()) == {None}
    assert device.context_bytes == (min(g.context_bytes[0] for g in GENERATIONS.values() if g.name != "cpu"),
                                    GENERATIONS["unknown"].context_bytes[1],
                                    max(g.context_bytes[2] for g in GENERATIONS.values()))
    faster = custom_device(24 * GIB, name="mine", generation="sm89", peak_flops={"bf16": 1e14}, memory_bandwidth=1e12)
    assert (faster.peak_flops["bf16"], faster.peak_flops["fp8"], faster.name) == (1e14, None, "mine")
    for bad in (dict(memory_bytes=24), dict(memory_bytes=24 * GIB, generation="sm1")):
        with pytest.raises(UsageError) as error:
            custom_device(**bad)
        assert one_line(error)


# ---- sizes ----


@pytest.mark.parametrize(("text", "size"), [
    ("24GiB", 24 * GIB), ("24 gib", 24 * GIB), ("24GB", 24 * 10**9), ("80e9", 80 * 10**9), ("1.5TiB", 3 * (1 << 39)),
    ("512MiB", 1 << 29), ("7KB", 7000), (" 100 ", 100), ("100B", 100), (2**33, 2**33),
])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "-1GiB", "24G", "24Gb/s", "many", "1.2.3GiB", "nan", "inf", "1e400", "0.1"])
def test_nonsense_sizes_are_refused_in_one_line(text):
    with pytest.raises(UsageError, match="--memory") as error:
        parse_bytes(text, flag="--memory")
    assert one_line(error) and "24GiB" in str(error.value)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_usage_error(text):
    try:
        assert parse_bytes(text) >= 1
    except UsageError as error:
        assert "--device-memory" in str(error)


# ---- nodes ----


@pytest.mark.parametrize("device", CATALOGUE, ids=lambda device: device.name)
def test_every_device_has_a_usual_node_with_its_own_link(device):
    node = default_node(device)
    assert node.link == device.link
    assert node is NODES[node.name]


def test_nodes():
    assert default_node(find_device("A100")) is find_node("HGX-A100")
    assert default_node(find_device("H200")).name == "hgx-h200"
    assert default_node(find_device("GB200")).devices_per_node == 72
    assert default_node(find_device("4090")).name == "pcie4-box"
    assert default_node(custom_device(GIB)) is None
    assert find_node("hgx-h100").network_bytes_per_second_per_device == 50e9  # 400 Gb/s
    assert find_node("hgx-a100").link.bytes_per_second == 300e9  # one direction
    for node in NODES.values():
        assert node.link.bytes_per_second > node.network_bytes_per_second_per_device
        assert 1e-6 < node.link.latency_seconds < node.network.latency_seconds < 1e-4
        assert node.source and node.link.source and node.network.source
    with pytest.raises(UsageError, match="hgx-a100") as error:
        find_node("cluster")
    assert one_line(error)


# ---- attention ----


@pytest.mark.parametrize(("device", "dtype", "head_dim", "kernel"), [
    ("A100", "bf16", 72, "flash"), ("A100", "fp16", 64, "flash"), ("A100", "fp32", 72, "efficient"),
    ("H200", "bf16", 72, "flash"), ("4090", "fp32", 64, "efficient"), ("V100", "fp16", 64, "efficient"),
    ("T4", "fp16", 72, "efficient"), ("T4", "fp32", 63, "efficient"), ("T4", "fp16", 63, "math"),
    ("A100", "fp32", 66, "math"), ("A100", "bf16", 300, "math"), ("A100", "bf16", 512, "efficient"),
    ("4090", "bf16", 200, "efficient"), ("A100", "bf16", 200, "flash"), ("MI300X", "bf16", 64, "flash"),
    ("cpu", "fp32", 64, "flash"),
])
def test_attention_kernel_of_a_generation(device, dtype, head_dim, kernel):
    assert attention_kernel(find_device(device), dtype, head_dim) == kernel


def test_cudnn_comes_first_only_where_pytorch_puts_it():
    assert attention_kernel(find_device("H100"), "bf16", 72, cudnn_first=True) == "cudnn"
    assert attention_kernel(find_device("A100"), "bf16", 72, cudnn_first=True) == "flash"
    assert attention_kernel(find_device("H100"), "fp32", 72, cudnn_first=True) == "efficient"
    assert attention_kernel(find_device("H100"), "bf16", 136, cudnn_first=True) == "flash"


@pytest.mark.parametrize(("device", "dtype", "head_dim", "requested", "says"), [
    ("A100", "fp32", 64, "flash", "--amp"), ("V100", "fp16", 64, "flash", "8.0"),
    ("T4", "bf16", 64, "efficient", "bf16"), ("A100", "bf16", 260, "flash", "256"),
    ("A100", "bf16", 136, "cudnn", "128"), ("cpu", "fp32", 64, "efficient", "CPU"),
    ("A100", "bf16", 66, "efficient", "multiple of 8"), ("MI250", "bf16", 64, "cudnn", "ROCm"),
    ("A100", "bf16", 64, "fast", "auto, flash"),
])
def test_a_kernel_that_cannot_run_is_refused_in_one_line(device, dtype, head_dim, requested, says):
    with pytest.raises(UsageError, match="--attention " + requested) as error:
        attention_kernel(find_device(device), dtype, head_dim, requested)
    assert one_line(error) and says in str(error.value)


def test_a_kernel_that_can_run_is_taken():
    for kernel in ("flash", "efficient", "cudnn", "math"):
        assert attention_kernel(find_device("A100"), "bf16", 64, kernel) == kernel


def test_a_row_with_a_missing_peak_is_refused():
    with pytest.raises(ValueError):
        _device("x", "", "sm80", 1, "", (1, 2, 3, 4), 1, 1, 1, find_device("A100").link, "")

"""What devices exchange in a step, how long that takes, and how much of it the backward hides. Needs no torch.

Closed forms: an all-reduce of B bytes over n devices moves 2 (n-1)/n B per device on a ring in 2 (n-1) hops; a gather
or a scatter (n-1)/n B in n-1 hops (Thakur, Rabenseifner, Gropp 2005); a double binary tree needs 2 log2(n) hops at the
ring's bandwidth (NCCL 2.4). Sources of bandwidths and latencies: the catalogue's links.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dit.config import ModelShape, TrainConfig
from dit.planner import flops
from dit.planner.calibration import Calibration
from dit.planner.catalogue import Device, Link, Node

MIB = 1 << 20
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB  # torch.nn.parallel.DistributedDataParallel's defaults
# Bus bandwidth of nccl-tests over the link's datasheet figure, large messages: 230 of 300 and 360 of 450 GB/s.
LINK_EFFICIENCY = 0.75
# Over PCIe traffic passes the host's bridges, on GeForce cards its memory: 6-12 of 31.5 GB/s with 4 to 8 devices.
PCIE_EFFICIENCY = 0.35
NETWORK_EFFICIENCY = 0.80  # of the adapters' rate
# Gloo between two processes on one machine: loopback sockets, no overlap with arithmetic on the same cores.
# Prior, where scripts/calibrate.py --threads 1 has not measured it.
GLOO_BYTES_PER_SECOND, GLOO_LATENCY_SECONDS = 1.0e9, 1.5e-4


@dataclass(frozen=True)
class Exchange:
    """Bytes each device sends per step, seconds it takes, and seconds that nothing hides."""

    bytes_sent: float
    seconds: float
    exposed_seconds: float


NOTHING = Exchange(0.0, 0.0, 0.0)


def all_reduce_bytes(num_bytes: float, num_devices: int) -> float:
    """Bytes each device sends in a ring all-reduce."""
    return 2 * (num_devices - 1) / num_devices * num_bytes


def gather_bytes(num_bytes: float, num_devices: int) -> float:
    """Bytes each device sends in a ring all-gather of ``num_bytes`` in all, or in a reduce-scatter of them."""
    return (num_devices - 1) / num_devices * num_bytes


def gradient_bytes(shape: ModelShape) -> int:
    """Bytes that DDP reduces per step: fp32 gradients of the trained parameters."""
    return 4 * flops.trainable_parameters(shape)


def ddp_bytes(shape: ModelShape, num_devices: int) -> float:
    """Bytes each device sends per step under DDP, whatever the accumulation."""
    return all_reduce_bytes(gradient_bytes(shape), num_devices)


def fsdp_bytes(shape: ModelShape, num_devices: int, accumulation: int = 1, *, parameter_bytes: int = 4,
               reshards: bool = True) -> float:
    """Bytes each device sends per step under FSDP: parameters are gathered for the forward, and for the backward too if
    ``reshards``, and gradients are scattered, in every micro-step.
    """
    parameters = flops.trainable_parameters(shape)
    gathers = gather_bytes(parameter_bytes * parameters, num_devices) * (2 if reshards else 1)
    return accumulation * (gathers + gather_bytes(4 * parameters, num_devices))


def buckets(shape: ModelShape) -> list[int]:
    """Bytes of DDP's gradient buckets in the order in which they become ready."""
    left = gradient_bytes(shape)
    sizes = [min(FIRST_BUCKET_BYTES, left)]
    left -= sizes[0]
    sizes += [BUCKET_BYTES] * (left // BUCKET_BYTES)
    return sizes + ([left % BUCKET_BYTES] if left % BUCKET_BYTES else [])


def all_reduce_seconds(num_bytes: float, num_devices: int, link: Link, node: Node | None = None) -> float:
    """Seconds of one all-reduce: a ring or a tree inside a node, whichever is faster; across nodes the slower of a
    node's links and its share of the network.
    """
    per_node = node.devices_per_node if node else num_devices
    inside, nodes = min(num_devices, per_node), math.ceil(num_devices / per_node)
    rate = link.bytes_per_second * (PCIE_EFFICIENCY if link.name.startswith("PCIe") else LINK_EFFICIENCY)
    hop = link.latency_seconds
    if nodes == 1:
        ring = all_reduce_bytes(num_bytes, num_devices) / rate + 2 * (num_devices - 1) * hop
        tree = all_reduce_bytes(num_bytes, num_devices) / rate + 2 * math.ceil(math.log2(num_devices)) * hop
        return min(ring, tree)
    network = node.network
    rate = min(rate, network.bytes_per_second * NETWORK_EFFICIENCY)
    hops = 2 * (inside - 1) * hop + 2 * math.ceil(math.log2(nodes)) * network.latency_seconds
    return all_reduce_bytes(num_bytes, num_devices) / rate + hops


def overlapped(sizes: Sequence[float], seconds: Sequence[float], backward_seconds: float) -> float:
    """Seconds after the end of the backward until the last bucket is reduced.

    Bucket i can start when the backward has made its gradients, taken to grow evenly, and when the bucket before it is
    done.
    """
    total, ready, finished = sum(sizes), 0.0, 0.0
    for size, cost in zip(sizes, seconds, strict=True):
        ready += size
        finished = max(finished, backward_seconds * ready / total) + cost
    return max(0.0, finished - backward_seconds)


def plan_ddp(config: TrainConfig, device: Device, num_devices: int, node: Node | None, *, backward_seconds: float,
             calibration: Calibration) -> Exchange:
    """DDP's exchange: one all-reduce per bucket in the last micro-step's backward, which lasts ``backward_seconds``."""
    if num_devices == 1:
        return NOTHING
    shape = config.shape
    sizes = buckets(shape)
    sent = ddp_bytes(shape, num_devices)
    if device.generation == "cpu":
        rate = calibration.data.get("gloo_bytes_per_second", GLOO_BYTES_PER_SECOND)
        latency = calibration.data.get("gloo_latency_seconds", GLOO_LATENCY_SECONDS)
        total = sent / rate + len(sizes) * latency * 2 * (num_devices - 1)
        return Exchange(sent, total, total)
    link = device.link or _slowest(node)
    costs = [all_reduce_seconds(size, num_devices, link, node) for size in sizes]
    return Exchange(sent, sum(costs), overlapped(sizes, costs, backward_seconds))


def _slowest(node: Node | None) -> Link:
    from dit.planner.catalogue import PCIE3
    return node.link if node else PCIE3

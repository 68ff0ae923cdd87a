"""What devices exchange in a step, how long that takes, and how much of it the backward hides. Needs no torch.

Closed forms: an all-reduce of B bytes over n devices moves 2 (n-1)/n B per device on a ring in 2 (n-1) hops; a gather
or a scatter (n-1)/n B in n-1 hops (Thakur, Rabenseifner, Gropp 2005); a double binary tree needs 2 log2(n) hops at the
ring's bandwidth (NCCL 2.4). Sources of bandwidths and latencies: the catalogue's links.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dit.config import ModelShape, TrainConfig, UsageError
from dit.planner import flops
from dit.planner.calibration import Calibration
from dit.planner.catalogue import PCIE3, Device, Link, Node

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
    """Bytes each device sends per step, seconds it takes, and seconds that nothing hides, in the forward and in all."""

    bytes_sent: float
    seconds: float
    exposed_seconds: float
    exposed_forward_seconds: float = 0.0


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


def shard_size(config: TrainConfig, num_devices: int) -> int:
    """Devices that hold one model between them: 1 under DDP. Raises UsageError where groups do not come out even."""
    return _group_size(config, config.data_ranks(num_devices)) if config.memory.parallel == "fsdp" else 1


def _group_size(config: TrainConfig, data_ranks: int) -> int:
    size = config.memory.shard_size or data_ranks
    if data_ranks % size:
        raise UsageError(f"--shard-size {size} does not divide the {data_ranks} devices")
    return size


def fsdp_bytes(shape: ModelShape, num_devices: int, accumulation: int = 1, *, weight_bytes: int = 4,
               shard_size: int = 0) -> float:
    """Bytes each device sends per step under FSDP as ``dit.sharding`` sets it up, in groups of ``shard_size`` (0: all).

    In every micro-step a block's weights are gathered for its forward and again for its backward, in ``weight_bytes``
    each, and what lies outside of blocks once, in fp32. Gradients are scattered in fp32 in the last micro-step, and
    the parts are then all-reduced among groups.
    """
    size = shard_size or num_devices
    block, others = flops.block_parameters(shape)
    gathered = 2 * shape.depth * block * weight_bytes + 4 * others
    reduced = gradient_bytes(shape)
    inside = accumulation * gather_bytes(gathered, size) + gather_bytes(reduced, size)
    return inside + all_reduce_bytes(reduced / size, num_devices // size)


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
    inside, nodes = _spread(num_devices, node)
    hop = link.latency_seconds
    if nodes == 1:  # a ring of n has 2 (n-1) hops, a tree of more than two fewer
        hops = min(2 * (num_devices - 1), 2 * math.ceil(math.log2(num_devices))) * hop
    else:
        hops = 2 * (inside - 1) * hop + 2 * math.ceil(math.log2(nodes)) * node.network.latency_seconds
    return all_reduce_bytes(num_bytes, num_devices) / _rate(link, node, nodes) + hops


def gather_seconds(num_bytes: float, num_devices: int, link: Link, node: Node | None = None) -> float:
    """Seconds of a ring all-gather of ``num_bytes`` in all, or of a reduce-scatter of them; NCCL has no tree for these.
    """
    inside, nodes = _spread(num_devices, node)
    hops = (num_devices - nodes) * link.latency_seconds
    if nodes > 1:  # as NCCL counts them (src/graph/tuning.cc): one hop per node goes over the network
        hops += (nodes - 1) * node.network.latency_seconds
    return gather_bytes(num_bytes, num_devices) / _rate(link, node, nodes) + hops


def copies_seconds(num_bytes: float, num_devices: int, size: int, link: Link, node: Node | None = None) -> float:
    """Seconds of the all-reduce of a shard of ``num_bytes`` among the groups of ``size`` devices that hold copies.

    Every device of a group does its own at once, so those of one node share the network.
    """
    copies = num_devices // size
    if copies == 1:
        return 0.0
    per_node = node.devices_per_node if node else num_devices
    together = max(1, per_node // size)  # copies that lie in one node
    nodes = math.ceil(copies / together)
    rate, hop = _rate(link, node, 1), link.latency_seconds
    if nodes > 1:
        share = node.network.bytes_per_second * NETWORK_EFFICIENCY / min(size, per_node)
        rate, hop = min(rate, share), node.network.latency_seconds
    return all_reduce_bytes(num_bytes, copies) / rate + 2 * math.ceil(math.log2(copies)) * hop


def _spread(num_devices: int, node: Node | None) -> tuple[int, int]:
    """(devices in a node, nodes)."""
    per_node = node.devices_per_node if node else num_devices
    return min(num_devices, per_node), math.ceil(num_devices / per_node)


def _rate(link: Link, node: Node | None, nodes: int) -> float:
    """Bytes per second of a collective: of the link, across nodes of the slower of it and the network."""
    rate = link.bytes_per_second * (PCIE_EFFICIENCY if link.name.startswith("PCIe") else LINK_EFFICIENCY)
    return min(rate, node.network.bytes_per_second * NETWORK_EFFICIENCY) if nodes > 1 else rate


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


def plan_exchange(config: TrainConfig, device: Device, num_devices: int, node: Node | None, *, forward_seconds: float,
                  backward_seconds: float, calibration: Calibration) -> Exchange:
    """What ``config.memory.parallel`` makes devices exchange in a step whose micro-steps compute for so many seconds.

    Under --tensor-parallel the groups are taken as whole devices: what goes on inside one is not modelled.
    """
    data_ranks = config.data_ranks(num_devices)
    if config.memory.parallel == "fsdp":
        return plan_fsdp(config, device, data_ranks, node, forward_seconds=forward_seconds,
                         backward_seconds=backward_seconds, calibration=calibration)
    return plan_ddp(config, device, data_ranks, node, backward_seconds=backward_seconds, calibration=calibration)


def plan_ddp(config: TrainConfig, device: Device, num_devices: int, node: Node | None, *, backward_seconds: float,
             calibration: Calibration) -> Exchange:
    """DDP's exchange: one all-reduce per bucket in the last micro-step's backward, which lasts ``backward_seconds``."""
    if num_devices == 1:
        return NOTHING
    sizes = buckets(config.shape)
    sent = ddp_bytes(config.shape, num_devices)
    if device.generation == "cpu":
        return _over_gloo(sent, len(sizes) * 2 * (num_devices - 1), calibration)
    link = _link(device, node)
    costs = [all_reduce_seconds(size, num_devices, link, node) for size in sizes]
    return Exchange(sent, sum(costs), overlapped(sizes, costs, backward_seconds))


def plan_fsdp(config: TrainConfig, device: Device, num_devices: int, node: Node | None, *, forward_seconds: float,
              backward_seconds: float, calibration: Calibration) -> Exchange:
    """FSDP2's exchange, block by block, the next block's weights being gathered while one computes (``dit.sharding``).

    ``forward_seconds`` and ``backward_seconds`` are one micro-step's. Raises UsageError where --shard-size does not
    divide the devices.
    """
    if num_devices == 1:
        return NOTHING
    shape, accumulation = config.shape, config.memory.grad_accum
    size = _group_size(config, num_devices)
    block, others = flops.block_parameters(shape)
    weight_bytes = 2 if config.precision.amp else 4
    sent = fsdp_bytes(shape, num_devices, accumulation, weight_bytes=weight_bytes, shard_size=size)
    if device.generation == "cpu":
        messages = accumulation * (2 * shape.depth + 1) + shape.depth + 1
        among_copies = 2 * (num_devices // size - 1) * (shape.depth + 1)
        return _over_gloo(sent, messages * (size - 1) + among_copies, calibration)
    link = _link(device, node)

    def gather(num_bytes: float) -> float:
        return gather_seconds(num_bytes, size, link, node) if size > 1 else 0.0

    def copies(num_bytes: float) -> float:
        return copies_seconds(num_bytes / size, num_devices, size, link, node)

    trained = flops.trainable_parameters(shape) - shape.depth * block
    weights, first = gather(block * weight_bytes), gather(4 * others)
    sums, last_sum = (gather(4 * block), copies(4 * block)), (gather(4 * trained), copies(4 * trained))
    forward = prefetched(first, [weights] * shape.depth, forward_seconds)
    quiet = backward_overlapped([weights] * shape.depth, [(0.0, 0.0)] * shape.depth, (0.0, 0.0), backward_seconds)
    last = backward_overlapped([weights] * shape.depth, [sums] * shape.depth, last_sum, backward_seconds)
    total = accumulation * (first + 2 * shape.depth * weights) + shape.depth * sum(sums) + sum(last_sum)
    return Exchange(sent, total, accumulation * forward + (accumulation - 1) * quiet + last, accumulation * forward)


def prefetched(first: float, gathers: Sequence[float], forward_seconds: float) -> float:
    """Seconds that gathers add to a forward of ``forward_seconds``, which blocks share evenly.

    ``first`` comes before everything. The host runs ahead of the device, so a block's weights are gathered while the
    block before it computes, one gather at a time.
    """
    each = forward_seconds / len(gathers)
    link = started = computed = first
    for seconds in gathers:
        link = max(link, started) + seconds
        started = max(computed, link)
        computed = started + each
    return max(0.0, computed - forward_seconds)


def backward_overlapped(gathers: Sequence[float], sums: Sequence[tuple[float, float]], last: tuple[float, float],
                        backward_seconds: float) -> float:
    """Seconds that gathers and sums of gradients add to a backward of ``backward_seconds``; lists run backwards too.

    One link serves both, in the order in which the host asks: the next block's weights, then this block's gradients.
    The second number of ``sums`` and of ``last`` (what lies outside of blocks) is the all-reduce among groups, over
    another link.
    """
    each = backward_seconds / len(gathers)
    link = between = computed = 0.0
    arrived = []
    for seconds in gathers[:2]:
        link += seconds
        arrived.append(link)
    for index, (scatter, reduce) in enumerate(sums):
        started = max(computed, arrived[index])
        computed = started + each
        if scatter + reduce:
            link = max(link, computed) + scatter
            between = max(between, link) + reduce
        if index + 2 < len(gathers):
            link = max(link, started) + gathers[index + 2]
            arrived.append(link)
    link = max(link, computed) + last[0]
    return max(0.0, max(link, between, computed) + last[1] - backward_seconds)


def _over_gloo(sent: float, hops: int, calibration: Calibration) -> Exchange:
    """Between processes on one CPU nothing is hidden: they share the cores."""
    rate = calibration.data.get("gloo_bytes_per_second", GLOO_BYTES_PER_SECOND)
    total = sent / rate + hops * calibration.data.get("gloo_latency_seconds", GLOO_LATENCY_SECONDS)
    return Exchange(sent, total, total)


def _link(device: Device, node: Node | None) -> Link:
    return node.link if node else device.link or PCIE3

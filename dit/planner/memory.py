"""From a step's events to the memory a device must have: its peak, what is in it, and whether it fits. Needs no torch.

Three figures, in the order in which they grow. *Allocated* is what tensors hold: on a GPU rounded up to 512 bytes each,
as torch.cuda.max_memory_allocated counts, on a CPU to the byte. *Reserved* is what the caching allocator holds to
serve them. *Device-used* adds what no allocator shows: the driver's context, loaded kernels, NCCL.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dit.planner.allocator import simulate
from dit.planner.catalogue import GIB, MIB, Device
from dit.planner.spread import Shards, inserted, with_buckets, with_shards
from dit.planner.trace import CATEGORIES, PHASES, Events, StepTrace

BLOCK_BYTES = 512  # the caching allocator's granularity (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
NCCL_BYTES = (300 * MIB, 600 * MIB, 1000 * MIB)
"""Outside the allocator, per communicator: 0.5-0.7 GB were seen; buffers grow with channels. Prior, to be
calibrated."""
CUDNN_WORKSPACE_BYTES = (0, 64 * MIB, 1 * GIB)
"""Inside the allocator, while a VAE's convolution runs: cuDNN's heuristics choose it. Prior, to be calibrated."""
FRAGMENTATION = (0.5, 1.0, 1.25)
"""Share of the replayed difference between reserved and allocated that a run may show: it depends on the order of frees
and on sizes of kernels' temporaries, which differ between versions. Prior, to be calibrated."""
ALLOCATED_MARGIN = (1.0, 1.0, 1.01)
"""Error of the allocated peak itself: what kernels take inside themselves. Prior, to be calibrated."""
HOST_BYTES = (300 * MIB, 700 * MIB, 1600 * MIB)
"""A training process on the CPU without its tensors: interpreter, torch, libraries, threads. Prior, to be
calibrated."""
HOST_MARGIN = (1.0, 1.05, 1.25)
"""Resident size of a CPU process per byte of tensors: the C library keeps freed memory. Prior, to be calibrated."""

_ENDS = ("low", "mid", "high")


@dataclass(frozen=True)
class Contributor:
    """What one kind of module has in one category at the peak; ``module`` has block numbers as ``*``."""

    module: str
    category: str
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device. ``peak_reserved_bytes`` is None on a CPU, which has no caching allocator.

    ``by_category`` splits the peak and sums to it; ``by_phase`` has every phase's own peak. ``num_retries`` counts how
    often the allocator would give its cache back and try again, which is slow. ``oom_phase`` is where a run would die.
    """

    verdict: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    device_used_bytes: dict[str, int]
    peak_phase: str
    by_category: dict[str, int]
    by_phase: dict[str, int]
    contributors: tuple[Contributor, ...] = ()
    num_retries: int = 0
    oom_phase: str | None = None
    memory_bytes: int = field(default=0, repr=False)
    events: Events | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, object]:
        """The part ``memory`` of plan.json."""
        names = ("verdict", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "peak_phase",
                 "by_category", "by_phase")
        return {name: getattr(self, name) for name in names}


def plan_memory(step: StepTrace, device: Device, *, num_devices: int = 1, encodes: bool = False,
                under_ddp: bool | None = None, gradients_are_bucket_views: bool = True, shards: Shards | None = None,
                expandable_segments: bool = False) -> MemoryPlan:
    """The memory of a step on ``device``, one of ``num_devices``.

    ``encodes`` says that a VAE runs in the step. ``under_ddp``: by default with several devices; other projects wrap
    one device too. ``gradients_are_bucket_views`` is DDP's gradient_as_bucket_view, which this project sets.
    ``shards`` says how FSDP spreads the model, instead of DDP.
    """
    under_ddp = num_devices > 1 if under_ddp is None else under_ddp

    def on_device(events: Events) -> Events:
        if shards is not None:
            events = with_shards(events, shards)
        elif under_ddp:
            events = with_buckets(events, gradients_are_bucket_views)
        return events if device.generation == "cpu" else with_workspaces(events, device.cublas_workspace_bytes)

    events = on_device(step.events)
    if device.generation == "cpu":
        return _on_cpu(events, device, num_devices)
    key = shards, under_ddp, gradients_are_bucket_views, device.cublas_workspace_bytes, expandable_segments
    sizes = Sizes(step, on_device, key, expandable_segments)
    return _on_gpu(events, device, under_ddp, encodes, sizes, step.micro_batch)


class Sizes:
    """Bytes of tensors and of the allocator's segments at any micro-batch of a trace, as ``on_device`` changes it."""

    def __init__(self, step: StepTrace, on_device: Callable[[Events], Events], key: tuple, expandable_segments: bool):
        self._step, self._on_device, self._key, self.expandable_segments = step, on_device, key, expandable_segments
        self._replayed = {} if step.trace is None else step.trace.memo
        self._allocated: dict[int, int] = {}

    def allocated(self, micro_batch: int) -> int:
        """Highest bytes of tensors."""
        if micro_batch not in self._allocated:
            self._allocated[micro_batch] = _highest(self._events(micro_batch))
        return self._allocated[micro_batch]

    def reserved(self, micro_batch: int) -> int:
        """Highest bytes of segments, found by a replay, whose result is kept with the trace."""
        key = self._key, micro_batch
        if key not in self._replayed:
            events = self._events(micro_batch)
            self._allocated[micro_batch] = _highest(events)
            replayed = simulate(events_of(events), expandable_segments=self.expandable_segments)
            self._replayed[key] = replayed.peak_reserved_bytes
        return self._replayed[key]

    def needed(self, margin: float, share: float) -> int:
        """Bytes in the allocator that no larger micro-batch needs less of; ``margin`` on allocated, ``share`` of the
        difference to reserved.

        A replay as such is not monotone: XL/2 with AMP and checkpointing reserves 14.69 GiB at 6 images, 14.02 at 9
        and 13.87 at 20, because tensors of 1 to 10 MiB share segments of 20 MiB and larger ones get their own, and
        because cached segments of activations serve the gradients. So it is replayed at 1, 2, 3, 4, 6, 8, 12, 16, ...
        images; between two of them reserved over allocated is taken as the larger one's of both, while allocated bytes
        grow; and the highest figure on the way to the micro-batch counts. A trace that holds for one micro-batch only
        is replayed there alone. In six models at 2 to 128 images this is 0.88 to 1.08 of the very batch's replay, in
        the middle 1.00.
        """
        last = self._step.micro_batch
        if self._step.trace is None:
            return int(self.allocated(last) * self._factor(last, margin, share))
        points = sorted({2**power * times // 2 for power in range(last.bit_length() + 1) for times in (2, 3)})
        factors = {point: self._factor(point, margin, share) for point in points if point <= last}
        needed = [self.allocated(point) * factor for point, factor in factors.items()]
        for point, following in zip(points, points[1:], strict=False):
            end = min(following - 1, last)
            if point < end:
                ahead = factors.get(following) or self._factor(following, margin, share)
                needed.append(self.allocated(end) * max(factors[point], ahead))
        return int(max(needed))

    def _factor(self, micro_batch: int, margin: float, share: float) -> float:
        """What is needed over what is allocated."""
        return margin + (self.reserved(micro_batch) / self.allocated(micro_batch) - 1) * share

    def _events(self, micro_batch: int) -> Events:
        if micro_batch == self._step.micro_batch:
            return self._on_device(self._step.events)
        return self._on_device(self._step.trace.events_at(micro_batch))


def _highest(events: Events) -> int:
    return int(np.cumsum(rounded(events.bytes)).max())


def events_of(events: Events) -> np.ndarray:
    """Tensor and signed bytes of each event, as the allocator's replay takes them."""
    return np.stack([events.tensor, events.bytes], axis=1)


def _on_cpu(events: Events, device: Device, num_processes: int) -> MemoryPlan:
    """Of one process; the machine's memory is shared out among all of them."""
    peak, share = summarize(events, events.bytes), device.memory_bytes // num_processes
    used = {name: int(peak["peak_allocated_bytes"] * margin + host)
            for name, margin, host in zip(_ENDS, HOST_MARGIN, HOST_BYTES, strict=True)}
    return MemoryPlan(verdict=_verdict(used, share, False), peak_reserved_bytes=None, device_used_bytes=used,
                      memory_bytes=share, events=events, **peak)


def _on_gpu(events: Events, device: Device, under_ddp: bool, encodes: bool, sizes: Sizes,
            micro_batch: int) -> MemoryPlan:
    """``peak_reserved_bytes`` is what a run at this very micro-batch shows; what a device needs never falls with it."""
    peak = summarize(events, rounded(events.bytes))
    outside = [context + nccl * under_ddp for context, nccl in zip(device.context_bytes, NCCL_BYTES, strict=True)]
    workspace = [size * encodes for size in CUDNN_WORKSPACE_BYTES]
    pairs = events_of(events)
    reserved, retries, oom_phase = sizes.reserved(micro_batch), 0, None
    capacity = device.memory_bytes - outside[1] - workspace[1]
    used = {name: sizes.needed(margin, share) + outside[index] + workspace[index]
            for index, (name, margin, share) in enumerate(zip(_ENDS, ALLOCATED_MARGIN, FRAGMENTATION, strict=True))}
    if max(reserved, used["mid"] - outside[1] - workspace[1]) > capacity:
        tight = simulate(pairs, capacity_bytes=max(capacity, 0), expandable_segments=sizes.expandable_segments)
        retries = tight.num_retries
        if tight.oom is None:
            reserved = min(reserved, tight.peak_reserved_bytes)
            used |= {name: min(used[name], device.memory_bytes) for name in ("low", "mid")}
        else:
            oom_phase = PHASES[events.phase[tight.oom.event]]
    return MemoryPlan(verdict=_verdict(used, device.memory_bytes, retries > 0 or oom_phase is not None),
                      peak_reserved_bytes=reserved, device_used_bytes=used, num_retries=retries, oom_phase=oom_phase,
                      memory_bytes=device.memory_bytes, events=events, **peak)


def _verdict(used: Mapping[str, int], memory_bytes: int, retries: bool) -> str:
    """``fits`` only where even the high figure is below the device's memory, and nothing has to be tried twice."""
    if used["high"] < memory_bytes and not retries:
        return "fits"
    return "tight" if used["mid"] <= memory_bytes else "does_not_fit"


def rounded(num_bytes: np.ndarray) -> np.ndarray:
    """Signed sizes as the caching allocator counts them."""
    return np.sign(num_bytes) * -(-np.abs(num_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def summarize(events: Events, num_bytes: np.ndarray) -> dict[str, object]:
    """Peak, its phase, its split by category, every phase's peak, and the ten largest contributors to the peak."""
    levels = np.cumsum(num_bytes)
    by_phase: dict[str, int] = {}
    for phase, start, stop, _ in events.spans:
        highest = int(levels[max(start - 1, 0):max(stop, start)].max())
        by_phase[PHASES[phase]] = max(by_phase.get(PHASES[phase], 0), highest)
    by_phase["save"] = int(levels[-1])  # tensors go to the host one by one: nothing is copied on the device
    peak = int(np.argmax(levels))
    columns = events.columns
    now = num_bytes[:peak + 1]
    split = np.bincount(columns["category"][:peak + 1], weights=now, minlength=len(CATEGORIES)).astype(np.int64)
    keys = columns["module"][:peak + 1].astype(np.int64) * len(CATEGORIES) + columns["category"][:peak + 1]
    by_key = np.bincount(keys, weights=now).astype(np.int64)
    grouped: dict[tuple[str, str], int] = {}
    for index in np.nonzero(by_key)[0]:
        module, category = divmod(int(index), len(CATEGORIES))
        name = re.sub(r"\.\d+(?=\.|$)", ".*", events.modules[module]), CATEGORIES[category]
        grouped[name] = grouped.get(name, 0) + int(by_key[index])
    largest = sorted(grouped.items(), key=lambda item: -item[1])[:10]
    return {"peak_allocated_bytes": int(levels[peak]), "peak_phase": PHASES[columns["phase"][peak]],
            "by_phase": by_phase,
            "by_category": {name: int(size) for name, size in zip(CATEGORIES, split, strict=True)},
            "contributors": tuple(Contributor(*name, size) for name, size in largest)}


# ---- what a trace on one device without libraries lacks ----

def with_workspaces(events: Events, workspace_bytes: int) -> Events:
    """cuBLAS's workspaces, taken in the allocator at the first product of the forward's and of autograd's thread, and
    kept.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    firsts = [next((start for phase, start, _, _ in events.spans if PHASES[phase] == name), None)
              for name in ("forward", "backward")]
    rows = [(first, workspace_bytes, name) for first, name in zip(firsts, ("forward", "backward"), strict=True)
            if first is not None]
    return inserted(events, rows, "other") if workspace_bytes else events

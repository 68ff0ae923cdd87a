"""Bytes of a step: read from the caching allocator on a GPU, counted exactly on a CPU, where nobody keeps count."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PREFIX = "phase:"
Result = TypeVar("Result")
Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Memory:
    """Bytes of one step. None is "not measured"."""

    allocated: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    device_used: int | None = None


class MemoryWatch:
    """Measures the memory of whole steps, phase by phase. ``peak_by_phase`` keeps the largest figure of each phase."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seen: dict[str, int] = {}
        self.peak_by_phase: dict[str, int] = {}

    def run(self, step: Callable[[Phase], Result]) -> tuple[Result, Memory]:
        """Run ``step`` with the phase observer it is to use. On a CPU this slows it; on a GPU nothing waits."""
        if self._device.type == "cuda":
            self._seen = {}
            result = step(self._gpu_phase)
            now = read_memory(self._device)
            memory = Memory(now.allocated, max(self._seen.values()), now.peak_reserved, device_used_bytes(self._device))
        else:
            result, peak = measure_tensor_peak(lambda: step(profiled_phase))
            self._seen = peak.by_phase
            memory = Memory(peak.allocated_bytes, peak.peak_bytes, None, device_used_bytes(self._device))
        for name, peak_bytes in self._seen.items():
            self.peak_by_phase[name] = max(peak_bytes, self.peak_by_phase.get(name, 0))
        return result, memory

    @contextmanager
    def _gpu_phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._seen[name] = max(torch.cuda.max_memory_allocated(self._device), self._seen.get(name, 0))


def read_memory(device: torch.device) -> Memory:
    """The caching allocator's counters, which the host keeps, so that reading waits for nothing; a CPU has none."""
    if device.type != "cuda":
        return Memory(device_used=device_used_bytes(device))
    return Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device),
                  torch.cuda.max_memory_reserved(device))


def device_used_bytes(device: torch.device) -> int | None:
    """What the driver reports as used on the GPU; this process's resident size on a CPU; None if neither is known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


@dataclass(frozen=True)
class TensorPeak:
    """Bytes of tensors on the CPU: after the work, at its highest moment, and at the highest moment of each phase."""

    allocated_bytes: int
    peak_bytes: int
    by_phase: dict[str, int]


def profiled_phase(name: str) -> AbstractContextManager:
    """The phase observer (see ``dit.step``) that makes :func:`measure_tensor_peak` tell phases apart."""
    return torch.profiler.record_function(_PREFIX + name)


def measure_tensor_peak(work: Callable[[], Result], live_bytes: int | None = None) -> tuple[Result, TensorPeak]:
    """Do ``work`` and return its result and the tensor bytes on the way, the CPU kernels' own temporaries included.

    ``live_bytes`` is what tensors hold before it; by default every tensor that Python knows is counted. The work runs
    under torch's profiler, which makes it slower. Memory that is taken inside it, but not from torch's CPU allocator
    (numpy's, shared memory of loader workers), is not seen.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write of its start, its end and a missing GPU to stderr
    if live_bytes is None:
        live_bytes = live_tensor_bytes()
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        result = work()
    memory, phases = [], []
    for event in profile.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_PREFIX):
            phases.append((event.start_ns(), event.end_ns(), name.removeprefix(_PREFIX)))
    return result, _levels(memory, phases, live_bytes)


def _levels(memory: list[tuple[int, int]], phases: list[tuple[int, int, str]], level: int) -> TensorPeak:
    """Walk the changes (time, bytes) from ``level`` on; a phase is (start, end, name), and phases do not overlap."""
    memory.sort(key=lambda change: change[0])  # stable: what has one time stamp stays in the order of happening
    phases.sort()
    peak, by_phase, index = level, {}, 0
    for start, end, name in phases:
        while index < len(memory) and memory[index][0] < start:
            level += memory[index][1]
            peak, index = max(peak, level), index + 1
        highest = level
        while index < len(memory) and memory[index][0] <= end:
            level += memory[index][1]
            highest, index = max(highest, level), index + 1
        by_phase[name] = max(by_phase.get(name, 0), highest)
        peak = max(peak, highest)
    for _, change in memory[index:]:
        level += change
        peak = max(peak, level)
    return TensorPeak(level, peak, by_phase)


def live_tensor_bytes() -> int:
    """Bytes behind all CPU tensors that Python knows, each storage once; of one made of others, those of the others."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _is_plain_on_cpu(thing):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
            if thing.grad is not None:
                storage = thing.grad.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _is_plain_on_cpu(tensor: Tensor) -> bool:
    try:
        return (tensor.device.type == "cpu" and tensor.layout is torch.strided
                and not is_traceable_wrapper_subclass(tensor))
    except RuntimeError:  # in torch 2.6 one that another thread has just given up is left without a device
        return False

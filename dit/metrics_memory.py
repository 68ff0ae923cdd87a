"""Exact tensor bytes of a piece of work on the CPU, where no caching allocator keeps count."""

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_PREFIX = "phase:"
Result = TypeVar("Result")


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
    """Bytes behind all CPU tensors that Python knows, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
            if thing.grad is not None:
                storage = thing.grad.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())

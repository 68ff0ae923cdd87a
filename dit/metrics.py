"""What a run measures of itself: time, memory and throughput of every step, and where the figures go.

Nothing here waits for the device inside a step: scalars stay on it, and clocks are CUDA events, until ``report`` reads
all of them back at once.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dit.config import UsageError
from dit.metrics_memory import Memory, device_used_bytes, read_memory
from dit.parallel import Ranks
from dit.step import StepResult
from dit.terminal import duration

KEYS = ("step", "loss", "grad_norm", "lr", "step_seconds", "data_wait_seconds", "images_per_second",
        "images_per_second_per_device", "model_tflops_per_device", "mfu", "allocated_bytes", "peak_allocated_bytes",
        "peak_reserved_bytes", "device_used_bytes", "device_utilization", "loss_scale", "skipped")
"""Keys of a line of metrics.jsonl. A figure that was not measured is null."""
_RATES = ("step_seconds", "images_per_second", "images_per_second_per_device", "model_tflops_per_device", "mfu")


@dataclass(frozen=True)
class DeviceFacts:
    """What turns seconds into rates, and what the plan expects of a step; None is unknown."""

    train_flops_per_image: float | None = None
    peak_flops: float | None = None
    planned_step_seconds: float | None = None
    planned_peak_bytes: float | None = None


class Clock:
    """Marks moments in the device's own time and gives the seconds between them once the device has passed them."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"

    def mark(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: object, end: object) -> float:
        """Seconds from one mark to another. Waits for the device only if it has not passed ``end`` yet."""
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class StepMeter:
    """Collects steps and turns them into records with every key of ``KEYS``.

    Time between ``pause`` and ``resume`` (saves, samples) belongs to no step.
    """

    def __init__(self, ranks: Ranks, global_batch_size: int, facts: DeviceFacts):
        self._ranks, self._global_batch, self._facts = ranks, global_batch_size, facts
        self._clock = Clock(ranks.device)
        self._pending: list[dict[str, object]] = []
        self.resume()

    def resume(self) -> None:
        """The next step begins now."""
        self._start = self._clock.mark()
        if self._ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._ranks.device)

    def add(self, step: int, result: StepResult, *, lr: float, data_wait_seconds: float,
            memory: Memory | None = None, timed: bool = True) -> None:
        """A step ended now.

        ``memory`` replaces the meter's own reading; ``timed`` is False where an instrument slowed the step.
        """
        end = self._clock.mark()
        scalars = torch.stack([result.loss, result.grad_norm, result.skipped, result.loss_scale])
        self._pending.append({"step": step, "lr": lr, "data_wait_seconds": data_wait_seconds, "scalars": scalars,
                              "span": (self._start, end) if timed else None,
                              "memory": memory or read_memory(self._ranks.device)})
        self.resume()
        self._start = end

    def report(self) -> list[dict[str, object]]:
        """Records of the steps since the last report, one per step. A collective: the loss is the mean over ranks."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        scalars = torch.stack([entry["scalars"] for entry in pending])
        losses = self._ranks.mean(scalars[:, 0].contiguous()).tolist()
        _, grad_norms, skips, scales = scalars.T.tolist()
        used, utilization = device_used_bytes(self._ranks.device), device_utilization(self._ranks.device)
        columns = zip(pending, losses, grad_norms, skips, scales, strict=True)
        records = [self._record(*values) for values in columns]
        records[-1]["device_utilization"] = utilization
        if records[-1]["device_used_bytes"] is None:
            records[-1]["device_used_bytes"] = used
        return records

    def _record(self, entry: dict, loss: float, grad_norm: float, skipped: float, scale: float) -> dict:
        seconds = self._clock.seconds(*entry["span"]) if entry["span"] else None
        rate = self._global_batch / seconds if seconds else None
        per_device = rate / self._ranks.world_size if rate else None
        flops, peak = self._facts.train_flops_per_image, self._facts.peak_flops
        achieved = per_device * flops if per_device and flops else None
        memory = entry["memory"]
        return {
            "step": entry["step"], "loss": _finite(loss), "grad_norm": _finite(grad_norm), "lr": entry["lr"],
            "step_seconds": seconds, "data_wait_seconds": entry["data_wait_seconds"], "images_per_second": rate,
            "images_per_second_per_device": per_device,
            "model_tflops_per_device": achieved / 1e12 if achieved else None,
            "mfu": achieved / peak if achieved and peak else None, "allocated_bytes": memory.allocated,
            "peak_allocated_bytes": memory.peak_allocated, "peak_reserved_bytes": memory.peak_reserved,
            "device_used_bytes": memory.device_used, "device_utilization": None, "loss_scale": scale,
            "skipped": int(skipped),
        }


def _finite(value: float) -> float | None:
    """JSON has no NaN: a loss that is not a number is null, and ``skipped`` says why."""
    return value if math.isfinite(value) else None


def device_utilization(device: torch.device) -> float | None:
    """Share of the last second in which the GPU was busy, 0 to 1, as the driver reports it; None where it does not."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # the driver's library is missing or refuses: a figure less, not a run less
        return None


# ---- where the figures go ----

class Sink(Protocol):
    """Takes records and can be closed."""

    def write(self, records: list[dict[str, object]]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """``metrics.jsonl``. On a resume, lines of steps that are about to be done again are dropped first.

    Raises UsageError where the disk is full or read-only.
    """

    def __init__(self, path: Path, next_step: int):
        self._path = path
        try:
            if path.exists():
                os.truncate(path, _end_of(path, next_step))
            self._file = open(path, "a")  # noqa: SIM115 - open as long as the run
        except OSError as error:
            raise UsageError(f"could not write {path}: {error.strerror}") from None

    def write(self, records: list[dict[str, object]]) -> None:
        try:
            self._file.write("".join(json.dumps(record) + "\n" for record in records))
            self._file.flush()
        except OSError as error:
            raise UsageError(f"could not write {self._path}: {error.strerror}; checkpoint files are whole") from None

    def close(self) -> None:
        self._file.close()


def _lines_from_the_end(path: Path) -> Iterator[tuple[int, str]]:
    """(offset, text) of every line, the last one first, without reading what is not asked for."""
    with open(path, "rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end or rest:
            start = max(0, end - 2**16)
            file.seek(start)
            block, end = file.read(end - start) + rest, start
            *complete, rest = reversed(block.splitlines(keepends=True))
            offset = start + len(block)
            for line in complete if start else [*complete, rest]:
                offset -= len(line)
                yield offset, line.decode(errors="replace")
            rest = rest if start else b""


def _end_of(path: Path, next_step: int) -> int:
    """Bytes of a metrics.jsonl up to the line before step ``next_step``; steps ascend, a crash may cut the last one."""
    for offset, line in _lines_from_the_end(path):
        if line.endswith("\n") and _step_of(line) < next_step:
            return offset + len(line.encode())
    return 0


def records_since(path: Path, step: int) -> list[dict[str, object]]:
    """Records from ``step`` on, to be shown with later ones: their times are another session's and left out."""
    found = []
    for _, line in _lines_from_the_end(path) if path.exists() else ():
        if _step_of(line) < step:
            break
        found.append({**json.loads(line), **dict.fromkeys(_RATES)})
    return found[::-1]


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a crash cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Records of a metrics.jsonl; a last line cut off by a crash is left out."""
    return [json.loads(line) for line in path.read_text().splitlines() if _step_of(line) < math.inf]


class Console:
    """One line every ``every`` steps: the mean loss, speed and memory beside what was planned, and the time left.

    ``window`` are the steps since the last such line, where the session before ended between two.
    """

    def __init__(self, say: Callable[[str], None], total_steps: int, every: int = 1,
                 window: Iterable[dict[str, object]] = (), facts: DeviceFacts | None = None):
        self._say, self._total, self._every, self._window, self._seconds = say, total_steps, every, list(window), []
        step, peak = (facts.planned_step_seconds, facts.planned_peak_bytes) if facts else (None, None)
        self._planned_step = f" (planned {1e3 * step:.1f})" if step else ""
        self._planned_peak = f" (planned {peak / 2**30:.2f})" if peak else ""

    def write(self, records: list[dict[str, object]]) -> None:
        self._window += records
        done = self._window[-1]["step"] + 1
        if done % self._every == 0 or done == self._total:
            self._line()

    def _line(self) -> None:
        records, self._window = self._window, []
        timed = [record["step_seconds"] for record in records if record["step_seconds"]]
        self._seconds = (self._seconds + timed)[-500:]
        last = records[-1]
        done = last["step"] + 1
        parts = [f"step {done}/{self._total}", f"loss {_mean(records, 'loss', '.4f')}",
                 f"grad {_mean(records, 'grad_norm', '.3g')}", f"lr {last['lr']:.2g}"]
        if timed:
            mean = sum(timed) / len(timed)
            waits = sum(record["data_wait_seconds"] for record in records if record["step_seconds"])
            rate, per_device = (_mean(records, f"images_per_second{per}", ".1f") for per in ("", "_per_device"))
            parts += [f"{1e3 * mean:.1f} ms/step{self._planned_step}", f"{rate} images/s ({per_device} per device)",
                      f"data wait {100 * waits / sum(timed):.0f} %"]
        if any(record["mfu"] for record in records):
            parts.append(f"MFU {100 * float(_mean(records, 'mfu', '.6f')):.1f} %")
        peak = max((record["peak_allocated_bytes"] or 0 for record in records), default=0)
        parts.append(f"peak {peak / 2**30:.2f} GiB{self._planned_peak}" if peak else "peak not measured")
        skipped = sum(record["skipped"] for record in records)
        if skipped:
            parts.append(f"{skipped} skipped (not finite)")
        if self._seconds:
            parts.append(f"left {duration((self._total - done) * sorted(self._seconds)[len(self._seconds) // 2])}")
        self._say("  ".join(parts))

    def close(self) -> None:
        if self._window:
            self._line()


def _mean(records: Iterable[dict[str, object]], key: str, form: str) -> str:
    values = [record[key] for record in records if record[key] is not None]
    return format(sum(values) / len(values), form) if values else "n/a"


class Tracker:
    """An experiment tracker behind accelerate's common interface."""

    def __init__(self, name: str, folder: Path, settings: dict[str, object]):
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        if name not in [str(getattr(kind, "value", kind)) for kind in get_available_trackers()]:
            raise UsageError(f"--tracker {name}: its package is not installed; pip install {name}, or --tracker none")
        kind = LOGGER_TYPE_TO_CLASS[name]
        self._tracker = kind(folder.name, logging_dir=folder) if kind.requires_logging_directory else kind(folder.name)
        if hasattr(self._tracker, "start"):
            self._tracker.start()
        self._tracker.store_init_configuration({key: str(value) for key, value in settings.items()})

    def write(self, records: list[dict[str, object]]) -> None:
        for record in records:
            values = {key: value for key, value in record.items() if value is not None and key != "step"}
            self._tracker.log(values, step=record["step"])

    def close(self) -> None:
        self._tracker.finish()

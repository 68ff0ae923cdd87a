"""What preflight looks at on one machine: the plan, memory, precision, data and disk. Each look gives one ``Check``.

A look raises UsageError for a user's mistake; ``guarded`` turns that, and anything else, into a check.
"""

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from dit import checkpoint
from dit.config import IMAGE_DATA, TrainConfig, UsageError
from dit.data import PositionDataset, build_dataset
from dit.metrics_memory import device_used_bytes
from dit.model import build_model
from dit.parallel import Ranks
from dit.precision import Precision, resolve
from dit.run_folder import RunFolder, device_name

Colour = Literal["green", "amber", "red"]
DATA_SAMPLES, DATA_SECONDS = 256, 0.8  # read for the timing: so many, or as many as the time allows
WRITTEN_BYTES = 8 << 20
OTHERS_BYTES = 1 << 29  # of other processes on the GPU: worth a word
PREFETCH = 2  # micro-batches that each loader process keeps ready, in shared memory


@dataclass(frozen=True)
class Check:
    """One item: what was found and, unless it is green, what to do. ``figures`` are what ranks compare, in SI units."""

    name: str
    colour: Colour
    found: str
    advice: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.colour:7}{self.name:15}{self.found}" + (f"; {self.advice}" if self.advice else "")


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """The check that ``look`` returns; red for a user's mistake, amber if looking itself fails."""
    try:
        return look()
    except UsageError as error:
        return Check(name, "red", str(error))
    except Exception as error:  # noqa: BLE001 - a check that breaks must not break the run
        return Check(name, "amber", f"could not be checked ({failure(error)})")


def failure(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removesuffix(": ")


def size(number: float) -> str:
    """Bytes as people read them."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


# ---- the plan against this machine ----

def check_model(config: TrainConfig, ranks: Ranks, plan: dict) -> Check:
    """The model can be built, and the plan is one of this model and number of devices."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(config.shape).parameters())
    found = (f"{config.model.model}, {parameters:,} parameters, micro-batch {config.micro_batch(ranks.world_size)} x "
             f"accumulation {config.memory.grad_accum} x {ranks.world_size} devices")
    planned = plan.get("model", {}).get("parameters", parameters), plan.get("num_devices", ranks.world_size)
    if planned != (parameters, ranks.world_size):
        return Check("model", "amber", f"{found}, but the plan is of {planned[0]:,} parameters on {planned[1]} devices",
                     "delete the run folder's plan.json to plan again")
    return Check("model", "green", found)


def check_memory(plan: dict) -> Check:
    """What the plan says about memory."""
    if not plan:
        return Check("memory", "amber", "no plan", "leave out --plan off to know whether the run fits")
    used, total = plan["memory"]["device_used_bytes"], plan["device"]["memory_bytes"]
    found = f"{size(used['mid'])} planned ({size(used['low'])} to {size(used['high'])}) of {size(total)}"
    less = "use --amp, --ckpt or a larger --grad-accum"
    colour, advice = {"fits": ("green", ""), "tight": ("amber", f"tight: {less}, or try --trial first"),
                      "does_not_fit": ("red", f"does not fit: {less}")}[plan["memory"]["verdict"]]
    return Check("memory", colour, found, advice)


def check_device_memory(ranks: Ranks, plan: dict) -> Check:
    """What is free on the device (on a CPU: in the machine) now, and what others hold."""
    planned = plan.get("memory", {}).get("device_used_bytes", {}).get("mid")
    own = device_used_bytes(ranks.device) or 0
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        others, who = _gpu_others(ranks.device, total - free)
        left, said = total - others, f"{size(free)} of {size(total)} free"
    else:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        free = _host_available_bytes()
        left, others, who = free / processes + own, 0, ""
        said = f"{size(free)} of host memory free" + (f" for {processes} processes" if processes > 1 else "")
    if others > OTHERS_BYTES:
        said += f", {size(others)} taken by others{who}"
    if planned and planned > left:
        return Check("device memory", "red", f"{said}; the plan needs {size(planned)}",
                     "end the other processes or take another device (CUDA_VISIBLE_DEVICES)" if others > OTHERS_BYTES
                     else "use --amp, --ckpt or a larger --grad-accum")
    if others > OTHERS_BYTES:
        return Check("device memory", "amber", said, "the other process also slows this one: prefer a free device")
    return Check("device memory", "green", said)


def _gpu_others(device: torch.device, used: int) -> tuple[float, str]:
    """Bytes other processes hold on the GPU, and their numbers; estimated where the driver's library does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        others = [process for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                  if process.pid != os.getpid()]
        known = [process for process in others if process.usedGpuMemory]
        if known:
            return (float(sum(process.usedGpuMemory for process in known)),
                    f" (process {', '.join(str(process.pid) for process in known)})")
    except Exception:  # noqa: BLE001 - no library, no permission, no such call: the estimate below
        pass
    return max(0.0, used - torch.cuda.memory_reserved(device) - 2**30), ""  # a GiB for this process's own context


def _host_available_bytes() -> float:
    """What the machine, or the container's limit, has left; infinity where neither says."""
    left = math.inf
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left = 1024.0 * int(line.split()[1])
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            left = min(left, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return left


# ---- precision ----

def check_precision(config: TrainConfig, device: torch.device) -> Check:
    """The asked precision works here, forwards and backwards, and a matrix product in it is not slower than in fp32."""
    precision = resolve(config, device)
    seconds, is_finite = _matrix_product(config, device, precision)
    found = f"{precision.name} on {device_name(device)}"
    if not is_finite:
        return Check("precision", "red", f"{found}: a product of ordinary numbers is not finite",
                     "the device or its driver is at fault: leave out --amp, and test another device")
    figures = {"matrix_product_seconds": seconds}
    if precision.dtype is not None:
        plain = replace(precision, dtype=None)
        ratio = seconds / _matrix_product(config, device, plain)[0]
        figures["seconds_to_fp32"] = ratio
        if ratio > 1.1:
            return Check("precision", "amber", f"{found}: matrix products take {ratio:.1f} times as long as in fp32",
                         "leave out --amp unless the memory is needed", figures)
    if config.precision.amp and config.precision.amp_dtype == "auto" and precision.name == "fp16":
        found += " (no bf16 here), with loss scaling"
    return Check("precision", "green", found, figures=figures)


def _matrix_product(config: TrainConfig, device: torch.device, precision: Precision) -> tuple[float, bool]:
    """Seconds of the MLP's first product, forward and backward (the best of several), and whether all was finite."""
    shape = config.shape
    width = shape.hidden_size
    most = 2e8 if device.type == "cpu" else 2e12
    rows = max(16, min(8 * shape.num_tokens, int(most / (24 * width**2))))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, width, generator=generator, device=device)
    weight = torch.randn(width, 4 * width, generator=generator, device=device).div_(width**0.5).requires_grad_()
    best, start = math.inf, time.perf_counter()
    repeats = 0
    while repeats < 3 or (repeats < 20 and time.perf_counter() - start < 0.1):
        began = time.perf_counter()
        with precision.autocast():
            y = x @ weight
        gradient, = torch.autograd.grad(y.float().square().mean(), weight)
        is_finite = bool(torch.isfinite(gradient).all())  # waits for the device
        best, repeats = min(best, time.perf_counter() - began), repeats + 1
    return best, is_finite


# ---- data ----

def check_data(config: TrainConfig, ranks: Ranks, plan: dict, dataset: PositionDataset | None = None) -> Check:
    """The data opens, samples can be read, and as fast as the planned step wants them."""
    dataset = build_dataset(config) if dataset is None else dataset
    rate, count, unreadable = _reading_rate(dataset, ranks.rank)
    per_loader = f"{rate:,.0f} samples/s per loader process"
    found = f"{len(dataset):,} samples; {count} read, {per_loader}"
    figures = {"seconds_per_sample": 1 / rate}
    if unreadable:
        first, reason = next(iter(unreadable.items()))
        return Check("data", "amber", f"{found}; {len(unreadable)} of them unreadable, first {first} ({reason})",
                     "they are replaced by their neighbours; repair or remove them", figures)
    step = plan.get("time", {}).get("step_seconds", {}).get("mid")
    if not step:
        return Check("data", "green", found, figures=figures)
    wanted = config.memory.global_batch_size / ranks.world_size / step
    found += f", {wanted:,.0f}/s wanted per device"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = max(1.0, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) / local)
    workers = config.data.num_workers
    needed = math.ceil(1.2 * wanted / rate)
    if workers == 0 and wanted / rate > 0.1:
        return Check("data", "amber", f"{found}: loading in the training process lengthens the step by "
                     f"{100 * wanted / rate:.0f} %", f"--num-workers {needed}", figures)
    if workers and wanted > rate * min(workers, cores):
        advice = f"--num-workers {needed}" if needed <= cores else (
            f"{cores:.0f} cores are not enough: encode once with scripts/extract_latents.py, or use smaller files")
        return Check("data", "amber", f"{found}: the step will wait for data", advice, figures)
    return Check("data", "green", found, figures=figures)


def _reading_rate(dataset: PositionDataset, rank: int) -> tuple[float, int, dict[str, str]]:
    """Samples per second in this process, how many were read, and {path: reason} of those that could not be."""
    first = rank * DATA_SAMPLES
    dataset.__getitems__(range(first, first + 1))  # opens files and imports what is imported late
    start, count = time.perf_counter(), 0
    while count < DATA_SAMPLES and (count == 0 or time.perf_counter() - start < DATA_SECONDS):
        chunk = max(1, min(count, 32))  # 1, 1, 2, 4, ...: a slow disk is not asked for much
        dataset.__getitems__(range(first + 1 + count, first + 1 + count + chunk))
        count += chunk
    rate = count / (time.perf_counter() - start)
    unreadable = getattr(dataset.source, "unreadable", {})
    found = dict(unreadable)
    unreadable.clear()
    return rate, count, found


def check_shared_memory(config: TrainConfig, ranks: Ranks) -> Check:
    """Loader processes hand micro-batches over in shared memory, which containers keep small."""
    workers, place = config.data.num_workers, Path("/dev/shm")
    if not workers or not place.is_dir():
        return Check("shared memory", "green", "not used" if not workers else "the system's default")
    latent = math.prod(config.latent_shape)
    pixels = 3 * math.prod(config.image_hw) if config.data.data in IMAGE_DATA else latent
    numbers = pixels + latent * (2 if config.encodes_in_loop else 1)
    micro_batch = 4 * numbers * config.micro_batch(ranks.world_size)
    needed = micro_batch * (PREFETCH * workers + 1) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free = shutil.disk_usage(place).free
    found = f"{size(needed)} for {workers} loader processes, {size(free)} free in {place}"
    advice = "use docker run --shm-size=16g (or --ipc=host), or fewer --num-workers"
    colour = "red" if free < needed else "amber" if free < 1.5 * needed else "green"
    return Check("shared memory", colour, found, "" if colour == "green" else advice)


# ---- disk ----

def check_disk(config: TrainConfig, folder: RunFolder | None, plan: dict, writes: bool = True) -> Check:
    """The checkpoint files of the run have room, and saving does not take long beside training."""
    place = folder.path if folder else Path(config.run.run_dir or config.run.results_dir)
    while not place.exists():
        place = place.absolute().parent
    free = shutil.disk_usage(place).free
    if not writes:
        return Check("disk", "green", "rank 0 writes")
    if not plan:
        return Check("disk", "green", f"{size(free)} free (without a plan no comparison)")
    file_bytes = plan["disk"]["checkpoint_bytes"]
    present = [checkpoint.size_of(path) for step in checkpoint.steps_in(folder.checkpoints)
               for path in checkpoint.present(folder.checkpoints, step)] if folder else []
    needed = max(file_bytes, plan["disk"]["run_bytes"] - sum(present))  # which has a new file beside the kept ones
    found = f"{size(needed)} for checkpoint files of {size(file_bytes)}, {size(free)} free"
    advice = "free some, or keep fewer (--keep-last, --keep-every, --ckpt-every), or another --results-dir"
    if free < needed:
        return Check("disk", "red", found, advice)
    rate = _writing_rate(folder.path, min(WRITTEN_BYTES, file_bytes)) if folder else None
    step = plan["time"]["step_seconds"]["mid"]
    figures = {}
    if rate:
        save, between = file_bytes / rate, (config.run.ckpt_every * step if step else math.inf)
        figures, found = {"bytes_per_second": rate}, f"{found}, about {save:.1f} s per save"
        if save > 0.1 * between:
            return Check("disk", "amber", f"{found}, with {between:.0f} s of training between saves",
                         "a larger --ckpt-every, or a faster disk", figures)
    if free < 1.2 * needed:
        return Check("disk", "amber", found, advice, figures)
    return Check("disk", "green", found, figures=figures)


def _writing_rate(folder: Path, num_bytes: int) -> float:
    """Bytes per second of writing ``num_bytes`` bytes to the disk itself."""
    probe, start = folder / f".preflight-{os.getpid()}", time.perf_counter()
    try:
        with open(probe, "wb") as file:
            file.write(os.urandom(num_bytes))
            file.flush()
            os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - start)
    finally:
        probe.unlink(missing_ok=True)

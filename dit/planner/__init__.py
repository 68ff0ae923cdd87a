"""What a run will need before it starts: memory, time, disk and cost, each with a low and a high.

:func:`plan` answers for any device, present or not. torch is imported only where a step has to be traced anew.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dit.config import IMAGE_DATA, TrainConfig, UsageError, replace
from dit.config_files import to_tree
from dit.planner import calibration as calibrations
from dit.planner import flops, step_time
from dit.planner.catalogue import GIB, MIB, Device
from dit.planner.communication import shard_size
from dit.planner.hardware import attention_kernel
from dit.planner.memory import MemoryPlan, plan_memory, rounded, summarize
from dit.planner.spread import Shards
from dit.planner.trace import CATEGORIES, TRACED_STEPS, StepTrace, Trace, trace_step

SCHEMA = 1
IMAGENET_SAMPLES = 1_281_167
_DIGITS_SAMPLES = 1_797
_METRICS_BYTES_PER_STEP = 400
_BYTES_PER_RECORD = 350  # what torch.save adds to a tensor: alignment, two zip headers, its entry in the pickle


@dataclass(frozen=True)
class Plan:
    """A prediction. ``content`` is plan.json; ``memory`` and ``step`` hold what pictures and advice need besides."""

    content: Mapping[str, object]
    memory: MemoryPlan
    step: StepTrace

    def to_dict(self) -> dict[str, object]:
        """The content of plan.json."""
        return dict(self.content)


def plan(config: TrainConfig, device: Device, num_devices: int = 1, *, num_samples: int | None = None,
         price_per_device_hour: float | None = None, loader_rate: float | None = None) -> Plan:
    """Plan a validated ``config`` on ``num_devices`` of ``device``.

    ``num_samples`` is the size of the data set, where it is known, and ``loader_rate`` what
    :func:`measured_loader_rate` found; without it reading costs nothing. Raises UsageError where the device cannot do
    what the config asks for, or where the batch does not divide.
    """
    micro_batch = config.micro_batch(num_devices)
    step = traced(config, device, micro_batch).at(micro_batch)
    memory = memory_of(config, device, num_devices, step)
    steps, notes = _steps(config, num_samples)
    time, run, calibration, said = _time(config, device, num_devices, step, steps, price_per_device_hour, loader_rate)
    checkpoint_bytes = _checkpoint_bytes(config, step)
    content = {
        "schema": SCHEMA,
        "config": to_tree(config),
        "device": {"name": device.name, "memory_bytes": device.memory_bytes, "source": device.sources["memory_bytes"]},
        "num_devices": num_devices,
        "calibration": calibration,
        "model": {"parameters": flops.parameters(config.shape),
                  "forward_flops_per_image": flops.forward_flops_per_image(config.shape),
                  "train_flops_per_image": flops.train_flops_per_image(config.shape)},
        "memory": memory.to_dict(),
        "time": time,
        "run": run,
        "disk": {"checkpoint_bytes": checkpoint_bytes, "run_bytes": _run_bytes(config, steps, checkpoint_bytes)},
        "notes": [*_memory_notes(config, device, num_devices, memory, micro_batch), *notes, *said],
    }
    return Plan(content, memory, step)


def measured_loader_rate(config: TrainConfig) -> float | None:
    """Samples per second that one loader worker makes of the run's data on this machine, measured in about a second;
    None where the data is not here.
    """
    if not config.data.data_path:
        return None
    from dit.data import worker_rate

    return worker_rate(config)


def known_samples(config: TrainConfig) -> int | None:
    """Samples in the run's data, where it is here and the run is as long as they say (--max-steps is not given)."""
    if not config.data.data_path or config.run.max_steps is not None:
        return None
    from dit.data import sample_count

    return sample_count(config)


def traced(config: TrainConfig, device: Device, micro_batch: int, num_steps: int = TRACED_STEPS) -> Trace:
    """The trace of ``config``'s step as ``device`` would run it, for ``num_steps`` steps."""
    dtype, kernel = dtype_and_kernel(config, device)
    return trace_step(config, device_kind="cpu" if device.generation == "cpu" else "cuda", dtype=dtype,
                      attention=kernel, micro_batch=micro_batch, num_steps=num_steps)


def memory_of(config: TrainConfig, device: Device, num_devices: int, step: StepTrace) -> MemoryPlan:
    """The memory of a traced step. The allocator's mode is that of this environment."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    runs_vae = config.encodes_in_loop or (config.run.sample_every > 0 and config.vae != "none")
    return plan_memory(step, device, num_devices=num_devices, encodes=runs_vae,
                       shards=shards_of(config, num_devices),
                       expandable_segments="expandable_segments:True" in settings.replace(" ", ""))


def shards_of(config: TrainConfig, num_devices: int) -> Shards | None:
    """How FSDP spreads the model over ``num_devices``; None where each has a whole one."""
    size = shard_size(config, num_devices)
    return Shards.of(config.shape, size, 2 if config.precision.amp else 4) if size > 1 else None


def state_bytes(config: TrainConfig, num_devices: int) -> int:
    """Bytes that each device holds between backward and optimizer whatever the batch: its share of weights, gradients,
    moments and average. What is above its memory can do without a trace.
    """
    moments = {"adamw-8bit": 2, "adamw-4bit": 1}.get(config.optim.optimizer, 8)
    frozen = flops.parameters(config.shape) - flops.trainable_parameters(config.shape)
    held = 4 * frozen + flops.trainable_parameters(config.shape) * (
        4 + 4 + moments + 4 * (config.optim.ema == "device"))
    return held // shard_size(config, num_devices)


def dtype_and_kernel(config: TrainConfig, device: Device) -> tuple[str | None, str]:
    """What autocast computes in (None: no autocast), and the attention kernel that a step of ``config`` runs."""
    dtype, asked, shape = autocast_dtype(config, device), config.precision.attention, config.shape
    if device.generation != "cpu":
        return dtype, attention_kernel(device, dtype or "fp32", shape.hidden_size // shape.num_heads, asked)
    if asked in ("efficient", "cudnn"):
        raise UsageError(f"--attention {asked} needs a GPU; a CPU has auto, flash and math")
    return dtype, "math" if asked == "math" else "flash_cpu"


def autocast_dtype(config: TrainConfig, device: Device) -> str | None:
    """None (no autocast), "bf16" or "fp16". Raises UsageError for bf16 on a device without it."""
    precision = config.precision
    if not precision.amp:
        return None
    if precision.amp_dtype == "bf16" and not device.has_bf16:
        raise UsageError(f"--amp-dtype bf16: {device.name} has no bf16; use --amp-dtype fp16 (or auto)")
    if precision.amp_dtype == "auto":
        return "bf16" if device.has_bf16 else "fp16"
    return precision.amp_dtype


# ---- time, run and disk ----

def _steps(config: TrainConfig, num_samples: int | None) -> tuple[int, list[str]]:
    if num_samples is None:
        num_samples = _DIGITS_SAMPLES if config.data.data == "digits" else IMAGENET_SAMPLES
        if config.run.max_steps is None and config.data.data in (*IMAGE_DATA, "latents"):
            return config.total_steps(num_samples), [
                f"The length of the run assumes ImageNet's {IMAGENET_SAMPLES:,} images; --max-steps says it exactly."]
    return config.total_steps(num_samples), []


def _time(config: TrainConfig, device: Device, num_devices: int, step: StepTrace, steps: int,
          price: float | None, loader_rate: float | None) -> tuple[dict, dict, dict, list[str]]:
    """The parts time, run and calibration, and notes. Figures are None where the device's speed is not known."""
    is_cpu = device.generation == "cpu"
    calibration = calibrations.find(calibrations.cpu_name(), _cpu_threads(num_devices)) if is_cpu else (
        calibrations.find(device.name))
    try:
        time = step_time.predict_time(step, config, device, num_devices, calibration,
                                      data_seconds=step.micro_batch / loader_rate if loader_rate else None)
    except UsageError:
        raise
    except ValueError as error:
        unknown = {"low": None, "mid": None, "high": None}
        return ({"step_seconds": unknown, "by_phase": {}, "images_per_second": None, "mfu": None, "bound_by": None},
                {"steps": steps, "hours": unknown, "device_hours": None, "cost": None, "energy_kwh": None},
                {"kind": "prior", "source": "none"}, [f"No time: {error}."])
    run = step_time.run_plan(time, steps, num_devices, device, price)
    seconds = {"step_seconds": time.step_seconds, "by_phase": time.by_phase,
               "images_per_second": time.images_per_second, "mfu": time.mfu, "bound_by": time.bound_by}
    whole = {"steps": run.steps, "hours": run.hours, "device_hours": run.device_hours, "cost": run.cost,
             "energy_kwh": run.energy_kwh}
    energy = [] if run.energy_kwh is None else [
        f"Energy: {run.energy_kwh:,.0f} kWh if the boards draw their full {device.board_power_watts:,.0f} W "
        "throughout, the most they can; hosts, network and cooling come on top."]
    notes = [*time.notes, *energy,
             *([_loader_note(config, device, time, step.micro_batch, loader_rate)] if loader_rate else [])]
    return seconds, whole, time.calibration, notes


def _cpu_threads(num_processes: int) -> int:
    """Threads torch would use here: torchrun gives one to each of several processes."""
    if "torch" in sys.modules:
        return sys.modules["torch"].get_num_threads()
    if num_processes > 1:
        return int(os.environ.get("OMP_NUM_THREADS", 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("OMP_NUM_THREADS", cores))


def _checkpoint_bytes(config: TrainConfig, step: StepTrace) -> int:
    """Weights and average in fp32 (the average's frozen entries are the weights' own), and the moments as traced."""
    shape, has_average = config.shape, config.optim.ema != "off"
    entries = flops.state_dict_entries(shape)
    events = step.events
    moments = events.bytes[(events.category == CATEGORIES.index("optimizer")) & (events.step == 0)]
    steps_on_host = 0 if config.optim.optimizer == "adamw" else entries - 1
    records = entries + (entries - 1) * has_average + len(moments) + steps_on_host
    numbers = flops.parameters(shape) + flops.trainable_parameters(shape) * has_average + steps_on_host
    return 4 * numbers + int(moments.sum()) + _BYTES_PER_RECORD * records


def _run_bytes(config: TrainConfig, steps: int, checkpoint_bytes: int) -> int:
    """The most that the run's folder takes: its checkpoint files and the metrics.

    A file is written whole before the oldest one goes, so there is one more for a moment than are kept.
    """
    run = config.run
    before = math.ceil(steps / run.ckpt_every) - 1  # saves before the last one
    kept = min(before, run.keep_last) if run.keep_last else before
    if run.keep_last and run.keep_every:
        kept += (before - kept) * run.ckpt_every // math.lcm(run.keep_every, run.ckpt_every)
    return (kept + 1) * checkpoint_bytes + steps * _METRICS_BYTES_PER_STEP


# ---- notes ----

def _memory_notes(config: TrainConfig, device: Device, num_devices: int, memory: MemoryPlan,
                  micro_batch: int) -> list[str]:
    largest = ", ".join(f"{c.category.replace('_', ' ')}{f' of {c.module}' if c.module else ''} {_size(c.bytes)}"
                        for c in memory.contributors)
    notes = [f"Largest at the peak ({memory.peak_phase}): {largest}."]
    if device.generation == "cpu" and num_devices > 1:
        notes.append(f"Memory is that of one process; {num_devices} share {_size(device.memory_bytes)}, "
                     f"{_size(memory.memory_bytes)} each.")
    missing = memory.device_used_bytes["high"] - memory.memory_bytes
    if memory.verdict == "does_not_fit":
        short = memory.device_used_bytes["mid"] - memory.memory_bytes
        notes.append(f"Does not fit: {_size(short)} more than {device.name} has"
                     + (f"; it would run out in phase {memory.oom_phase}." if memory.oom_phase else "."))
    elif memory.verdict == "tight":
        notes.append(f"Tight: the allocator gives its cache back {memory.num_retries} times in three steps: slow."
                     if memory.num_retries else
                     f"Tight: the high figure is {_size(missing)} above the device's memory.")
    extra = _amp_costs(config, device, memory, micro_batch)
    if extra > 0:
        notes.append(f"At {micro_batch} images AMP costs about {_size(extra)}: its copies of the weights take more "
                     "than it saves in activations.")
    if config.precision.compile:
        notes.append("--compile is not modelled: memory and time are those of eager mode, an upper bound.")
    if config.memory.tensor_parallel > 1:
        notes.append("--tensor-parallel is not modelled: memory is that of whole layers, an upper bound.")
    if config.memory.grad_accum > 1 and num_devices > 1 and config.memory.parallel == "ddp":
        notes.append("With accumulation under DDP gradients exist twice: in the buckets and, until the last "
                     "micro-batch, beside them.")
    return notes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.1f} MiB"


def _amp_costs(config: TrainConfig, device: Device, memory: MemoryPlan, micro_batch: int) -> int:
    """Bytes that AMP adds to the allocated peak, negative where it saves.

    Blocks are alike, so models of two and three of them, which are traced in no time, tell it for every depth. The VAE
    takes no part in it.
    """
    if (not config.precision.amp or memory.peak_phase == "encode"
            or memory.by_category["cast_copies"] < memory.by_category["activations"] / 8):
        return 0
    peaks: dict[tuple[int, bool], int] = {}
    without_vae = {"data": "latents"} if config.encodes_in_loop else {}
    for depth in (2, 3):
        for amp in (True, False):
            few = replace(config, depth=depth, amp=amp, amp_dtype=config.precision.amp_dtype if amp else "auto",
                          ckpt_blocks=None, sample_every=0, **without_vae)
            step = traced(few, device, micro_batch, num_steps=1).at(micro_batch)
            peaks[depth, amp] = summarize(step.events, rounded(step.events.bytes))["peak_allocated_bytes"]
    two, three = (peaks[depth, True] - peaks[depth, False] for depth in (2, 3))
    return two + (config.shape.depth - 2) * (three - two)


def _loader_note(config: TrainConfig, device: Device, time: step_time.TimePlan, micro_batch: int, rate: float) -> str:
    """What one loader worker makes against what a step that never waits consumes."""
    waiting, given = time.by_phase.get("data", 0.0), config.data.num_workers
    consumed = micro_batch * config.memory.grad_accum / (time.step_seconds["mid"] - waiting)
    needed = math.ceil(consumed / rate)
    says = (f"A loader worker makes {rate:,.0f} images/s of this data here and the step consumes {consumed:,.0f} "
            "per device")
    if device.generation == "cpu":
        return f"{says}; loading and training share this CPU's cores."
    advice = "enough" if given >= needed else f"too few: give --num-workers {needed} or more"
    return f"{says}: {needed} worker{'s' if needed > 1 else ''} needed, --num-workers {given} is {advice}."

"""How long a step takes, what bounds it, and what a run of them costs: from the traced operations. Needs no torch.

On a calibrated CPU every operation is looked up among measured ones; on a GPU it is the larger of arithmetic and memory
traffic over the catalogue's peaks (``dit.planner.priors``), corrected per class where the GPU has been measured.
Recomputation and accumulation are in the trace as they run.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dit.config import TrainConfig
from dit.planner import communication, flops, priors
from dit.planner.calibration import PRIORS, Calibration
from dit.planner.catalogue import Device, Node
from dit.planner.hardware import default_node
from dit.planner.op_class import Work, work_of, works
from dit.planner.trace import Op, StepTrace, Trace

Counted = list[tuple[Op, Work, int]]
"""Operations of a step, their work, and how often each one runs."""


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a step on one of ``num_devices`` devices, and where they go.

    ``by_phase`` (mid) sums to the mid of ``step_seconds``; ``by_class`` is the device's work by kind of operation.
    ``mfu`` is the model's operations, without recomputation, over the dense peak; None where no peak is known.
    ``bound_by``: compute, memory bandwidth, dispatch, data loading or communication.
    """

    step_seconds: dict[str, float]
    by_phase: dict[str, float]
    by_class: dict[str, float]
    images_per_second: float
    mfu: float | None
    bound_by: str
    calibration: dict[str, str]
    communication_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPlan:
    """A whole run: hours; device-hours, cost and energy at mid (None where a price or the power is unknown)."""

    steps: int
    hours: dict[str, float]
    device_hours: float
    cost: float | None
    energy_kwh: float | None


@dataclass
class _Tally:
    """Sums over the operations of a step."""

    device: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds by phase
    host: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_class: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    compute_bound: float = 0.0
    memory_bound: float = 0.0


def compute_dtype(config: TrainConfig, device: Device) -> str:
    """What matrix products of the network run in: fp32, tf32, bf16 or fp16."""
    precision = config.precision
    if precision.amp:
        return ("bf16" if device.has_bf16 else "fp16") if precision.amp_dtype == "auto" else precision.amp_dtype
    return "tf32" if precision.tf32 and device.peak_flops.get("tf32") else "fp32"


def predict_time(trace: StepTrace, config: TrainConfig, device: Device, num_devices: int,
                 calibration: Calibration | None = None, *, data_seconds: float | None = None,
                 node: Node | None = None) -> TimePlan:
    """Plan a step of ``config`` on each of ``num_devices`` devices, whose micro-batch is the trace's.

    ``data_seconds`` is what one loader process needs for one micro-batch; None takes the calibration's figure where the
    data needs no reading, else nothing. Raises ValueError for a CPU without calibration and a device without peaks.
    """
    ops = [(op, work, 1) for op, work in zip(trace.ops, works(trace.ops), strict=True)]
    return predict_counted(ops, trace.micro_batch, config, device, num_devices, calibration, data_seconds=data_seconds,
                           node=node)


def counted(trace: Trace, micro_batch: int) -> Counted:
    """The operations of a step with the recorded micro-steps (one or two), each distinct one once."""
    table, sequence = trace.op_table_at(micro_batch), trace.recording.op_sequence.astype(np.int64)
    size = len(table) + 1
    pairs, counts = np.unique(np.append(-1, sequence[:-1]) * size + sequence + size, return_counts=True)
    result = []
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        before, index = divmod(pair, size)
        result.append((table[index], work_of(table[index], table[before - 1] if before else None), count))
    return result


def accumulated(ops: Counted, accumulation: int) -> Counted:
    """Operations of a step of ``accumulation`` micro-steps: the second one recorded stands for every later one."""
    if accumulation <= 2:
        return ops
    return [(op, work, count * (accumulation - 1))
            if op.micro_step == 1 and op.phase not in ("optimizer", "ema") else (op, work, count)
            for op, work, count in ops]


def predict_counted(ops: Counted, micro_batch: int, config: TrainConfig, device: Device, num_devices: int,
                    calibration: Calibration | None = None, *, data_seconds: float | None = None,
                    node: Node | None = None) -> TimePlan:
    """As :func:`predict_time`, from counted operations at ``micro_batch``."""
    calibration = calibration or PRIORS
    is_cpu = device.generation == "cpu"
    tally = _cpu_tally(ops, calibration) if is_cpu else _gpu_tally(ops, config, device, calibration)
    phases = _phases(tally)
    compute = sum(phases.values())
    loading, added = _data(config, micro_batch, calibration, data_seconds, device, compute)
    exchange = communication.plan_ddp(
        config, device, num_devices, node or default_node(device), calibration=calibration,
        backward_seconds=phases.get("backward", 0.0) / config.memory.grad_accum)
    if added:
        phases["data"] = phases.get("data", 0.0) + added
    phases["backward"] = phases.get("backward", 0.0) + exchange.exposed_seconds
    saves = _saves(config, device)
    phases["save"] = saves
    mid = sum(phases.values())
    spread = math.exp(calibration.spread)
    images = micro_batch * config.memory.grad_accum * num_devices
    peak = device.peak_flops.get(compute_dtype(config, device))
    model_flops = flops.train_flops_per_image(config.shape) * images / num_devices
    bound_by = _bound_by(tally, compute, loading, exchange.exposed_seconds)
    return TimePlan(
        step_seconds={"low": mid / spread, "mid": mid, "high": mid * spread}, by_phase=phases,
        by_class={name: float(seconds) for name, seconds in tally.by_class.items()},
        images_per_second=images / mid, mfu=model_flops / mid / peak if peak else None, bound_by=bound_by,
        calibration={"kind": calibration.kind, "source": calibration.source},
        communication_seconds=exchange.seconds, exposed_communication_seconds=exchange.exposed_seconds)


# ---- the device's and the host's work ----

def _cpu_tally(ops: Counted, calibration: Calibration) -> _Tally:
    if calibration.kind != "measured":
        raise ValueError("this CPU has not been measured; run scripts/calibrate.py (under a minute)")
    tally = _Tally()
    for op, each, count in ops:
        inside = calibration.seconds(each) * count
        around = (calibration.per_op.get(op.phase, 0.0) + calibration.per_byte.get(op.phase, 0.0) * each.bytes) * count
        tally.device[op.phase] += inside + around
        tally.by_class[each.cls] += inside
        tally.by_class["overhead"] += around
        if each.flops:
            tally.compute_bound += inside
        else:
            tally.memory_bound += inside
    return tally


def _gpu_tally(ops: Counted, config: TrainConfig, device: Device, calibration: Calibration) -> _Tally:
    rates = priors.rates(device, tf32=config.precision.tf32)
    tally = _Tally()
    memo: dict[tuple, tuple[float, bool]] = {}
    for op, each, count in ops:
        key = (each.key, each.size, each.bytes)
        if key not in memo:
            memo[key] = priors.device_seconds(each, rates)
        seconds, is_compute = memo[key]
        seconds *= calibration.factors.get(each.cls, 1.0) * count
        tally.device[op.phase] += seconds
        tally.by_class[each.cls] += seconds
        tally.host[op.phase] += priors.host_seconds(each, op.phase) * count * calibration.factors.get("dispatch", 1.0)
        if is_compute:
            tally.compute_bound += seconds
        else:
            tally.memory_bound += seconds
    return tally


def _phases(tally: _Tally) -> dict[str, float]:
    """Seconds by phase. The host runs ahead of the device, so over a whole step the slower of the two decides."""
    device, host = sum(tally.device.values()), sum(tally.host.values())
    slower = tally.host if host > device else tally.device
    return {phase: float(seconds) for phase, seconds in slower.items() if seconds}


def _data(config: TrainConfig, micro_batch: int, calibration: Calibration, data_seconds: float | None, device: Device,
          compute: float) -> tuple[float, float]:
    """(seconds the loaders need per step, seconds they add to the step)."""
    if data_seconds is None:
        if config.data.data not in ("digits", "synthetic") or not calibration.data:
            return 0.0, 0.0
        numbers = micro_batch * math.prod(config.latent_shape)
        data_seconds = (calibration.data["per_batch"] + calibration.data["per_sample"] * micro_batch
                        + calibration.data["per_number"] * numbers)
    needed = data_seconds * config.memory.grad_accum
    workers = config.data.num_workers
    if not workers:
        return needed, needed
    if device.generation == "cpu":  # loaders and training share the cores
        cores = device.num_sms or 1
        return needed / min(cores, workers), max(needed / cores, needed / workers - compute)
    return needed / workers, max(0.0, needed / workers - compute)


def _saves(config: TrainConfig, device: Device) -> float:
    """Seconds per step that checkpoint files cost: weights, average and two moments through the host's disk."""
    num_bytes = 4 * flops.parameters(config.shape) * (3 + (config.optim.ema != "off"))
    return num_bytes / priors.DISK_BYTES_PER_SECOND / config.run.ckpt_every


def _bound_by(tally: _Tally, compute: float, loading: float, exposed: float) -> str:
    device, host = sum(tally.device.values()), sum(tally.host.values())
    if loading > compute:
        return "data loading"
    if exposed > compute:
        return "communication"
    around = tally.by_class.get("overhead", 0.0)
    if host > device or around > tally.compute_bound + tally.memory_bound:
        return "dispatch"
    return "compute" if tally.compute_bound >= tally.memory_bound else "memory bandwidth"


# ---- the whole run ----

def run_plan(time: TimePlan, steps: int, num_devices: int, device: Device,
             price_per_device_hour: float | None = None) -> RunPlan:
    """Hours, cost and energy of ``steps`` steps. Energy takes the board's full power, which is the most it can be."""
    hours = {name: seconds * steps / 3600 for name, seconds in time.step_seconds.items()}
    device_hours = hours["mid"] * num_devices
    watts = device.board_power_watts
    cost = None if price_per_device_hour is None else device_hours * price_per_device_hour
    return RunPlan(steps, hours, device_hours, cost, None if watts is None else device_hours * watts / 1000)


def as_dict(time: TimePlan) -> Mapping[str, object]:
    """The plan's "time" entry of plan.json."""
    return {"step_seconds": time.step_seconds, "by_phase": time.by_phase, "by_class": time.by_class,
            "images_per_second": time.images_per_second, "mfu": time.mfu, "bound_by": time.bound_by}

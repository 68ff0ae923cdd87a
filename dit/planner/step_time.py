"""How long a step takes, what bounds it, and what a run of them costs: from the traced operations. Needs no torch.

On a calibrated CPU every operation is looked up among measured ones; on a GPU it is the larger of arithmetic and memory
traffic over the catalogue's peaks (``dit.planner.priors``), corrected per class where the GPU has been measured.
Recomputation and accumulation are in the trace as they run.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dit.config import TrainConfig
from dit.planner import communication, flops, priors
from dit.planner.calibration import PRIORS, Calibration
from dit.planner.catalogue import GIB, Device, Node
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
class Tally:
    """Sums over operations: seconds of device and host by phase, of the device by class, and by what bounds it."""

    device: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_class: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    compute_bound: float = 0.0
    memory_bound: float = 0.0

    def plus(self, other: "Tally", times: int = 1) -> "Tally":
        """A new tally: this one, and ``times`` the other one."""
        result = Tally(compute_bound=self.compute_bound + times * other.compute_bound,
                       memory_bound=self.memory_bound + times * other.memory_bound)
        for name in ("device", "host", "by_class"):
            sums = getattr(result, name)
            sums.update(getattr(self, name))
            for key, seconds in getattr(other, name).items():
                sums[key] += times * seconds
        return result


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
    tally = tally_of(ops, config, device, calibration, communication.shard_size(config, num_devices))
    return predict_tallied(tally, micro_batch, config, device, num_devices, calibration, data_seconds=data_seconds,
                           node=node)


def predict_tallied(tally: Tally, micro_batch: int, config: TrainConfig, device: Device, num_devices: int,
                    calibration: Calibration | None = None, *, data_seconds: float | None = None,
                    node: Node | None = None) -> TimePlan:
    """As :func:`predict_time`, from the sums over a step's operations."""
    calibration, node = calibration or PRIORS, node or default_node(device)
    accumulation = config.memory.grad_accum
    if device.generation != "cpu" and num_devices > 1:
        tally = tally.plus(_wrapping(config, num_devices, priors.rates(device, tf32=config.precision.tf32)))
    phases = _phases(tally)
    compute = sum(phases.values())
    loading, added = _data(config, micro_batch, calibration, data_seconds, device, compute)
    exchange = communication.plan_exchange(
        config, device, num_devices, node, calibration=calibration,
        forward_seconds=phases.get("forward", 0.0) / accumulation,
        backward_seconds=phases.get("backward", 0.0) / accumulation)
    in_forward = exchange.exposed_forward_seconds
    for phase, extra in (("data", added), ("forward", in_forward), ("backward", exchange.exposed_seconds - in_forward),
                         ("save", _saves(config, device))):
        if extra or phase != "data":
            phases[phase] = phases.get(phase, 0.0) + extra
    mid, spread = sum(phases.values()), math.exp(calibration.spread)
    images = micro_batch * accumulation * config.data_ranks(num_devices)
    peak = device.peak_flops.get(compute_dtype(config, device))
    model_flops = flops.train_flops_per_image(config.shape) * images / num_devices
    return TimePlan(
        step_seconds={"low": mid / spread, "mid": mid, "high": mid * spread}, by_phase=phases,
        by_class={name: float(seconds) for name, seconds in tally.by_class.items()},
        images_per_second=images / mid, mfu=model_flops / mid / peak if peak else None,
        bound_by=_bound_by(tally, compute, loading, exchange.exposed_seconds),
        calibration={"kind": calibration.kind, "source": calibration.source},
        communication_seconds=exchange.seconds, exposed_communication_seconds=exchange.exposed_seconds,
        notes=tuple(_notes(config, device, num_devices, node, exchange)))


def _notes(config: TrainConfig, device: Device, num_devices: int, node: Node | None,
           exchange: communication.Exchange) -> Iterable[str]:
    """What the time takes for granted, and what it leaves out."""
    if config.memory.tensor_parallel > 1:
        yield (f"--tensor-parallel {config.memory.tensor_parallel} is not modelled: the time is that of whole layers "
               "on every device, without the exchanges inside blocks.")
    if num_devices > 1 and exchange.seconds and node is not None and device.generation != "cpu":
        yield (f"Each device sends {exchange.bytes_sent / GIB:.2f} GiB per step, in "
               f"{1e3 * exchange.seconds:.1f} ms of which {1e3 * exchange.exposed_seconds:.1f} are not hidden; "
               f"assumed: {nodes_in_words(node, num_devices)}.")


def nodes_in_words(node: Node, num_devices: int) -> str:
    """The machines that ``num_devices`` devices are taken to stand in."""
    nodes = math.ceil(num_devices / node.devices_per_node)
    if nodes == 1:
        return f"one {node.name} node, {node.link.name} inside"
    return (f"{nodes} {node.name} nodes of {node.devices_per_node} devices, {node.link.name} inside, "
            f"{node.network.name} between")


# ---- the device's and the host's work ----

def tally_of(ops: Counted, config: TrainConfig, device: Device, calibration: Calibration, shards: int = 1) -> Tally:
    """Sums over the operations of a step, whose optimizer and average have 1 / ``shards`` of the weights each.

    Raises ValueError for a CPU without calibration and a device without peaks.
    """
    if shards > 1:
        ops = [(op, _shared(work, shards) if op.phase in ("optimizer", "ema") else work, count)
               for op, work, count in ops]
    if device.generation == "cpu":
        return _cpu_tally(ops, calibration)
    return _gpu_tally(ops, config, device, calibration)


def _shared(work: Work, shards: int) -> Work:
    """One device's part of an operation over all weights: as many tensors, a share of their bytes."""
    *tensors, num_bytes = work.size
    return dataclasses.replace(work, size=(*tensors, max(1.0, num_bytes / shards)), bytes=work.bytes // shards)


def _wrapping(config: TrainConfig, num_devices: int, rates: priors.Rates) -> Tally:
    """What DDP or FSDP2 add to a GPU's and its host's work besides sending.

    DDP copies each gradient into its bucket (8 bytes a weight). FSDP2 takes gathered weights apart, which is a copy,
    after each of two gathers, where autocast would have made one of 6 bytes, and puts gradients together before they
    are sent; under --amp that replaces autocast's own copy of them.
    """
    trained, accumulation = flops.trainable_parameters(config.shape), config.memory.grad_accum
    tally = Tally()
    per_second = rates.bandwidth * priors.BANDWIDTH_EFFICIENCY["copy"]
    if config.memory.parallel == "fsdp":
        amp, depth = config.precision.amp, config.shape.depth
        tally.device["forward"] = accumulation * trained * (1 if amp else 8) / per_second
        tally.device["backward"] = trained * (accumulation * (1 if amp else 8) + (0 if amp else 8)) / per_second
        for phase in ("forward", "backward"):
            tally.host[phase] = accumulation * depth * priors.FSDP_HOST_SECONDS
    else:
        tally.device["backward"] = trained * 8 / per_second
    tally.memory_bound = sum(tally.device.values())
    tally.by_class["copy"] = tally.memory_bound
    return tally


def _cpu_tally(ops: Counted, calibration: Calibration) -> Tally:
    if calibration.kind != "measured":
        raise ValueError("this CPU has not been measured; run scripts/calibrate.py (under a minute)")
    tally = Tally()
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


def _gpu_tally(ops: Counted, config: TrainConfig, device: Device, calibration: Calibration) -> Tally:
    rates = priors.rates(device, tf32=config.precision.tf32)
    tally = Tally()
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


def _phases(tally: Tally) -> dict[str, float]:
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


def _bound_by(tally: Tally, compute: float, loading: float, exposed: float) -> str:
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

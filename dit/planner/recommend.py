"""The configuration to run: a search over what can be chosen, the trade-offs that are left, one choice with reasons.

What a person asked for stays: the model (unless the goal is quality), the global batch, the data, the optimizer.
Searched are devices and how many of them, micro-batch and accumulation, mixed precision, and checkpointed blocks. Every
row that is returned has been planned in full and fits; limits are held against the high figures of hours and cost.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dit.config import PRESETS, SECTION_OF, TrainConfig, UsageError, flag, replace
from dit.planner import autocast_dtype, communication, flops, memory_of, traced
from dit.planner.calibration import PRIORS, Calibration
from dit.planner.catalogue import NODES, Device
from dit.planner.hardware import attention_kernel, default_node
from dit.planner.memory import MemoryPlan, rounded
from dit.planner.step_time import Counted, TimePlan, accumulated, counted, predict_counted
from dit.planner.trace import Trace

GOALS = ("quality", "quick", "cost")
MAX_DEVICES = 64
MAX_ROWS = 8
SMALLEST_MICRO_BATCH = 4  # below, a step is all overhead
# An hour of one device as rented, in dollars: prior, the middle of list prices of GPU clouds in 2025. Given prices win.
PRICES = {"V100": 0.6, "T4": 0.35, "A10": 0.75, "A100-40GB": 1.3, "A100-80GB": 1.8, "A100-PCIe": 1.6, "RTX-3090": 0.25,
          "RTX-4090": 0.45, "RTX-5090": 0.7, "RTX-6000-Ada": 0.8, "L4": 0.6, "L40S": 1.0, "H100": 2.7, "H100-PCIe": 2.3,
          "H100-NVL": 2.6, "H200": 3.3, "B200": 5.0, "MI300X": 2.5}


@dataclass(frozen=True)
class Wish:
    """What a person wants. Limits are None where there is none; ``prices`` are per device-hour, by catalogue name."""

    goal: str = "cost"
    steps: int = 400_000
    max_hours: float | None = None
    max_cost: float | None = None
    max_devices: int = 8
    prices: Mapping[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise UsageError for what cannot be wished."""
        if self.goal not in GOALS:
            raise UsageError(f"--goal {self.goal}: unknown; one of {', '.join(GOALS)}")
        for name in ("steps", "max_hours", "max_cost", "max_devices"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be above 0")
        for name, price in self.prices.items():
            if not 0 < price < float("inf"):
                raise UsageError(f"--price-per-device-hour {price} for {name}: must be above 0")


@dataclass(frozen=True)
class Candidate:
    """One way to run. Hours and cost are (mid, high); ``memory_bytes`` is the high figure of device-used memory, an
    estimate until ``memory`` is planned.
    """

    config: TrainConfig
    device: Device
    num_devices: int
    micro_batch: int
    step_seconds: float
    hours: tuple[float, float]
    cost: tuple[float, float]
    memory_bytes: float
    time: TimePlan = field(repr=False)
    memory: MemoryPlan | None = field(default=None, repr=False)

    @property
    def torchrun(self) -> str:
        """The line that starts it, with every setting that is not the default."""
        per_node = (default_node(self.device) or NODES["pcie4-box"]).devices_per_node
        nodes = -(-self.num_devices // per_node)
        start = "python train.py"
        if self.num_devices > 1:
            across = f"--nnodes={nodes} " if nodes > 1 else ""
            start = f"torchrun {across}--nproc_per_node={self.num_devices // nodes} train.py"
        return " ".join([start, *_flags(self.config)])


def _flags(config: TrainConfig) -> Iterator[str]:
    default = TrainConfig()
    for name, section in SECTION_OF.items():
        value = getattr(getattr(config, section), name)
        if name == "model" or value == getattr(getattr(default, section), name):
            continue
        if isinstance(value, bool):
            yield flag(name) if value else flag("no_" + name)
        else:
            yield f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
    yield f"--model {config.model.model}"


@dataclass(frozen=True)
class Advice:
    """The trade-offs that are left (fastest first), the choice among them, why, and what to relax if nothing holds."""

    rows: tuple[Candidate, ...]
    choice: Candidate
    reasons: tuple[str, ...]
    holds: bool
    relax: str | None
    num_candidates: int


def recommend(config: TrainConfig, devices: Sequence[Device], wish: Wish, *,
              calibration_of: Callable[[Device], Calibration | None] = lambda device: None,
              progress: Callable[[str], None] = lambda said: None, costs: "Costs | None" = None) -> Advice:
    """Search for ``config``'s model (or, with the goal quality, the largest that holds) on any of ``devices``.

    ``costs`` of an earlier search saves making its traces again. Raises UsageError where no device holds the model at
    all, or where a wish cannot be.
    """
    wish.check()
    fallback: Advice | None = None
    costs = costs or Costs()
    for model in _models(config, wish):
        variant = replace(config, model=model) if model != config.model.model else config
        found = list(_candidates(variant, devices, wish, costs, calibration_of, progress))
        advice = _advise(found, wish)
        if advice is not None and advice.holds:
            return advice
        fallback = advice or fallback
    if fallback is None:
        names = ", ".join(device.name for device in devices)
        raise UsageError(f"--recommend: {config.model.model} at --global-batch-size {config.memory.global_batch_size} "
                         f"fits on none of: {names}, even with --amp and --ckpt; name a device with more memory")
    return fallback


def _models(config: TrainConfig, wish: Wish) -> list[str]:
    """The given model, or for quality every preset of its patch size, the largest first."""
    if wish.goal != "quality" or config.model.model not in PRESETS:
        return [config.model.model]
    patch = PRESETS[config.model.model]["patch_size"]
    names = [name for name, sizes in PRESETS.items() if sizes["patch_size"] == patch]
    return sorted(names, key=lambda name: -flops.parameters(replace(config, model=name).shape))


# ---- candidates ----

def _candidates(config: TrainConfig, devices: Sequence[Device], wish: Wish, costs: "Costs", calibration_of,
                progress) -> Iterator[Candidate]:
    for device in devices:
        calibration = calibration_of(device) or PRIORS
        if 4 * 4 * flops.parameters(config.shape) > device.memory_bytes:  # weights, gradients and two moments alone
            continue
        for choice in _toggles(config):
            blocks = choice.checkpointed_blocks
            progress(f"{choice.model.model} on {device.name}: {'--amp' if choice.precision.amp else 'no --amp'}, "
                     f"{blocks} of {choice.shape.depth} blocks checkpointed")
            yield from _on_device(choice, device, wish, costs, calibration)


def _toggles(config: TrainConfig) -> Iterator[TrainConfig]:
    """With and without mixed precision (kept where asked for), no, half and all blocks checkpointed."""
    depth = config.shape.depth
    for amp in dict.fromkeys((True, config.precision.amp)):
        amp_dtype = config.precision.amp_dtype if config.precision.amp else "auto"
        for blocks in dict.fromkeys((0, depth // 2, depth)):
            yield replace(config, amp=amp, amp_dtype=amp_dtype if amp else "auto", ckpt=blocks > 0, grad_accum=1,
                          ckpt_blocks=blocks if 0 < blocks < depth else None)


def _on_device(config: TrainConfig, device: Device, wish: Wish, costs: "Costs",
               calibration: Calibration) -> Iterator[Candidate]:
    """All micro-batches and numbers of devices for one set of toggles."""
    batch = config.memory.global_batch_size
    for count in _powers(min(wish.max_devices, MAX_DEVICES)):
        for accumulation in _powers(batch // count):
            micro_batch, rest = divmod(batch, count * accumulation)
            if rest or (micro_batch < SMALLEST_MICRO_BATCH and accumulation > 1):
                continue
            variant = replace(config, grad_accum=accumulation)
            memory_bytes = costs.memory_bytes(variant, device, count, micro_batch)
            if memory_bytes <= device.memory_bytes:
                time = costs.time(variant, device, count, micro_batch, calibration)
                yield _candidate(variant, device, count, micro_batch, memory_bytes, time, wish)


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _candidate(config: TrainConfig, device: Device, count: int, micro_batch: int, memory_bytes: float,
               time: TimePlan, wish: Wish) -> Candidate:
    hours = tuple(time.step_seconds[end] * wish.steps / 3600 for end in ("mid", "high"))
    price = price_of(device, wish)
    return Candidate(config, device, count, micro_batch, time.step_seconds["mid"], hours,
                     tuple(each * count * price for each in hours), memory_bytes, time)


def price_of(device: Device, wish: Wish) -> float:
    """Per device-hour: as given, else the prior by any of the device's aliases, else 1 (cost is then device-hours)."""
    if device.name in wish.prices:
        return wish.prices[device.name]
    return next((PRICES[alias] for alias in (device.name, *device.aliases) if alias in PRICES), 1.0)


class Costs:
    """Time and memory of any candidate, from traces that devices share. Make one per search.

    Memory is the peak of the tensors plus the catalogue's overheads, with the allocator's share taken as a usual one;
    what is recommended is planned in full.
    """

    def __init__(self):
        self._traces: dict[tuple, Trace] = {}
        self._ops: dict[tuple, Counted] = {}
        self._peaks: dict[tuple, float] = {}

    def _trace(self, config: TrainConfig, device: Device, micro_batch: int) -> tuple[tuple, Trace]:
        """(what it depends on, the trace), read from one recording where that serves every micro-batch."""
        recorded = replace(config, grad_accum=min(config.memory.grad_accum, 2))
        dtype, kernel = autocast_dtype(config, device), "cpu"
        if device.generation != "cpu":
            head_size = config.shape.hidden_size // config.shape.num_heads
            kernel = attention_kernel(device, dtype or "fp32", head_size, config.precision.attention)
        key = recorded, dtype, kernel
        if micro_batch > 1 and key in self._traces:
            return key, self._traces[key]
        trace = traced(recorded, device, micro_batch)
        key = key if trace.is_affine else (*key, micro_batch)
        return key, self._traces.setdefault(key, trace)

    def time(self, config: TrainConfig, device: Device, num_devices: int, micro_batch: int,
             calibration: Calibration) -> TimePlan:
        """The plan of a step."""
        key, trace = self._trace(config, device, micro_batch)
        key = *key, micro_batch
        if key not in self._ops:
            self._ops[key] = counted(trace, micro_batch)
        ops = accumulated(self._ops[key], config.memory.grad_accum)
        return predict_counted(ops, micro_batch, config, device, num_devices, calibration)

    def memory_bytes(self, config: TrainConfig, device: Device, num_devices: int, micro_batch: int) -> float:
        """High figure of a device's memory, about."""
        key, trace = self._trace(config, device, micro_batch)
        key = *key, micro_batch
        if key not in self._peaks:
            self._peaks[key] = float(np.cumsum(rounded(trace.events_at(micro_batch).bytes)).max())
        accumulates, several = config.memory.grad_accum > 1, num_devices > 1
        buckets = communication.gradient_bytes(config.shape) if several and accumulates else 0
        usual = 1.15 if config.memory.ckpt or config.encodes_in_loop else 1.04
        outside = device.context_bytes[2] + 2 * device.cublas_workspace_bytes + 1.0e9 * several
        return self._peaks[key] * usual + buckets + outside


# ---- the choice ----

def _advise(found: list[Candidate], wish: Wish) -> Advice | None:
    """Rows that nothing beats, planned in full, and the best of them; None if nothing fits."""
    holding = [each for each in found if not broken(each, wish)]
    pool, holds = (holding, True) if holding else (found, False)
    rows: list[Candidate] = []
    pool = sorted(pool, key=lambda each: (_rank(each, wish, holds), each.memory_bytes))
    while pool and not rows:
        front = pareto(pool)
        tried = [_planned(each) for each in _spread(front, wish, holds)]
        rows = [each for each in tried if each is not None]
        pool = [each for each in pool if each not in front]
    if not rows:
        return None
    choice = min(rows, key=lambda each: (_rank(each, wish, holds), each.memory_bytes))
    rows = sorted(pareto(rows), key=lambda each: each.hours)
    relax = None if holds else what_to_relax(found, choice, wish)
    return Advice(tuple(rows), choice, tuple(reasons(choice, rows, wish)), holds, relax, len(found))


def broken(candidate: Candidate, wish: Wish) -> list[str]:
    """The limits that a candidate does not keep, by their high figures."""
    limits = (("max_hours", candidate.hours[1], wish.max_hours), ("max_cost", candidate.cost[1], wish.max_cost),
              ("max_devices", candidate.num_devices, wish.max_devices))
    return [name for name, value, limit in limits if limit is not None and value > limit]


def _rank(candidate: Candidate, wish: Wish, holds: bool) -> tuple[float, ...]:
    """The goal; where no candidate keeps the limits, how far it is from them comes first."""
    excess = 0.0
    if not holds:
        over = [candidate.hours[1] / wish.max_hours if wish.max_hours else 0.0,
                candidate.cost[1] / wish.max_cost if wish.max_cost else 0.0]
        excess = max(over)
    hours, cost = candidate.hours[0], candidate.cost[0]
    return (excess, hours, cost) if wish.goal == "quick" else (excess, cost, hours)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in hours, cost and memory together."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: (c.hours[0], c.cost[0], c.memory_bytes)):
        if not any(other.cost[0] <= each.cost[0] and other.memory_bytes <= each.memory_bytes for other in front):
            front.append(each)
    return front


def _spread(front: list[Candidate], wish: Wish, holds: bool) -> list[Candidate]:
    """At most MAX_ROWS of a front: the best for the goal, then evenly from fast to cheap."""
    best = sorted(front, key=lambda each: _rank(each, wish, holds))[:MAX_ROWS // 2]
    step = max(1, len(front) // (MAX_ROWS - len(best)))
    return list({id(each): each for each in [*best, *front[::step]]}.values())[:MAX_ROWS]


def _planned(candidate: Candidate) -> Candidate | None:
    """The candidate with its memory planned in full, or None if it does not surely fit."""
    step = traced(candidate.config, candidate.device, candidate.micro_batch).at(candidate.micro_batch)
    memory = memory_of(candidate.config, candidate.device, candidate.num_devices, step)
    if memory.verdict != "fits":
        return None
    return dataclasses.replace(candidate, memory=memory, memory_bytes=memory.device_used_bytes["high"])


def reasons(choice: Candidate, rows: Sequence[Candidate], wish: Wish) -> Iterator[str]:
    """Why this one, in sentences with figures."""
    said = {"cost": "the cheapest", "quick": "the fastest", "quality": "the largest model that holds, at its cheapest"}
    yield (f"{said[wish.goal]} of what keeps the limits: {choice.hours[0]:.1f} h (at most {choice.hours[1]:.1f}) and "
           f"{choice.cost[0]:.0f} (at most {choice.cost[1]:.0f}) on {choice.num_devices} x {choice.device.name}")
    if choice.config.precision.amp:
        yield f"--amp: matrix products run in {autocast_dtype(choice.config, choice.device)}, weights stay fp32"
    blocks, depth = choice.config.checkpointed_blocks, choice.config.shape.depth
    if blocks:
        yield f"--ckpt on {blocks} of {depth} blocks: what it takes for a micro-batch of {choice.micro_batch}"
    else:
        yield f"no checkpointing: a micro-batch of {choice.micro_batch} fits without"
    if choice.config.memory.grad_accum > 1:
        memory = choice.config.memory
        yield f"--grad-accum {memory.grad_accum} keeps the global batch at {memory.global_batch_size}"
    share = choice.time.exposed_communication_seconds / choice.step_seconds
    if choice.num_devices > 1:
        yield f"{choice.num_devices} devices: exchanging gradients adds {100 * share:.0f} % to a step"
    faster = [each for each in rows if each.hours[0] < choice.hours[0]]
    if faster:
        next_one = faster[-1]
        yield (f"faster for more: {next_one.hours[0]:.1f} h and {next_one.cost[0]:.0f} on {next_one.num_devices} x "
               f"{next_one.device.name}")


def what_to_relax(found: Sequence[Candidate], nearest: Candidate, wish: Wish) -> str:
    """One line: which limit stands in the way, and at what value the nearest answer would hold."""
    values = {"max_hours": nearest.hours[1], "max_cost": nearest.cost[1], "max_devices": nearest.num_devices}
    limits = broken(nearest, wish)
    said = " and ".join(f"--{name.replace('_', '-')} {values[name]:.0f}" for name in limits)
    possible = [name for name in ("max_hours", "max_cost")
                if any(set(broken(each, wish)) <= {name} for each in found)]
    one = f"; relaxing --{possible[0].replace('_', '-')} alone is enough" if len(possible) == 1 else ""
    return f"no configuration keeps every limit; the nearest one needs {said}{one}"


def rows_for_people(advice: Advice) -> list[tuple[str, ...]]:
    """The table of an advice, a header first; the choice is marked with an asterisk."""
    header = ("", "devices", "micro-batch", "accumulation", "AMP", "checkpointed", "ms/step", "hours (at most)",
              "cost (at most)", "memory GiB", "bound by")
    rows = [header]
    for each in advice.rows:
        config = each.config
        rows.append(("*" if each is advice.choice else "", f"{each.num_devices} x {each.device.name}",
                     str(each.micro_batch), str(config.memory.grad_accum),
                     autocast_dtype(config, each.device) or "no", f"{config.checkpointed_blocks}/{config.shape.depth}",
                     f"{1e3 * each.step_seconds:.0f}", f"{each.hours[0]:.1f} ({each.hours[1]:.1f})",
                     f"{each.cost[0]:.0f} ({each.cost[1]:.0f})", f"{each.memory_bytes / 2**30:.1f}",
                     each.time.bound_by))
    return rows

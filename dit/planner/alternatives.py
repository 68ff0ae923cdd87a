"""The same run with other toggles: what would make it fit, how large a micro-batch may be, what each choice saves."""

from collections.abc import Iterator
from dataclasses import dataclass

from dit.config import PRESETS, TrainConfig, UsageError, replace
from dit.config_checks import validate
from dit.planner import memory_of, state_bytes, traced
from dit.planner.catalogue import Device
from dit.planner.memory import MemoryPlan
from dit.planner.trace import Trace, is_affine

LARGEST_MICRO_BATCH = 1 << 16
MOST_DEVICES = 1024
DRAWN_DEVICES = 8
"""Devices of the FSDP bar beside a run on one."""
_ALL_BLOCKS = {"ckpt": True, "ckpt_blocks": None, "ckpt_every_nth": 1}


@dataclass(frozen=True)
class Alternative:
    """A run like the given one but for ``flags``, and its memory on each of ``num_devices``."""

    flags: str
    config: TrainConfig
    memory: MemoryPlan
    num_devices: int = 1

    @property
    def fits(self) -> bool:
        return self.memory.verdict == "fits"

    @property
    def missing_bytes(self) -> int:
        """What the device lacks: by the middle figure, or, where that is below its memory, by the high one."""
        used = self.memory.device_used_bytes
        lacks = used["mid"] - self.memory.memory_bytes
        return lacks if lacks > 0 else max(0, used["high"] - self.memory.memory_bytes)


@dataclass(frozen=True)
class Search:
    """What :func:`what_would_fit` found for a run.

    ``found`` is the cheapest change with which it fits on its own devices, None if there is none; ``closest`` is then
    the change that needs least. ``spread`` is the smallest number of devices over which FSDP lets it fit, if any.
    """

    asked: Alternative
    found: Alternative | None
    closest: Alternative
    spread: Alternative | None


def toggled(config: TrainConfig) -> dict[str, TrainConfig]:
    """The four combinations of mixed precision and checkpointing, by what is switched on."""
    choices = {"fp32": (False, False), "--amp": (True, False), "--ckpt": (False, True), "--amp --ckpt": (True, True)}
    return {flags: replace(config, amp=amp, amp_dtype="auto" if not amp else config.precision.amp_dtype, ckpt=ckpt,
                           ckpt_blocks=config.memory.ckpt_blocks if ckpt and config.memory.ckpt else None)
            for flags, (amp, ckpt) in choices.items()}


def compare_toggles(config: TrainConfig, device: Device, num_devices: int) -> Iterator[Alternative]:
    """The memory of each of :func:`toggled`, one by one (tracing takes seconds), and of the run as asked under FSDP.

    FSDP spreads it over its devices, or over DRAWN_DEVICES where it has one, with the micro-batch it has now; not on a
    CPU, whose memory all processes share, nor where it is spread already.
    """
    for flags, other in toggled(config).items():
        try:
            yield _alternative(flags, other, device, num_devices)
        except UsageError:  # --attention flash in fp32
            continue
    if device.generation == "cpu" or (config.memory.parallel == "fsdp" and num_devices > 1):
        return
    over = num_devices if num_devices > 1 else DRAWN_DEVICES
    batch = config.memory.global_batch_size * over // num_devices
    try:
        spread = validate(replace(config, parallel="fsdp", global_batch_size=batch))
    except UsageError:  # low-bit moments are not sharded
        return
    as_asked = next(flags for flags, other in toggled(config).items()
                    if (other.precision.amp, other.memory.ckpt) == (config.precision.amp, config.memory.ckpt))
    yield _alternative(f"fsdp x {over}\n{as_asked}", spread, device, over)


# ---- what would fit ----

def what_would_fit(config: TrainConfig, device: Device, num_devices: int) -> Search:
    """Search the changes that need less memory, in the order of what they cost."""
    asked = _alternative("", config, device, num_devices)
    closest, last, found = asked, None, None
    for changes in _by_cost(config, device, num_devices):
        other = _changed(config, changes, num_devices)
        if other is None:
            continue
        last = changes, other
        if _floor(other, device, num_devices) < device.memory_bytes:
            tried = _planned(config, changes, other, device, num_devices)
            closest = _smaller(closest, tried)
            if tried.fits:
                found = tried
                break
    if found is None and last is not None:  # each may have been too large to be worth a trace; the last has all changes
        closest = _smaller(closest, _planned(config, *last, device, num_devices))
    return Search(asked, found, closest, _spread(config, device, num_devices))


def _smaller(one: Alternative, other: Alternative) -> Alternative:
    return min(one, other, key=lambda each: each.memory.device_used_bytes["high"])


def _by_cost(config: TrainConfig, device: Device, num_devices: int) -> Iterator[dict[str, object]]:
    """Settings to change, from cheap to dear: one thing, two, one besides AMP and checkpointing, then all of them.

    AMP costs the last digits; checkpointing a third more arithmetic; the average on the host a copy beside each step;
    FSDP communication; small micro-batches are slow; moments in 8 bits are not the same training.
    """
    has_amp, has_all = config.precision.amp, config.checkpointed_blocks == config.shape.depth
    amp, ckpt = {} if has_amp else {"amp": True}, {} if has_all else dict(_ALL_BLOCKS)
    host = {"ema": "host"} if config.optim.ema == "device" and device.generation != "cpu" else {}
    shard = {"parallel": "fsdp"} if num_devices > 1 and config.memory.parallel == "ddp" else {}
    bits = {} if config.optim.optimizer.endswith("bit") else {"optimizer": "adamw-8bit"}
    accumulated = list(_accumulations(config, num_devices))
    both, others = amp | ckpt, [host, shard, *accumulated, bits]
    singles = [amp, ckpt, both] if amp and ckpt else [both]
    combined = [both | other for other in others] if both else []
    whole = both | host | shard
    last = [whole, *(whole | each for each in accumulated)]
    dearest = [] if shard or config.memory.parallel == "fsdp" else [
        whole | bits | each for each in ({}, *accumulated)]
    seen: list[dict[str, object]] = [{}]
    for changes in (*singles, *others, host | shard, host | bits, *combined, *last, *dearest):
        if changes not in seen:
            seen.append(changes)
            yield changes


def _accumulations(config: TrainConfig, num_devices: int) -> Iterator[dict[str, object]]:
    """Every split of the micro-batch into equal parts, down to single images."""
    micro_batch = config.micro_batch(num_devices)
    for parts in range(2, micro_batch + 1):
        if micro_batch % parts == 0:
            yield {"grad_accum": config.memory.grad_accum * parts}


def _spread(config: TrainConfig, device: Device, num_devices: int) -> Alternative | None:
    """The run over 2, 4, 8, ... devices, more than it has, under FSDP: as it is, or with AMP, checkpointing and the
    average on the host.
    """
    if device.generation == "cpu":
        return None
    host = {"ema": "host"} if config.optim.ema == "device" else {}
    over, as_it_is, smaller = 2, {"parallel": "fsdp"}, {"amp": True} | _ALL_BLOCKS
    while over <= MOST_DEVICES:
        for changes in (as_it_is, as_it_is | smaller, as_it_is | smaller | host):
            other = _changed(config, changes, over) if over > num_devices else None
            if other is not None and _floor(other, device, over) < device.memory_bytes:
                tried = _planned(config, changes, other, device, over, f" --num-devices {over}")
                if tried.fits:
                    return tried
        over *= 2
    return None


def _changed(config: TrainConfig, changes: dict[str, object], num_devices: int) -> TrainConfig | None:
    """The run with other settings, or None where they do not go together or the batch does not divide."""
    try:
        other = validate(replace(config, **changes))
        other.micro_batch(num_devices)
    except UsageError:
        return None
    return other


def _floor(config: TrainConfig, device: Device, num_devices: int) -> int:
    """Bytes in use on a device at the least: what is above its memory can do without a trace."""
    return state_bytes(config, num_devices) + device.context_bytes[0]


def _planned(asked: TrainConfig, changes: dict[str, object], config: TrainConfig, device: Device, num_devices: int,
             suffix: str = "") -> Alternative:
    """A changed run's memory, under the flags that change it."""
    ckpt = "--ckpt without --ckpt-blocks and --ckpt-every-nth" if asked.memory.ckpt else "--ckpt"
    flags = {"amp": "--amp", "ckpt": ckpt, "ema": "--ema host", "parallel": "--parallel fsdp",
             "optimizer": f"--optimizer {config.optim.optimizer}",
             "grad_accum": f"--grad-accum {config.memory.grad_accum}"}
    same = {"amp": asked.precision.amp, "ckpt": asked.checkpointed_blocks == asked.shape.depth,
            "parallel": asked.memory.parallel == "fsdp"}
    said = [text for name, text in flags.items() if name in changes and not same.get(name)]
    return _alternative(" ".join(said) + suffix, config, device, num_devices)


def _alternative(flags: str, config: TrainConfig, device: Device, num_devices: int) -> Alternative:
    return Alternative(flags, config, plan_of(config, device, num_devices), num_devices)


def plan_of(config: TrainConfig, device: Device, num_devices: int) -> MemoryPlan:
    """The memory of a run, and nothing else of its plan."""
    micro_batch = config.micro_batch(num_devices)
    return memory_of(config, device, num_devices, traced(config, device, micro_batch).at(micro_batch))


def largest_micro_batch(config: TrainConfig, device: Device, num_devices: int = 1) -> tuple[int, MemoryPlan | None]:
    """The largest micro-batch whose verdict is "fits" on ``device``, and its memory; (0, None) if not even 1 is.

    ``config``'s own batch does not matter. Memory never falls as the micro-batch grows, which the search relies on.
    """
    affine: list[Trace] = []  # one serves nearly every micro-batch, with what was replayed of it

    def memory(micro_batch: int) -> MemoryPlan:
        if affine and is_affine(config, micro_batch):
            return memory_of(config, device, num_devices, affine[0].at(micro_batch))
        trace = traced(config, device, micro_batch)
        affine[:] = [trace] if trace.is_affine else affine
        return memory_of(config, device, num_devices, trace.at(micro_batch))

    low, best = 0, None
    high = LARGEST_MICRO_BATCH
    guess = 8
    while high - low > 1:
        plan = memory(guess)
        if plan.verdict == "fits":
            low, best = guess, plan
        else:
            high = guess
        guess = _next_guess(low, high, guess, plan, device)
    return low, best


def _next_guess(low: int, high: int, tried: int, plan: MemoryPlan, device: Device) -> int:
    """Between the bounds, where the share of memory that grows with the batch would fill the device."""
    fixed = sum(plan.by_category[name] for name in ("parameters", "gradients", "optimizer", "ema"))
    growing = max(plan.device_used_bytes["high"] - fixed, 1)
    guess = int(tried * max(device.memory_bytes - fixed, 0) / growing)
    if guess == tried or not low < guess < high:
        guess = (low + high) // 2 if high < LARGEST_MICRO_BATCH else 2 * low
    return min(max(guess, low + 1), high - 1)


def fit_table(config: TrainConfig, device: Device) -> Iterator[tuple[str, str, int]]:
    """(model, toggles, largest micro-batch) for all presets on one device, the run's other settings kept."""
    for model in PRESETS:
        for flags, other in toggled(replace(config, model=model)).items():
            try:
                yield model, flags, largest_micro_batch(other, device)[0]
            except UsageError:  # --attention flash in fp32
                yield model, flags, 0

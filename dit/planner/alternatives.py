"""The same run with other toggles: what would make it fit, how large a micro-batch may be, what each choice saves."""

from collections.abc import Iterator
from dataclasses import dataclass

from dit.config import PRESETS, TrainConfig, replace
from dit.planner import memory_of, traced
from dit.planner.catalogue import Device
from dit.planner.memory import MemoryPlan

LARGEST_MICRO_BATCH = 1 << 16


@dataclass(frozen=True)
class Alternative:
    """A run like the given one but for ``flags``, and its memory."""

    flags: str
    config: TrainConfig
    memory: MemoryPlan


def toggled(config: TrainConfig) -> dict[str, TrainConfig]:
    """The four combinations of mixed precision and checkpointing, by what is switched on."""
    choices = {"fp32": (False, False), "--amp": (True, False), "--ckpt": (False, True), "--amp --ckpt": (True, True)}
    return {flags: replace(config, amp=amp, amp_dtype="auto" if not amp else config.precision.amp_dtype, ckpt=ckpt,
                           ckpt_blocks=config.memory.ckpt_blocks if ckpt and config.memory.ckpt else None)
            for flags, (amp, ckpt) in choices.items()}


def compare_toggles(config: TrainConfig, device: Device, num_devices: int) -> Iterator[Alternative]:
    """The memory of each of :func:`toggled`, one by one: tracing takes seconds."""
    for flags, other in toggled(config).items():
        yield _alternative(flags, other, device, num_devices)


def what_would_fit(config: TrainConfig, device: Device, num_devices: int) -> Alternative | None:
    """The cheapest change with which the run fits, in the order of what it costs, or None if none of these does."""
    for flags, other in _by_cost(config, num_devices):
        found = _alternative(flags, other, device, num_devices)
        if found.memory.verdict == "fits":
            return found
    return None


def _by_cost(config: TrainConfig, num_devices: int) -> Iterator[tuple[str, TrainConfig]]:
    """Nothing is lost by AMP but the last digits; checkpointing costs a third more arithmetic; small micro-batches are
    slow."""
    has_amp, has_all = config.precision.amp, config.checkpointed_blocks == config.shape.depth
    faster = replace(config, amp=True)
    full = replace(faster, ckpt=True, ckpt_blocks=None)
    if not has_amp:
        yield "--amp", faster
    if not has_all:
        yield "--ckpt", replace(config, ckpt=True, ckpt_blocks=None)
    if not has_amp and not has_all:
        yield "--amp --ckpt", full
    batch, accumulation = config.memory.global_batch_size, 2 * config.memory.grad_accum
    while batch % (num_devices * accumulation) == 0:
        smaller = replace(full, grad_accum=accumulation)
        yield f"--amp --ckpt --grad-accum {accumulation}", smaller
        accumulation *= 2
    if config.optim.ema != "off":
        smallest = replace(full, grad_accum=max(accumulation // 2, config.memory.grad_accum), ema="off")
        yield f"--amp --ckpt --grad-accum {smallest.memory.grad_accum} --ema off", smallest


def _alternative(flags: str, config: TrainConfig, device: Device, num_devices: int) -> Alternative:
    micro_batch = config.micro_batch(num_devices)
    step = traced(config, device, micro_batch).at(micro_batch)
    return Alternative(flags, config, memory_of(config, device, num_devices, step))


def largest_micro_batch(config: TrainConfig, device: Device, num_devices: int = 1) -> tuple[int, MemoryPlan | None]:
    """The largest micro-batch whose verdict is "fits" on ``device``, and its memory; (0, None) if not even 1 is.

    ``config``'s own batch does not matter. Memory never falls as the micro-batch grows, which the search relies on.
    """
    def memory(micro_batch: int) -> MemoryPlan:
        return memory_of(config, device, num_devices, traced(config, device, micro_batch).at(micro_batch))

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
            yield model, flags, largest_micro_batch(other, device)[0]

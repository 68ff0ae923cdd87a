"""The configuration to run: a search over what can be chosen, the trade-offs that are left, one choice with reasons.

What is looked at is told in ``dit.planner.candidates``. Every row that is returned has been planned in full and fits;
limits are held against the high figures of hours and cost.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dit.config import PRESETS, TrainConfig, UsageError, replace
from dit.planner import autocast_dtype, flops
from dit.planner.calibration import Calibration
from dit.planner.candidates import Candidate, Wish, candidates
from dit.planner.catalogue import Device
from dit.planner.costs import Costs
from dit.planner.prices import check_prices, price_of

__all__ = ["Advice", "Costs", "Wish", "broken", "pareto", "recommend"]
MAX_ROWS = 8


@dataclass(frozen=True)
class Advice:
    """The trade-offs that are left (fastest first), the choice among them, why, and what to relax if nothing holds."""

    rows: tuple[Candidate, ...]
    choice: Candidate
    reasons: tuple[str, ...]
    holds: bool
    relax: str | None
    num_candidates: int

    def to_dict(self) -> dict[str, object]:
        """For JSON: the rows, which one is chosen, why, and the lines to paste."""
        return {"rows": [_as_dict(each) for each in self.rows],
                "choice": next(index for index, each in enumerate(self.rows) if each is self.choice),
                "reasons": list(self.reasons), "holds": self.holds, "relax": self.relax,
                "num_candidates": self.num_candidates, "extraction": self.choice.extraction,
                "torchrun": self.choice.torchrun}


def _as_dict(each: Candidate) -> dict[str, object]:
    return {"device": each.device.name, "num_devices": each.num_devices, "micro_batch": each.micro_batch,
            "accumulation": each.config.memory.grad_accum, "step_seconds": each.time.step_seconds,
            "hours": {"mid": each.hours[0], "high": each.hours[1]},
            "cost": {"mid": each.cost[0], "high": each.cost[1]}, "extraction_hours": each.extraction_hours,
            "device_used_bytes": each.memory.device_used_bytes, "verdict": each.memory.verdict,
            "bound_by": each.time.bound_by, "torchrun": each.torchrun}


def recommend(config: TrainConfig, devices: Sequence[Device], wish: Wish, *,
              calibration_of: Callable[[Device], Calibration | None] = lambda device: None,
              progress: Callable[[str], None] = lambda said: None, costs: Costs | None = None) -> Advice:
    """Search for ``config``'s model (or, with the goal quality, the largest that holds) on any of ``devices``.

    ``costs`` of an earlier search saves making its traces again. Raises UsageError where no device holds the model at
    all, where a wish cannot be, and where prices are known of some devices only.
    """
    wish.check()
    check_prices(devices, wish.prices, needs_price=wish.max_cost is not None)
    fallback: Advice | None = None
    costs = costs or Costs()
    for model in _models(config, wish):
        variant = replace(config, model=model) if model != config.model.model else config
        found = list(candidates(variant, devices, wish, costs, calibration_of, progress))
        advice = _advise(found, wish, costs)
        if advice is not None and advice.holds:
            return advice
        fallback = advice or fallback
    if fallback is None:
        names = ", ".join(device.name for device in devices)
        raise UsageError(f"--recommend: {config.model.model} at --global-batch-size {config.memory.global_batch_size} "
                         f"fits on none of: {names}, whatever is done (--amp, --ckpt, --parallel fsdp on "
                         f"{wish.max_devices} devices, --ema host, --optimizer adamw-8bit); name a "
                         "device with more memory, or allow more --max-devices")
    return fallback


def _models(config: TrainConfig, wish: Wish) -> list[str]:
    """The given model, or for quality every preset of its patch size, the largest first."""
    if wish.goal != "quality" or config.model.model not in PRESETS:
        return [config.model.model]
    patch = PRESETS[config.model.model]["patch_size"]
    names = [name for name, sizes in PRESETS.items() if sizes["patch_size"] == patch]
    return sorted(names, key=lambda name: -flops.parameters(replace(config, model=name).shape))


# ---- the choice ----

def _advise(found: list[Candidate], wish: Wish, costs: Costs) -> Advice | None:
    """Rows that nothing beats, planned in full, and the best of them; None if nothing fits."""
    holding = [each for each in found if not broken(each, wish)]
    pool, holds = (holding, True) if holding else (found, False)
    rows: list[Candidate] = []
    pool = sorted(pool, key=lambda each: (_rank(each, wish, holds), each.memory_bytes))
    while pool and not rows:
        front = pareto(pool)
        tried = [_planned(each, costs) for each in _spread(front, wish, holds)]
        rows = [each for each in tried if each is not None]
        pool = [each for each in pool if each not in front]
    if not rows:
        return None
    choice = min(rows, key=lambda each: (_rank(each, wish, holds), each.memory_bytes))
    rows = sorted(pareto(rows), key=lambda each: each.hours)
    relax = None if holds else what_to_relax(found, choice, wish)
    return Advice(tuple(rows), choice, tuple(reasons(choice, rows, wish, holds)), holds, relax, len(found))


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


def _planned(candidate: Candidate, costs: Costs) -> Candidate | None:
    """The candidate with its memory planned in full, or None if it does not surely fit."""
    memory = costs.plan_memory(candidate.config, candidate.device, candidate.num_devices, candidate.micro_batch)
    if memory.verdict != "fits":
        return None
    return dataclasses.replace(candidate, memory=memory, memory_bytes=memory.device_used_bytes["high"])


def reasons(choice: Candidate, rows: Sequence[Candidate], wish: Wish, holds: bool) -> Iterator[str]:
    """Why this one, in sentences with figures."""
    said = {"cost": "the cheapest", "quick": "the fastest", "quality": "the largest model that holds, at its cheapest"}
    device, count = choice.device, choice.num_devices
    price = price_of(device, wish.prices)
    money = f"{choice.cost[0]:.0f} (at most {choice.cost[1]:.0f})" + ("" if price else " device-hours")
    first = f"{said[wish.goal]} of what keeps the limits" if holds else "the nearest to the limits, which nothing keeps"
    yield (f"{first}: {choice.hours[0]:.1f} h (at most {choice.hours[1]:.1f}) and "
           f"{money} on {count} x {device.name}")
    if price:
        yield (f"an hour of one {device.name} at {price.per_hour:.2f} ({price.source})"
               + ("" if price.source == "given" else f"; yours: --price \"{device.name}=...\""))
    yield from _of_memory(choice)
    if choice.extraction_hours:
        yield _of_latents(choice, wish)
    if choice.time.communication_seconds and count > 1:
        share = choice.time.exposed_communication_seconds / choice.step_seconds
        yield f"{count} devices: what they exchange adds {100 * share:.1f} % to a step"
    faster = [each for each in rows if each.hours[0] < choice.hours[0]]
    if faster:
        next_one = faster[-1]
        yield (f"faster for more: {next_one.hours[0]:.1f} h and {next_one.cost[0]:.0f} on {next_one.num_devices} x "
               f"{next_one.device.name}")


def _of_memory(choice: Candidate) -> Iterator[str]:
    """Reasons for what decides memory and the speed of a step."""
    config, device, asked = choice.config, choice.device, choice.asked or choice.config
    blocks, depth, memory = config.checkpointed_blocks, config.shape.depth, config.memory
    if config.precision.amp:
        yield f"--amp: matrix products run in {autocast_dtype(config, device)}, weights stay fp32"
    if config.precision.attention != asked.precision.attention:
        yield (f"--attention {config.precision.attention}: faster on {device.name} than what auto takes, by published "
               "figures")
    if blocks:
        yield f"--ckpt on {blocks} of {depth} blocks: what it takes for a micro-batch of {choice.micro_batch}"
    else:
        yield f"no checkpointing: a micro-batch of {choice.micro_batch} fits without"
    if memory.grad_accum > 1:
        yield f"--grad-accum {memory.grad_accum} keeps the global batch at {memory.global_batch_size}"
    if memory.parallel != asked.memory.parallel:
        yield (f"--parallel fsdp: with a whole model on each device a micro-batch of {choice.micro_batch} would not "
               "fit; each holds a share of weights, gradients, moments and average")
    if config.optim.ema != asked.optim.ema:
        yield "--ema host: nothing fits with the average on the device; the averages are the same"
    if config.optim.optimizer != asked.optim.optimizer:
        yield (f"--optimizer {config.optim.optimizer}: nothing fits with moments in fp32; they are rounded, so it "
               "is another optimizer (pip install .[lowbit])")


def _of_latents(choice: Candidate, wish: Wish) -> str:
    """What encoding once saves, from what it takes."""
    once = choice.extraction_hours
    images = wish.steps * choice.config.memory.global_batch_size
    in_loop = once / 2 * images / wish.num_samples
    return (f"--data latents: encoding the {wish.num_samples:,} images once (and flipped) takes {once:.1f} h, counted "
            f"above, if they can be read so fast; in the loop the VAE would take {in_loop:.1f} h of this run")


def what_to_relax(found: Sequence[Candidate], nearest: Candidate, wish: Wish) -> str:
    """One line: which limit stands in the way, and at what value the nearest answer would hold."""
    values = {"max_hours": nearest.hours[1], "max_cost": nearest.cost[1], "max_devices": nearest.num_devices}
    limits = broken(nearest, wish)
    said = " and ".join(f"--{name.replace('_', '-')} {math.ceil(values[name])}" for name in limits)
    possible = [name for name in ("max_hours", "max_cost")
                if any(set(broken(each, wish)) <= {name} for each in found)]
    is_enough = len(possible) == 1 and len(limits) > 1
    one = f"; relaxing --{possible[0].replace('_', '-')} alone is enough" if is_enough else ""
    return f"no configuration keeps every limit; the nearest one needs {said}{one}"

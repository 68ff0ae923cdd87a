"""Ways to run a training: every one that a search looks at, with its time, money and memory.

What a person asked for stays: the model, the global batch, the optimizer, anything not at its default. Searched are
devices and how many of them, micro-batch and accumulation, mixed precision, checkpointed blocks, the attention kernel,
latents made once instead of a VAE in the loop, and, where a whole model does not fit beside its micro-batch, FSDP.
Only where nothing fits on a device at all: the average on the host, then moments in 8 bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dit.config import IMAGE_DATA, SECTION_OF, TrainConfig, UsageError, flag, replace
from dit.planner import IMAGENET_SAMPLES, autocast_dtype, priors, state_bytes
from dit.planner.calibration import PRIORS, Calibration
from dit.planner.catalogue import NODES, Device, Node
from dit.planner.costs import Costs, on_latents
from dit.planner.hardware import attention_kernel, default_node
from dit.planner.memory import MemoryPlan
from dit.planner.prices import price_of
from dit.planner.step_time import TimePlan

GOALS = ("quality", "quick", "cost")
MAX_DEVICES = 1024
SMALLEST_MICRO_BATCH = 4  # below, a step is all overhead
SURELY_FITS = 0.8  # of the device's memory: estimates are not so far off


@dataclass(frozen=True)
class Wish:
    """What a person wants. Limits are None where there is none; ``prices`` are per device-hour, by catalogue name.

    ``num_samples`` is the size of the data set: what making latents once would have to encode.
    """

    goal: str = "cost"
    steps: int = 400_000
    max_hours: float | None = None
    max_cost: float | None = None
    max_devices: int = 8
    prices: Mapping[str, float] = field(default_factory=dict)
    num_samples: int = IMAGENET_SAMPLES

    def check(self) -> None:
        """Raise UsageError for what cannot be wished."""
        if self.goal not in GOALS:
            raise UsageError(f"--goal {self.goal}: unknown; one of {', '.join(GOALS)}")
        for name in ("steps", "max_hours", "max_cost", "max_devices", "num_samples"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{flag(name)} {value}: must be above 0")
        if self.max_devices > MAX_DEVICES:
            raise UsageError(f"--max-devices {self.max_devices}: at most {MAX_DEVICES}")
        for name, price in self.prices.items():
            if not 0 < price < float("inf"):
                raise UsageError(f"--price-per-device-hour {price} for {name}: must be above 0")


@dataclass(frozen=True)
class Candidate:
    """One way to run. Hours and cost are (mid, high), with the ``extraction_hours`` that latents take once; without
    prices cost is device-hours. ``memory_bytes`` is the high figure of device-used memory, an estimate until
    ``memory`` is planned.
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
    extraction_hours: float = 0.0
    asked: TrainConfig | None = field(default=None, repr=False)

    @property
    def torchrun(self) -> str:
        """The line that starts it, with every setting that is not the default."""
        return " ".join([f"{self._start()}train.py", *flags_of(self.config)])

    @property
    def extraction(self) -> str | None:
        """The line that makes the latents before, where that is proposed."""
        if not self.extraction_hours:
            return None
        asked, size = self.asked or self.config, self.config.model.image_size
        words = [f"{self._start()}scripts/extract_latents.py --data-path {asked.data.data_path or 'PATH'}",
                 f"--vae {asked.vae} --image-size {' '.join(map(str, size)) if isinstance(size, tuple) else size}",
                 f"--output {self.config.data.data_path}"]
        if asked.data.augment != "center-crop":
            words.append(f"--augment {asked.data.augment}")
        if asked.data.classes_file:
            words.append(f"--classes-file {asked.data.classes_file}")
        if not asked.model.num_classes:
            words.append("--num-classes 0")
        return " ".join(words)

    def _start(self) -> str:
        per_node = _node(self.device).devices_per_node
        nodes = -(-self.num_devices // per_node)
        if self.num_devices == 1:
            return "python "
        return f"torchrun {f'--nnodes={nodes} ' if nodes > 1 else ''}--nproc_per_node={self.num_devices // nodes} "


def flags_of(config: TrainConfig) -> Iterator[str]:
    """Every setting that is not the default, as flags of train.py; PATH stands for data that was not named."""
    default = TrainConfig()
    for name, section in SECTION_OF.items():
        value = getattr(getattr(config, section), name)
        if name == "data_path" and value is None and config.data.data in (*IMAGE_DATA, "latents"):
            value = "PATH"
        if name == "model" or value == getattr(getattr(default, section), name):
            continue
        if isinstance(value, bool):
            yield flag(name) if value else flag("no_" + name)
        else:
            yield f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
    yield f"--model {config.model.model}"


def candidates(config: TrainConfig, devices: Sequence[Device], wish: Wish, costs: Costs,
               calibration_of: Callable[[Device], Calibration | None] = lambda device: None,
               progress: Callable[[str], None] = lambda said: None) -> Iterator[Candidate]:
    """Every candidate whose memory is estimated to fit."""
    for device in devices:
        calibration = calibration_of(device) or PRIORS
        for remedy in _remedies(config):
            found = []
            for choice in _toggles(remedy, device):
                progress(_said(choice, device))
                found += _on_device(choice, config, device, wish, costs, calibration)
            if found and _one_fits(found, costs):
                yield from found
                break


def _one_fits(found: list[Candidate], costs: Costs) -> bool:
    """Whether the candidate with the least memory fits; planned in full where its estimate does not settle it."""
    least = min(found, key=lambda each: each.memory_bytes)
    if least.memory_bytes < SURELY_FITS * least.device.memory_bytes:
        return True
    plan = costs.plan_memory(least.config, least.device, least.num_devices, least.micro_batch)
    return plan.verdict == "fits"


def _said(config: TrainConfig, device: Device) -> str:
    return (f"{config.model.model} on {device.name}: {'--amp' if config.precision.amp else 'no --amp'}, "
            f"{config.checkpointed_blocks} of {config.shape.depth} blocks checkpointed")


def _remedies(config: TrainConfig) -> Iterator[TrainConfig]:
    """The config, then what frees memory for good at the cost of time or of exact moments."""
    yield config
    hosts = config.optim.ema == "device"
    if hosts:
        yield replace(config, ema="host")
    low_bit = config.optim.optimizer in ("adamw", "adamw-foreach") and config.memory.tensor_parallel == 1
    if low_bit and config.memory.parallel == "ddp":
        yield replace(config, optimizer="adamw-8bit")
        if hosts:
            yield replace(config, optimizer="adamw-8bit", ema="host")


def _toggles(config: TrainConfig, device: Device) -> Iterator[TrainConfig]:
    """With and without mixed precision (kept where asked for), no, half and all blocks checkpointed, the attention
    kernels worth trying, and latents where images are encoded in the loop.
    """
    depth = config.shape.depth
    for amp in dict.fromkeys((True, config.precision.amp)):
        amp_dtype = config.precision.amp_dtype if config.precision.amp else "auto"
        base = replace(config, amp=amp, amp_dtype=amp_dtype if amp else "auto", grad_accum=1, ckpt_every_nth=1)
        for kernel in kernels(base, device):
            for blocks in dict.fromkeys((0, depth // 2, depth)):
                choice = replace(base, attention=kernel, ckpt=blocks > 0,
                                 ckpt_blocks=blocks if 0 < blocks < depth else None)
                yield choice
                if can_be_latents(choice):
                    yield on_latents(choice)


def can_be_latents(config: TrainConfig) -> bool:
    """Whether scripts/extract_latents.py could make what this run encodes in its loop."""
    return config.encodes_in_loop and config.data.data == "folder" and config.data.augment in ("center-crop", "resize")


def kernels(config: TrainConfig, device: Device) -> list[str]:
    """The attention kernel asked for; where none was, what "auto" takes and every fused one that is faster.

    The unfused path is not among them: it moves all T x T scores, and is never faster.
    """
    asked = config.precision.attention
    if asked != "auto" or device.generation == "cpu":
        return [asked]
    shape, dtype = config.shape, autocast_dtype(config, device) or "fp32"
    rates = priors.rates(device, tf32=config.precision.tf32)

    def seconds(kernel: str) -> float:
        heads = SMALLEST_MICRO_BATCH * 8 * shape.num_heads
        return priors.attention_seconds(kernel, dtype, (heads, shape.num_tokens, shape.hidden_size // shape.num_heads),
                                        rates)

    head_size = shape.hidden_size // shape.num_heads
    usual = attention_kernel(device, dtype, head_size)
    result = ["auto"]
    for kernel in ("flash", "efficient", "cudnn"):
        try:
            attention_kernel(device, dtype, head_size, kernel)
        except UsageError:
            continue
        if kernel != usual and usual != "math" and seconds(kernel) < seconds(usual):
            result.append(kernel)
    return result


def _on_device(config: TrainConfig, asked: TrainConfig, device: Device, wish: Wish, costs: Costs,
               calibration: Calibration) -> Iterator[Candidate]:
    """All micro-batches and numbers of devices for one set of toggles; FSDP only where a whole model does not fit."""
    extracts = asked.encodes_in_loop and not config.encodes_in_loop
    per_image = costs.extraction_seconds_per_image(asked, device, calibration) if extracts else 0.0
    for count, accumulation, micro_batch in _splits(config, wish):
        for spread in _spreads(config, count, device):
            variant = replace(spread, grad_accum=accumulation)
            if state_bytes(variant, count) > device.memory_bytes:  # spares a trace
                continue
            memory_bytes = costs.memory_bytes(variant, device, count, micro_batch)
            if memory_bytes > device.memory_bytes:
                continue
            time = costs.time(variant, device, count, micro_batch, calibration)
            extraction = per_image * wish.num_samples / count / 3600
            hours = tuple(time.step_seconds[end] * wish.steps / 3600 + extraction for end in ("mid", "high"))
            price = price_of(device, wish.prices)
            cost = tuple(each * count * (price.per_hour if price else 1.0) for each in hours)
            yield Candidate(variant, device, count, micro_batch, time.step_seconds["mid"], hours, cost, memory_bytes,
                            time, None, extraction, asked)
            break


def _splits(config: TrainConfig, wish: Wish) -> Iterator[tuple[int, int, int]]:
    """(devices, accumulation, micro-batch) that keep the global batch."""
    together = config.memory.tensor_parallel
    for ranks in _powers(min(wish.max_devices, MAX_DEVICES) // together):
        for accumulation in _powers(config.memory.global_batch_size // ranks):
            micro_batch, rest = divmod(config.memory.global_batch_size, ranks * accumulation)
            if not rest and (micro_batch >= SMALLEST_MICRO_BATCH or accumulation == 1):
                yield ranks * together, accumulation, micro_batch


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _spreads(config: TrainConfig, count: int, device: Device) -> Iterator[TrainConfig]:
    """How several devices may share the work, what exchanges least first."""
    memory = config.memory
    if memory.parallel == "fsdp":
        size = memory.shard_size
        if count == 1 or (size and config.data_ranks(count) % size):
            config = replace(config, shard_size=0)
        yield config
        return
    yield config
    if count == 1 or config.optim.optimizer.endswith("bit") or config.precision.compile:
        return
    per_node = _node(device).devices_per_node
    if memory.tensor_parallel == 1 and count > per_node and count % per_node == 0:
        yield replace(config, parallel="fsdp", shard_size=per_node)
    yield replace(config, parallel="fsdp")


def _node(device: Device) -> Node:
    return default_node(device) or NODES["pcie4-box"]

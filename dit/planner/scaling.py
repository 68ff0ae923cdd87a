"""What more devices give: the same run on 1, 2, 4, ..., 1024 of them. Needs no torch where traces are kept.

Strong scaling keeps the global batch, so the run stays the same and each device does less. Weak scaling keeps the
micro-batch, so the global batch grows: fewer, larger steps over as many images, which is another training.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dit.config import TrainConfig, UsageError, replace
from dit.planner.calibration import PRIORS, Calibration
from dit.planner.catalogue import Device, Node
from dit.planner.costs import Costs
from dit.planner.hardware import default_node
from dit.planner.step_time import nodes_in_words, run_plan

COUNTS = tuple(1 << power for power in range(11))
SHOWS_FROM = 0.05  # communication is said to show where a step waits for it for more than this share


@dataclass(frozen=True)
class Point:
    """A run on ``num_devices``. Figures are None where less than one image would be left for a device.

    ``speed_up`` is in images per second over one device, ``efficiency`` that over ``num_devices``; ``exposed_share`` of
    a step is spent waiting for what devices exchange. ``verdict`` says whether it fits ("fits", "tight",
    "does_not_fit").
    """

    num_devices: int
    num_nodes: int
    global_batch: int
    micro_batch: int | None = None
    accumulation: int | None = None
    verdict: str | None = None
    step_seconds: float | None = None
    images_per_second: float | None = None
    speed_up: float | None = None
    efficiency: float | None = None
    hours: float | None = None
    cost: float | None = None
    energy_kwh: float | None = None
    exposed_share: float | None = None


@dataclass(frozen=True)
class Scaling:
    """Both tables, the machines that are assumed, and sentences about them."""

    strong: tuple[Point, ...]
    weak: tuple[Point, ...]
    node: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"node": self.node, "strong": [dataclasses.asdict(each) for each in self.strong],
                "weak": [dataclasses.asdict(each) for each in self.weak], "notes": list(self.notes)}


def scaling(config: TrainConfig, device: Device, steps: int, *, num_devices: int = 1, node: Node | None = None,
            price: float | None = None, calibration: Calibration | None = None, costs: Costs | None = None) -> Scaling:
    """The run of ``steps`` steps on every number of devices; weak scaling keeps the micro-batch at ``num_devices``.

    Raises UsageError where the batch does not divide among ``num_devices``, and for a device whose speed is not known.
    """
    node = node or default_node(device)
    if node is None:
        raise UsageError(f"--scaling: what machines {device.name} stands in is not known; name a catalogue GPU with "
                         "--device, or --node too")
    table = _Table(device, node, steps, config.memory.global_batch_size * steps, price, calibration or PRIORS,
                   costs or Costs())
    strong = tuple(table.points(_strong(config)))
    weak = tuple(table.points(_weak(config, num_devices)))
    return Scaling(strong, weak, nodes_in_words(node, COUNTS[-1]), tuple(_notes(config, strong, weak)))


def _strong(config: TrainConfig) -> Iterator[tuple[int, TrainConfig]]:
    """The same global batch; accumulation shrinks where it would leave less than one image."""
    for count in _counts(config):
        ranks = config.data_ranks(count)
        each, rest = divmod(config.memory.global_batch_size, ranks)
        fits = next((number for number in range(min(config.memory.grad_accum, each), 0, -1) if each % number == 0), 0)
        yield count, replace(_spread(config, count), grad_accum=0 if rest else fits)


def _weak(config: TrainConfig, num_devices: int) -> Iterator[tuple[int, TrainConfig]]:
    """The same micro-batch and accumulation."""
    each = config.micro_batch(max(num_devices, config.memory.tensor_parallel)) * config.memory.grad_accum
    for count in _counts(config):
        yield count, replace(_spread(config, count), global_batch_size=each * config.data_ranks(count))


def _counts(config: TrainConfig) -> list[int]:
    return [count for count in COUNTS if count % config.memory.tensor_parallel == 0]


def _spread(config: TrainConfig, count: int) -> TrainConfig:
    """Groups of --shard-size devices cannot be larger than all of them together."""
    return replace(config, shard_size=0) if config.memory.shard_size > config.data_ranks(count) else config


@dataclass
class _Table:
    """Plans of one run on one kind of device."""

    device: Device
    node: Node
    steps: int
    images: int
    price: float | None
    calibration: Calibration
    costs: Costs

    def points(self, configs: Iterator[tuple[int, TrainConfig]]) -> Iterator[Point]:
        first = None
        for count, config in configs:
            nodes = math.ceil(count / self.node.devices_per_node)
            batch, accumulation = config.memory.global_batch_size, config.memory.grad_accum
            if not accumulation:
                yield Point(count, nodes, batch)
                continue
            micro_batch = config.micro_batch(count)
            time = self.costs.time(config, self.device, count, micro_batch, self.calibration, self.node)
            run = run_plan(time, math.ceil(self.images / batch), count, self.device, self.price)
            first = first or time.images_per_second / count
            gain = time.images_per_second / first
            yield Point(count, nodes, batch, micro_batch, accumulation,
                        self.costs.plan_memory(config, self.device, count, micro_batch).verdict,
                        time.step_seconds["mid"], time.images_per_second, gain, gain / count, run.hours["mid"],
                        run.cost, run.energy_kwh, time.exposed_communication_seconds / time.step_seconds["mid"])


# ---- in words ----

def _notes(config: TrainConfig, strong: Sequence[Point], weak: Sequence[Point]) -> Iterator[str]:
    eight = next((each for each in strong if each.num_devices == 8 and each.speed_up), None)
    if eight:
        yield f"8 devices give {eight.speed_up:.1f}x with the same global batch ({eight.efficiency:.0%} efficiency)."
    for name, points in (("same global batch", strong), ("same micro-batch", weak)):
        shows = next((each for each in points if (each.exposed_share or 0) > SHOWS_FROM), None)
        yield (f"Communication shows ({name}) from {shows.num_devices:,} devices on: {shows.exposed_share:.0%} of a "
               "step waits for it." if shows else
               f"Communication does not show ({name}): at most {SHOWS_FROM:.0%} of a step waits for it, up to "
               f"{points[-1].num_devices:,} devices.")
    short = next((each for each in strong if each.step_seconds is None), None)
    if short:
        batch = config.memory.global_batch_size
        yield (f"From {short.num_devices:,} devices on a global batch of {batch:,} does not divide into one image or "
               f"more for each: so many need a larger --global-batch-size (a multiple of {short.num_devices:,}), which "
               "is another training.")
    if config.memory.tensor_parallel > 1:
        yield "--tensor-parallel is not modelled: times are those of whole layers, without the exchanges inside blocks."
    if config.precision.compile:
        yield "--compile is not modelled: times are those of eager mode, an upper bound."
    yield ("Same micro-batch means a larger global batch and fewer steps over as many images: another training, whose "
           "learning rate wants a look.")

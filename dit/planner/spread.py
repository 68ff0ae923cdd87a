"""What several devices change in the events of one: DDP's buckets, FSDP's shards and gathered weights."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dit.config import ModelShape
from dit.planner import flops
from dit.planner.trace import CATEGORIES, COLUMNS, PHASES, Events


@dataclass(frozen=True)
class Row:
    """Memory to add: taken before event ``start`` and, unless ``stop`` is None, given back before event ``stop``."""

    start: int
    stop: int | None
    bytes: int
    phase: str
    category: str
    step: int


@dataclass(frozen=True)
class Shards:
    """How FSDP2 spreads a model: over ``num_devices``, block by block, gathered in ``weight_bytes`` per weight."""

    num_devices: int
    num_blocks: int
    block_parameters: int
    other_parameters: int
    weight_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, num_devices: int, weight_bytes: int) -> "Shards":
        return cls(num_devices, shape.depth, *flops.block_parameters(shape), weight_bytes)


def with_buckets(events: Events, gradients_are_views: bool) -> Events:
    """DDP's buckets: one copy of all gradients, from the wrapping on.

    As views of them, gradients live in the buckets: the tensor that autograd makes is copied and given back at once.
    Where several micro-batches are accumulated, gradients are separate tensors until the last one's backward
    (torch/csrc/distributed/c10d/reducer.cpp).
    """
    gradients = events.category == CATEGORIES.index("gradients")
    total = int(events.bytes[gradients & (events.bytes > 0) & (events.step == 1)].sum())
    if gradients_are_views:
        events = _freed_in_backward(events, gradients)
    return inserted(events, [(first_of(events, "data"), total, "build")], "gradients")


def first_of(events: Events, phase: str) -> int:
    """Index of the first event of the first span of a phase."""
    return next(start for number, start, _, _ in events.spans if PHASES[number] == phase)


def _freed_in_backward(events: Events, gradients: np.ndarray) -> Events:
    """Gradients of the last micro-step are given back right after they are made, those of earlier ones at its end."""
    last = int(events.micro_step[events.step == 1].max())
    ends = {step: stop for phase, _, stop, step in events.spans if PHASES[phase] == "backward"}
    order = np.arange(len(events), dtype=np.float64)
    sizes = enumerate(zip(events.tensor.tolist(), events.bytes.tolist(), strict=True))
    made = {tensor: index for index, (tensor, size) in sizes if size > 0}
    moved = np.nonzero(gradients & (events.bytes < 0))[0]
    for index in moved:
        start = made[int(events.tensor[index])]
        order[index] = start + 1.5 if int(events.micro_step[start]) == last else ends[int(events.step[start])] - 0.75
    phase = events.phase.copy()
    phase[moved] = PHASES.index("backward")
    return _sorted(Events({**events.columns, "phase": phase}, events.modules, events.spans), order)


def with_shards(events: Events, shards: Shards) -> Events:
    """FSDP2's share of one device; what lives when is told in ``dit.sharding``.

    Weights, moments and average are divided. Gathered weights and gradients on their way are taken as constant from the
    start of a forward or backward to its end, which is their highest level while blocks run.
    """
    category = events.category
    shared = np.isin(category, [CATEGORIES.index(name) for name in ("parameters", "optimizer", "ema")])
    size = np.where(shared, np.sign(events.bytes) * -(-np.abs(events.bytes) // shards.num_devices), events.bytes)
    in_block = np.array([name.startswith("blocks.") for name in events.modules])[events.module]
    replaced = (category == CATEGORIES.index("gradients")) | (in_block & (category == CATEGORIES.index("cast_copies")))
    kept = Events({**events.columns, "bytes": size}, events.modules, events.spans)
    return _with_rows(kept, list(_gathered(events, shards)), keep=~replaced)


def _gathered(events: Events, shards: Shards) -> Iterable[Row]:
    block, others, devices = shards.block_parameters, shards.other_parameters, shards.num_devices
    whole = 4 * (shards.num_blocks * block + others)
    weights = 3 * block * shards.weight_bytes  # this block's, the next one's, and what is being received
    sending = block * shards.weight_bytes + 4 * block + 4 * block // devices + 8 * others
    spans = [(PHASES[phase], start, stop, step) for phase, start, stop, step in events.spans]
    for step in sorted({step for *_, step in spans}):
        forwards, backwards, updates = ([span for span in spans if span[3] == step and span[0] == name]
                                        for name in ("forward", "backward", "optimizer"))
        for forward, backward in zip(forwards, backwards, strict=True):
            yield Row(forward[1], backward[2], 4 * others, "forward", "parameters", step)
            yield Row(forward[1], forward[2], weights, "forward", "temporaries", step)
            yield Row(backward[1], backward[2], weights + sending, "backward", "temporaries", step)
        for _, start, stop, _ in (span for span in spans if span[3] == step and span[0] == "sample"):
            yield Row(start, stop, 4 * others, "sample", "parameters", step)
            yield Row(start, stop, weights, "sample", "temporaries", step)
        if len(backwards) > 1:
            yield Row(backwards[0][1], backwards[-1][2], whole, "backward", "gradients", step)
        yield Row(backwards[-1][1], updates[0][2], -(-whole // devices), "backward", "gradients", step)


# ---- changing a sequence of events ----

def inserted(events: Events, rows: list[tuple[int, int, str]], category: str) -> Events:
    """The events with allocations that are never given back: (index to stand before, bytes, phase)."""
    return _with_rows(events, [Row(index, None, size, phase, category, int(phase != "build"))
                               for index, size, phase in rows], keep=np.ones(len(events), dtype=bool))


def _with_rows(events: Events, rows: list[Row], keep: np.ndarray) -> Events:
    """The events that are kept and those of ``rows``, in order. At one index, what is given back comes first."""
    number = int(events.tensor.max()) + 1
    added: dict[str, list[int]] = {name: [] for name in COLUMNS}
    order = []
    for offset, row in enumerate(rows):
        for place, size in ((row.start - 0.5, row.bytes), (row.stop and row.stop - 0.75, -row.bytes)):
            if place is not None and row.bytes:
                phase, category = PHASES.index(row.phase), CATEGORIES.index(row.category)
                values = (number + offset, size, phase, category, 0, row.step, 0)
                for name, value in zip(COLUMNS, values, strict=True):
                    added[name].append(value)
                order.append(place)
    columns = {name: np.concatenate([column[keep], np.array(added[name], dtype=column.dtype)])
               for name, column in events.columns.items()}
    places = np.concatenate([np.nonzero(keep)[0], order])
    return _sorted(Events(columns, events.modules, events.spans), places)


def _sorted(events: Events, order: np.ndarray) -> Events:
    """Events by their ``order``, in which the old indices are whole numbers; spans keep what stood in them."""
    permutation = np.argsort(order, kind="stable")
    places = order[permutation]
    columns = {name: column[permutation] for name, column in events.columns.items()}
    spans = tuple((phase, int(np.searchsorted(places, start - 0.5)), int(np.searchsorted(places, stop - 0.5)), step)
                  for phase, start, stop, step in events.spans)
    return Events(columns, events.modules, spans)

"""Time and memory of many configurations from few traces: what a search asks for. Needs no torch where traces are kept.

Memory is the peak of the tensors plus the catalogue's overheads, with the allocator's share taken as a usual one; what
is recommended is planned in full. With a VAE in the loop, its part comes from a model of one small block: encoding does
not depend on what is trained.
"""

from dataclasses import dataclass

import numpy as np

from dit.config import TrainConfig, replace
from dit.planner import communication, dtype_and_kernel, memory_of, shards_of, traced
from dit.planner.calibration import Calibration
from dit.planner.catalogue import Device, Node
from dit.planner.memory import MemoryPlan, rounded
from dit.planner.spread import with_shards
from dit.planner.step_time import Counted, Tally, TimePlan, counted, predict_tallied, tally_of
from dit.planner.trace import CATEGORIES, PHASES, Events, StepTrace, Trace

EXTRACTION_BATCH = 32  # scripts/extract_latents.py's default
ENCODINGS_PER_IMAGE = 2  # as it is and flipped


@dataclass(frozen=True)
class _Levels:
    """Bytes of a step's tensors: at the highest, and at the highest start of a forward."""

    peak: float
    before_forward: float


@dataclass(frozen=True)
class _Encoding:
    """A VAE's part of a micro-step: bytes of its weights, and bytes it takes while it encodes."""

    weights: float
    peak: float


class Costs:
    """Time and memory of any candidate. Make one per search, or keep it for the next one."""

    def __init__(self):
        self._traces: dict[tuple, Trace] = {}
        self._ops: dict[tuple, Counted] = {}
        self._tallies: dict[tuple, tuple[Tally, Tally]] = {}
        self._levels: dict[tuple, _Levels] = {}
        self._encodings: dict[tuple, _Encoding] = {}
        self._plans: dict[tuple, MemoryPlan] = {}
        self._calibrations: dict[int, Calibration] = {}  # kept, so that an id stays one calibration's

    @property
    def num_traces(self) -> int:
        """Traces that were read or made."""
        return len(self._traces)

    def time(self, config: TrainConfig, device: Device, num_devices: int, micro_batch: int,
             calibration: Calibration, node: Node | None = None) -> TimePlan:
        """The plan of a step."""
        shards = communication.shard_size(config, num_devices)
        first, rest = self._tally(_without_vae(config), device, micro_batch, calibration, shards)
        accumulation = config.memory.grad_accum
        tally = first.plus(rest, accumulation - 1)
        if config.encodes_in_loop:
            tally = tally.plus(self._encode_tally(config, device, micro_batch, calibration), accumulation)
        return predict_tallied(tally, micro_batch, config, device, num_devices, calibration, node=node)

    def memory_bytes(self, config: TrainConfig, device: Device, num_devices: int, micro_batch: int) -> float:
        """High figure of a device's memory, about."""
        levels = self._step_levels(_without_vae(config), device, num_devices, micro_batch)
        peak, several = levels.peak, num_devices > 1
        if config.encodes_in_loop:
            encoding = self._encoding(config, device, micro_batch)
            peak = max(peak, levels.before_forward + encoding.peak) + encoding.weights
        has_buckets = several and config.memory.grad_accum > 1 and config.memory.parallel == "ddp"
        buckets = communication.gradient_bytes(config.shape) if has_buckets else 0
        usual = 1.15 if config.memory.ckpt or config.encodes_in_loop else 1.04
        outside = device.context_bytes[2] + 2 * device.cublas_workspace_bytes + 1.0e9 * several
        return peak * usual + buckets + outside

    def plan_memory(self, config: TrainConfig, device: Device, num_devices: int, micro_batch: int) -> MemoryPlan:
        """The memory planned in full, the allocator replayed."""
        key = config, device.name, device.memory_bytes, num_devices
        if key not in self._plans:
            events = self._trace(config, device, micro_batch)[1].events_at(micro_batch)
            self._plans[key] = memory_of(config, device, num_devices, StepTrace(micro_batch, events, []))
        return self._plans[key]

    def extraction_seconds_per_image(self, config: TrainConfig, device: Device, calibration: Calibration) -> float:
        """Seconds one device needs to make the latents of one image, if the images come fast enough."""
        tally = self._encode_tally(config, device, EXTRACTION_BATCH, calibration)
        seconds = max(sum(tally.device.values()), sum(tally.host.values()))
        return ENCODINGS_PER_IMAGE * seconds / EXTRACTION_BATCH

    # ---- from traces ----

    def _trace(self, config: TrainConfig, device: Device, micro_batch: int) -> tuple[tuple, Trace]:
        """(what it depends on, the trace), read from one recording where that serves every micro-batch."""
        memory = {"parallel": "ddp", "shard_size": 0, "grad_accum": min(config.memory.grad_accum, 2)}
        recorded = replace(config, global_batch_size=1, **memory)
        key = recorded, *dtype_and_kernel(config, device)
        if micro_batch > 1 and key in self._traces:
            return key, self._traces[key]
        alone = *key, micro_batch
        if alone in self._traces:
            return alone, self._traces[alone]
        trace = traced(recorded, device, micro_batch)
        key = key if trace.is_affine else alone
        self._traces[key] = trace
        return key, trace

    def _counted(self, config: TrainConfig, device: Device, micro_batch: int) -> tuple[tuple, Counted]:
        key, trace = self._trace(config, device, micro_batch)
        key = *key, micro_batch
        if key not in self._ops:
            self._ops[key] = counted(trace, micro_batch)
        return key, self._ops[key]

    def _tally(self, config: TrainConfig, device: Device, micro_batch: int, calibration: Calibration,
               shards: int) -> tuple[Tally, Tally]:
        """Sums over a step of one micro-step, and over what every further one adds."""
        key, ops = self._counted(config, device, micro_batch)
        self._calibrations[id(calibration)] = calibration
        key = *key, device.name, id(calibration), shards
        if key not in self._tallies:
            repeats = [op.micro_step == 1 and op.phase not in ("optimizer", "ema") for op, _, _ in ops]
            parts = ([each for each, again in zip(ops, repeats, strict=True) if again == is_rest]
                     for is_rest in (False, True))
            self._tallies[key] = tuple(tally_of(part, config, device, calibration, shards) for part in parts)
        return self._tallies[key]

    def _step_levels(self, config: TrainConfig, device: Device, num_devices: int, micro_batch: int) -> _Levels:
        shards = shards_of(config, num_devices)
        key, trace = self._trace(config, device, micro_batch)
        key = *key, micro_batch, shards
        if key not in self._levels:
            events = trace.events_at(micro_batch)
            levels, starts = _levels(with_shards(events, shards) if shards else events, "forward")
            self._levels[key] = _Levels(float(levels.max()), float(max(levels[start - 1] for start, _ in starts)))
        return self._levels[key]

    def _encode_config(self, config: TrainConfig) -> TrainConfig:
        """The smallest training whose steps encode the same images."""
        return replace(config, model="custom", depth=1, hidden_size=64, num_heads=1, grad_accum=1, ema="off", amp=False,
                       patch_size=config.shape.patch_size, amp_dtype="auto", ckpt=False, ckpt_blocks=None,
                       ckpt_every_nth=1, optimizer="adamw", clip_grad=0.0, attention="auto", sample_every=0)

    def _encode_tally(self, config: TrainConfig, device: Device, micro_batch: int, calibration: Calibration) -> Tally:
        small = self._encode_config(config)
        key, ops = self._counted(small, device, micro_batch)
        self._calibrations[id(calibration)] = calibration
        key = *key, device.name, id(calibration), "encode"
        if key not in self._tallies:
            encoding = [each for each in ops if each[0].phase == "encode"]
            self._tallies[key] = tally_of(encoding, small, device, calibration), Tally()
        return self._tallies[key][0]

    def _encoding(self, config: TrainConfig, device: Device, micro_batch: int) -> _Encoding:
        key, trace = self._trace(self._encode_config(config), device, micro_batch)
        key = *key, micro_batch
        if key not in self._encodings:
            events = trace.events_at(micro_batch)
            levels, spans = _levels(events, "encode")
            peak = max(levels[start:stop].max() - levels[start - 1] for start, stop in spans)
            weights = events.bytes[(events.category == CATEGORIES.index("vae")) & (events.step == 0)]
            self._encodings[key] = _Encoding(float(np.maximum(weights, 0).sum()), float(peak))
        return self._encodings[key]


def _levels(events: Events, phase: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Bytes allocated after each event, and where the spans of a phase start and stop."""
    spans = [(start, stop) for number, start, stop, _ in events.spans if PHASES[number] == phase]
    return np.cumsum(rounded(events.bytes)), spans


def _without_vae(config: TrainConfig) -> TrainConfig:
    """The same training on latents, where a VAE runs in the loop."""
    return on_latents(config) if config.encodes_in_loop else config


def on_latents(config: TrainConfig) -> TrainConfig:
    """The same training from what scripts/extract_latents.py has made."""
    return replace(config, data="latents", data_path="latents", encode_chunk=0, classes_file=None,
                   augment="center-crop")

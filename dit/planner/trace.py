"""What one training step allocates and computes, for any micro-batch: the data that the planner works on.

A :class:`Trace` holds the events (tensor bytes taken and given back) of three whole optimizer steps and the operations
of one of them. Every size in it is affine in the micro-batch, ``base + slope * micro_batch``, and one recording of the
real step (``dit.planner.tracing``) gives both numbers. Neither torch nor a GPU is needed to read one.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from dit.config import TrainConfig

PHASES = ("build", "data", "encode", "forward", "backward", "optimizer", "ema", "save", "sample")
CATEGORIES = ("parameters", "gradients", "optimizer", "ema", "activations", "temporaries", "cast_copies", "vae",
              "batch", "other")
TRACED_STEPS = 3
SYMBOL = 2**31 - 1
"""The micro-batch at which steps are recorded. Meta tensors take no memory, so it can be larger than any size that does
not depend on the batch: whatever is recorded is then base + slope * SYMBOL with the base as remainder."""
COLUMNS = {"tensor": np.int64, "bytes": np.int64, "phase": np.uint8, "category": np.uint8, "module": np.uint16,
           "step": np.uint8, "micro_step": np.uint8}


@dataclass(frozen=True)
class Op:
    """One call of a kernel at a given micro-batch.

    ``bytes_read`` and ``bytes_written`` are the sizes of the tensors it reads and writes, ``flops`` counts matrix
    products, convolutions and attention (multiply and add are two). ``kind`` is "view" for what only makes a new view
    of old memory (nothing runs, nothing is read), else "kernel". ``num_tensors`` is above 1 for multi-tensor
    operations. ``module`` is the module's path with block numbers as ``*``, in the backward the path of the module
    whose gradient it computes. ``recomputed`` marks forward operations that checkpointing runs again in the backward.
    """

    name: str
    phase: str
    module: str
    dtype: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    flops: int
    bytes_read: int
    bytes_written: int
    kind: str = "kernel"
    step: int = 2
    micro_step: int = 0
    num_tensors: int = 1
    recomputed: bool = False


@dataclass(frozen=True)
class Event:
    """One tensor's memory being taken ("alloc") or given back ("free"); for reading, not for arithmetic."""

    kind: str
    tensor: int
    bytes: int
    phase: str
    category: str
    module: str
    step: int
    micro_step: int


@dataclass(frozen=True)
class Events:
    """Events in order, as columns of equal length.

    ``bytes`` is positive where memory is taken and negative where it is given back; phase, category and module are
    indices into PHASES, CATEGORIES and ``modules``. What exists before the first step is allocated in step 0, phase
    "build". A tensor's two events carry the same category and module. ``spans`` are the phases as they came: (phase,
    index of the first event, index after the last, step).
    """

    columns: dict[str, np.ndarray]
    modules: tuple[str, ...]
    spans: tuple[tuple[int, int, int, int], ...]

    def __len__(self) -> int:
        return len(self.columns["bytes"])

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self) -> Iterator[Event]:
        rows = zip(*(self.columns[name].tolist() for name in COLUMNS), strict=True)
        for tensor, num_bytes, phase, category, module, step, micro_step in rows:
            yield Event("alloc" if num_bytes > 0 else "free", tensor, abs(num_bytes), PHASES[phase],
                        CATEGORIES[category], self.modules[module], step, micro_step)


@dataclass(frozen=True)
class StepTrace:
    """A trace at one micro-batch: ``events`` of steps 1 to 3 after the building, ``ops`` of one step in order."""

    micro_batch: int
    events: Events
    ops: list[Op]
    trace: "Trace | None" = field(default=None, repr=False, compare=False)
    """Where the same step has its events at other micro-batches, if it has."""


@dataclass(frozen=True)
class Recording:
    """One recorded run at one micro-batch: the events, and the step's operations as indices into a table of distinct
    ones."""

    micro_batch: int
    events: Events
    op_table: tuple[Op, ...]
    op_sequence: np.ndarray


@dataclass(frozen=True)
class Trace:
    """A recording and what it was made of, to be read at any micro-batch where ``is_affine``, else at the recorded one.

    ``request`` is the dictionary of everything the recording depended on. ``accumulation`` is the run's; a recording
    holds at most two micro-steps, since the second, third and every later one are alike.
    """

    request: dict[str, object]
    recording: Recording
    accumulation: int = 1
    memo: dict[object, object] = field(default_factory=dict, repr=False, compare=False)
    """What was computed from this trace, by what it depends on besides."""

    @property
    def is_affine(self) -> bool:
        return self.recording.micro_batch == SYMBOL

    def at(self, micro_batch: int) -> StepTrace:
        """The trace at ``micro_batch``."""
        table = self.op_table_at(micro_batch)
        ops = self._accumulated([table[index] for index in self.recording.op_sequence])
        return StepTrace(micro_batch, self.events_at(micro_batch), ops, self if self.is_affine else None)

    def events_at(self, micro_batch: int) -> Events:
        """The events at ``micro_batch``."""
        events = self.recording.events
        if self.is_affine:
            slope, base = np.divmod(np.abs(events.bytes), SYMBOL)
            if drawn := _drawn(events):  # a few images at a time, whatever the micro-batch
                fixed = np.isin(events.tensor, drawn)
                slope, base = np.where(fixed, 0, slope), np.where(fixed, np.abs(events.bytes), base)
            size = np.sign(events.bytes) * (base + slope * micro_batch)
            return Events({**events.columns, "bytes": size}, events.modules, events.spans)
        assert self.recording.micro_batch == micro_batch, f"recorded at {self.recording.micro_batch} only"
        return events

    def op_table_at(self, micro_batch: int) -> list[Op]:
        """The distinct operations at ``micro_batch``, in the order of the recording's table."""
        if self.is_affine:
            return [_op_at(op, micro_batch) for op in self.recording.op_table]
        assert self.recording.micro_batch == micro_batch, f"recorded at {self.recording.micro_batch} only"
        return list(self.recording.op_table)

    def _accumulated(self, ops: list[Op]) -> list[Op]:
        """Operations of all micro-steps: the second one recorded stands for every later one."""
        extra = self.accumulation - 2
        if extra <= 0:
            return ops
        last = [index for index, op in enumerate(ops) if op.micro_step == 1 and op.phase not in ("optimizer", "ema")]
        repeated = ops[last[0]:last[-1] + 1]
        return ops[:last[-1] + 1] + repeated * extra + ops[last[-1] + 1:]


def _drawn(events: Events) -> list[int]:
    """Tensors made where samples are drawn."""
    return events.tensor[(events.phase == PHASES.index("sample")) & (events.bytes > 0)].tolist()


def _op_at(op: Op, micro_batch: int) -> Op:
    """An operation recorded at SYMBOL, at ``micro_batch``. Multi-tensor operations do not depend on it."""
    if op.num_tensors > 1:
        return op

    def number(value: int) -> int:
        slope, base = divmod(value, SYMBOL)
        return base + slope * micro_batch

    def shapes(recorded: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(number, shape)) for shape in recorded)

    return Op(op.name, op.phase, op.module, op.dtype, shapes(op.inputs), shapes(op.outputs), number(op.flops),
              number(op.bytes_read), number(op.bytes_written), op.kind, op.step, op.micro_step, op.num_tensors,
              op.recomputed)


def trace_step(config: TrainConfig, *, device_kind: str, dtype: str | None, attention: str, micro_batch: int,
               num_steps: int = TRACED_STEPS, use_cache: bool = True) -> Trace:
    """The trace of ``config``'s step on a kind of device, from the cache or made now (which needs torch and seconds).

    Args:
        device_kind: "cuda" or "cpu": whose autocast and kernels are emulated.
        dtype: what autocast computes in: None (no autocast), "bf16" or "fp16".
        attention: the kernel: "flash", "efficient", "cudnn" or "math" on cuda, "flash_cpu" or "math" on cpu.
        micro_batch: what the trace will be asked for. It matters only where the step is not affine in it.
        num_steps: 1 is quicker, where only the level of memory matters and not the operations.
    """
    from dit.planner import cache

    recorded = SYMBOL if is_affine(config, micro_batch) else micro_batch
    request = {
        "shape": asdict(config.shape), "image_hw": config.image_hw, "micro_batch": recorded,
        "vae": config.vae if config.encodes_in_loop else None,
        "encode_chunk": config.data.encode_chunk if recorded != SYMBOL else 0,
        "checkpointed_blocks": config.checkpointed_blocks, "checkpoint_every": config.memory.ckpt_every_nth,
        "ema": config.optim.ema, "optimizer": config.optim.optimizer,
        "clips": config.optim.clip_grad > 0, "accumulates": config.memory.grad_accum > 1,
        "unfused": config.precision.attention == "math", "device_kind": device_kind, "dtype": dtype,
        "attention": attention,
    }
    if config.run.sample_every:
        request["decodes"] = config.vae
    if num_steps != TRACED_STEPS:
        request["num_steps"] = num_steps
    found = cache.load(request, config.memory.grad_accum) if use_cache else None
    if found is None:
        from dit.planner.tracing import record

        recording = record(config, recorded, device_kind=device_kind, dtype=dtype, attention=attention,
                           num_steps=num_steps)
        found = Trace(request, recording, config.memory.grad_accum)
        if use_cache:
            cache.save(found)
    return found


def is_affine(config: TrainConfig, micro_batch: int) -> bool:
    """Not where the VAE takes its images in pieces (whose number depends on the batch), nor for a single image."""
    chunk = config.data.encode_chunk
    return micro_batch > 1 and not (config.encodes_in_loop and 0 < chunk < micro_batch)

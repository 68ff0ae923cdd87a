"""What one training step allocates and computes, for any micro-batch: the data that the planner works on.

A :class:`Trace` holds the events (tensor bytes taken and given back) of three whole optimizer steps and the operations of one
of them. Every size in it is affine in the micro-batch, ``base + slope * micro_batch``: two recordings of the real step
(``dit.planner.record``) give the coefficients. Neither torch nor a GPU is needed to read one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from dit.config import TrainConfig

PHASES = ("build", "data", "encode", "forward", "backward", "optimizer", "ema", "save", "sample")
CATEGORIES = ("parameters", "gradients", "optimizer", "ema", "activations", "temporaries", "cast_copies", "vae", "batch",
              "other")
TRACED_STEPS = 3
MICRO_BATCHES = (2, 3)  # what is recorded; from 2 on no dimension of the batch is 1
COLUMNS = {"tensor": np.int64, "bytes": np.int64, "phase": np.uint8, "category": np.uint8, "module": np.uint16,
           "step": np.uint8, "micro_step": np.uint8}


@dataclass(frozen=True)
class Op:
    """One call of a kernel at a given micro-batch.

    ``bytes_read`` and ``bytes_written`` are the sizes of the tensors it reads and writes, ``flops`` counts matrix products,
    convolutions and attention (multiply and add are two). ``kind`` is "view" for what only makes a new view of old memory
    (nothing runs, nothing is read), else "kernel". ``num_tensors`` is above 1 for multi-tensor operations. ``module`` is the
    module's path with block numbers as ``*``, in the backward the path of the module whose gradient it computes.
    ``recomputed`` marks forward operations that checkpointing runs again in the backward.
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

    ``bytes`` is positive where memory is taken and negative where it is given back; phase, category and module are indices
    into PHASES, CATEGORIES and ``modules``. What exists before the first step is allocated in step 0, phase "build". A
    tensor's two events carry the same category and module. ``spans`` are the phases as they came: (phase, index of the first
    event, index after the last, step).
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


@dataclass(frozen=True)
class Recording:
    """One recorded run at one micro-batch: the events, and the step's operations as indices into a table of distinct ones."""

    micro_batch: int
    events: Events
    op_table: tuple[Op, ...]
    op_sequence: np.ndarray


@dataclass(frozen=True)
class Trace:
    """Recordings at two micro-batches (one, where the step is not affine in it), and what they were made of.

    ``request`` is the dictionary of everything the recording depended on. ``accumulation`` is the run's; recordings hold at most two
    micro-steps, since the second, third and every later one are alike.
    """

    request: dict[str, object]
    recordings: tuple[Recording, ...]
    accumulation: int = 1
    _cache: dict[int, StepTrace] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_affine(self) -> bool:
        """Whether :meth:`at` answers for every micro-batch, and not just the recorded one."""
        return len(self.recordings) == 2

    def at(self, micro_batch: int) -> StepTrace:
        """The trace at ``micro_batch``."""
        if micro_batch not in self._cache:
            for recording in self.recordings:
                if recording.micro_batch == micro_batch:
                    events, table = recording.events, recording.op_table
                    break
            else:
                assert self.is_affine, f"recorded at micro-batch {self.recordings[0].micro_batch} only, not {micro_batch}"
                events, table = self._events_at(micro_batch), self._op_table_at(micro_batch)
            sequence = self.recordings[0].op_sequence
            self._cache[micro_batch] = StepTrace(micro_batch, events, self._accumulated([table[i] for i in sequence]))
        return self._cache[micro_batch]

    def _events_at(self, micro_batch: int) -> Events:
        low, high = self.recordings
        steps = high.micro_batch - low.micro_batch
        slope, remainder = np.divmod(high.events.bytes - low.events.bytes, steps)
        assert not remainder.any(), "a tensor's size is not affine in the micro-batch"
        size = low.events.bytes + slope * (micro_batch - low.micro_batch)
        return Events({**low.events.columns, "bytes": size}, low.events.modules, low.events.spans)

    def _op_table_at(self, micro_batch: int) -> list[Op]:
        low, high = self.recordings
        position = micro_batch - low.micro_batch
        steps = high.micro_batch - low.micro_batch
        return [_op_between(a, b, position, steps) for a, b in zip(low.op_table, high.op_table, strict=True)]

    def _accumulated(self, ops: list[Op]) -> list[Op]:
        """Operations of all micro-steps: the second one recorded stands for every later one."""
        extra = self.accumulation - 2
        if extra <= 0:
            return ops
        last = [index for index, op in enumerate(ops) if op.micro_step == 1 and op.phase not in ("optimizer", "ema")]
        repeated = ops[last[0]:last[-1] + 1]
        return ops[:last[-1] + 1] + repeated * extra + ops[last[-1] + 1:]


def _op_between(low: Op, high: Op, position: int, steps: int) -> Op:
    """The operation at ``low``'s micro-batch plus ``position``, from two whose micro-batches lie ``steps`` apart."""
    if low == high:
        return low

    def number(a: int, b: int) -> int:
        slope, remainder = divmod(b - a, steps)
        assert remainder == 0, f"{low.name}: {a} and {b} are not affine in the micro-batch"
        return a + slope * position

    def shapes(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(number, one, other)) for one, other in zip(a, b, strict=True))

    return Op(low.name, low.phase, low.module, low.dtype, shapes(low.inputs, high.inputs),
              shapes(low.outputs, high.outputs), number(low.flops, high.flops),
              number(low.bytes_read, high.bytes_read), number(low.bytes_written, high.bytes_written),
              low.kind, low.step, low.micro_step, low.num_tensors, low.recomputed)


def check_alike(low: Recording, high: Recording) -> None:
    """Assert that two recordings differ in sizes alone, so that they may be joined into an affine trace."""
    for name in COLUMNS:
        if name != "bytes":
            assert np.array_equal(low.events.columns[name], high.events.columns[name]), f"recordings differ in {name}"
    assert np.array_equal(np.sign(low.events.bytes), np.sign(high.events.bytes)), "recordings differ in order"
    assert low.events.spans == high.events.spans, "recordings differ in their phases"
    assert np.array_equal(low.op_sequence, high.op_sequence), "recordings differ in their operations"


def trace_step(config: TrainConfig, *, device_kind: str, dtype: str | None, attention: str, micro_batch: int,
          use_cache: bool = True) -> Trace:
    """The trace of ``config``'s step on a kind of device, from the cache or made now (which needs torch and seconds).

    Args:
        device_kind: "cuda" or "cpu": whose autocast and kernels are emulated.
        dtype: what autocast computes in: None (no autocast), "bf16" or "fp16".
        attention: the kernel: "flash", "efficient", "cudnn" or "math" on cuda, "flash_cpu" or "math" on cpu.
        micro_batch: what the trace will be asked for. It matters only where the step is not affine in it.
    """
    from dit.planner import cache

    recorded = MICRO_BATCHES if _is_affine(config, micro_batch) else (micro_batch,)
    request = {
        "shape": asdict(config.shape), "image_hw": config.image_hw, "micro_batches": recorded,
        "vae": config.vae if config.encodes_in_loop else None,
        "encode_chunk": config.data.encode_chunk if len(recorded) == 1 else 0,
        "checkpointed_blocks": config.checkpointed_blocks, "ema": config.optim.ema, "optimizer": config.optim.optimizer,
        "clips": config.optim.clip_grad > 0, "accumulates": config.memory.grad_accum > 1,
        "unfused": config.precision.attention == "math", "device_kind": device_kind, "dtype": dtype, "attention": attention,
    }
    found = cache.load(request, config.memory.grad_accum) if use_cache else None
    if found is None:
        from dit.planner.tracing import record

        recordings = tuple(record(config, size, device_kind=device_kind, dtype=dtype, attention=attention)
                           for size in recorded)
        if len(recordings) == 2:
            check_alike(*recordings)
        found = Trace(request, recordings, config.memory.grad_accum)
        if use_cache:
            cache.save(found)
    return found


def _is_affine(config: TrainConfig, micro_batch: int) -> bool:
    """Not where the VAE takes its images in pieces (whose number depends on the batch), nor for a single image."""
    chunk = config.data.encode_chunk
    return micro_batch > 1 and not (config.encodes_in_loop and 0 < chunk < micro_batch)

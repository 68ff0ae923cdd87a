"""Times single operations on this machine: alone, and inside real steps of small models.

Operations inside a step meet memory as a training step leaves it (fresh outputs, data in or out of the caches), which a
loop over one operation does not. Imports torch; only ``scripts/calibrate.py`` and tests use it.
"""

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dit.codec import Codec, codec_spec
from dit.config import TrainConfig, replace
from dit.planner.op_class import Work, works
from dit.planner.trace import Op
from dit.precision import resolve
from dit.step import StepParts, build_parts, no_phase, train_step

_GATHERS = {"aten.embedding", "aten.index", "aten.gather"}
GLOO_BENCHMARK_BYTES = 25 << 20  # one bucket of DDP


@dataclass(frozen=True)
class TimedStep:
    """A real step: its operations' work and median seconds, and each phase's median without the timer.

    Medians, not minima: a run is held against its median step, and on a shared machine that is a tenth or more above
    the best one. ``noise`` is the upper quartile of whole steps over their median, less one.
    """

    name: str
    phases: tuple[str, ...]
    works: tuple[Work, ...]
    seconds: tuple[float, ...]
    phase_seconds: dict[str, float]
    noise: float


def cuda_mark() -> torch.cuda.Event:
    """A moment in the device's own time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class OpTimer(TorchDispatchMode):
    """Clocks every operation below autograd. ``describes`` also notes what each one is.

    ``mark`` gives a moment: the host's clock, or :func:`cuda_mark`, which is right where the host runs ahead.
    """

    def __init__(self, describes: bool, mark: Callable[[], object] = time.perf_counter):
        super().__init__()
        self.describes, self.phase, self._mark = describes, "", mark
        self._spans: list[tuple[object, object]] = []
        self.ops: list[Op] = []

    @property
    def seconds(self) -> list[float]:
        """Of each operation. On a GPU, synchronise first."""
        if self._mark is cuda_mark:
            return [start.elapsed_time(end) / 1e3 for start, end in self._spans]
        return [end - start for start, end in self._spans]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        start = self._mark()
        result = func(*args, **kwargs)
        self._spans.append((start, self._mark()))
        if self.describes:
            self.ops.append(_describe(func, args, kwargs, result, self.phase))
        return result


def _describe(func, args: tuple, kwargs: dict, result: object, phase: str) -> Op:
    """The operation as ``dit.planner.record`` would note it."""
    packet = func._overloadpacket
    name = f"{func.namespace}.{packet.__name__}"
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    lists = [len(arg) for arg in args if isinstance(arg, list) and arg and isinstance(arg[0], Tensor)]
    aliases = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
    is_view = aliases or name in ("aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.empty_strided") or (
        name.startswith("profiler"))
    flops_of = flop_registry.get(packet)
    written = outputs or inputs[:max(lists, default=1)]
    return Op(name, phase, "", str((outputs or inputs)[0].dtype)[6:] if outputs or inputs else "",
              () if lists else tuple(tuple(tensor.shape) for tensor in inputs),
              () if lists else tuple(tuple(tensor.shape) for tensor in outputs),
              int(flops_of(*args, **kwargs, out_val=result)) if flops_of else 0,
              0 if is_view else _bytes(outputs if name in _GATHERS else inputs), 0 if is_view else _bytes(written),
              "view" if is_view else "kernel", num_tensors=max(lists, default=1))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors)


def time_step(name: str, config: TrainConfig, repeats: int) -> TimedStep:
    """Time ``config``'s step on the CPU, ``repeats`` times with the operations' timer and as often without."""
    step = stepper(config)
    _phases(step)  # the first step also fills caches
    describing = OpTimer(describes=True)
    _timed(step, describing)
    runs, plain = [], []
    for _ in range(repeats):
        timer = OpTimer(describes=False)
        _timed(step, timer)
        runs.append(timer.seconds)
        plain.append(_phases(step))
    totals = sorted(sum(run.values()) for run in plain)
    return TimedStep(name, tuple(op.phase or "data" for op in describing.ops), tuple(works(describing.ops)),
                     tuple(map(median, zip(*runs, strict=True))),
                     {phase: median(run[phase] for run in plain) for phase in plain[0]},
                     totals[3 * repeats // 4] / median(totals) - 1)


def merged(passes: Sequence[TimedStep]) -> TimedStep:
    """The same step measured several times, apart from each other: the median of each figure, so that of three passes
    one may meet a busy machine. ``noise`` is then half of the passes' range, in logarithms: how the machine drifts.
    """
    first, totals = passes[0], [sum(each.phase_seconds.values()) for each in passes]
    assert all(each.works == first.works for each in passes)
    return TimedStep(first.name, first.phases, first.works,
                     tuple(map(median, zip(*(each.seconds for each in passes), strict=True))),
                     {phase: median(each.phase_seconds[phase] for each in passes) for phase in first.phase_seconds},
                     math.sqrt(max(totals) / min(totals)) - 1)


def stepper(config: TrainConfig, device: str = "cpu") -> Callable[..., object]:
    """A function that takes one step of ``config``, always on one batch; it may be given ``phase``."""
    parts, batches = _prepare(config, torch.device(device))
    return lambda phase=no_phase: train_step(parts, batches, config.memory.grad_accum, lr=1e-4, ema_decay=0.99,
                                             phase=phase)


def _prepare(config: TrainConfig, device: torch.device) -> tuple[StepParts, Iterator[dict[str, Tensor]]]:
    parts = build_parts(config, device, Codec(codec_spec("none")), resolve(config, device))
    size, shape = config.micro_batch(1), config.latent_shape
    batch = {"x": torch.randn(size, *shape), "noise": torch.randn(size, *shape), "drop": torch.rand(size) < 0.1,
             "y": torch.randint(0, config.model.num_classes, (size,)), "t": torch.randint(0, 1000, (size,))}
    return parts, iter(lambda: batch, None)


def _timed(step: Callable, timer: OpTimer) -> None:
    @contextmanager
    def phase(name: str) -> Iterator[None]:
        timer.phase = name
        yield

    with timer:
        step(phase)


def _phases(step: Callable) -> dict[str, float]:
    """Seconds of each phase; what lies between phases counts to the one before."""
    marks: list[tuple[str, float]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        marks.append((name, time.perf_counter()))
        yield

    step(phase)
    marks.append(("", time.perf_counter()))
    seconds: dict[str, float] = {}
    for (name, start), (_, end) in zip(marks, marks[1:], strict=False):
        seconds[name] = seconds.get(name, 0.0) + end - start
    return seconds


def time_gpu_step(config: TrainConfig, repeats: int = 5) -> tuple[tuple[Op, ...], list[float], float, float]:
    """(operations, median device seconds of each, host seconds, seconds) of ``config``'s step on the present GPU."""
    step = stepper(config, "cuda")
    step()
    describing = OpTimer(describes=True)
    _timed(step, describing)
    runs, hosts, walls = [], [], []
    for _ in range(repeats):
        timer = OpTimer(False, cuda_mark)
        _timed(step, timer)
        torch.cuda.synchronize()
        runs.append(timer.seconds)
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    return tuple(describing.ops), list(map(median, zip(*runs, strict=True))), median(hosts), median(walls)


def reference_config(base: TrainConfig, *, width: int, depth: int, heads: int, tokens: int, batch: int,
                     **changes: object) -> TrainConfig:
    """A small model for measuring: ``tokens`` (a square) tokens of ``width``, on latents of 4 channels and patch 2."""
    side = 2 * round(tokens**0.5)
    return replace(base, model="custom", data="synthetic", vae="none", image_size=side, patch_size=2, num_classes=10,
                   hidden_size=width, depth=depth, num_heads=heads, global_batch_size=batch, **changes)


# ---- single operations ----

class Pool:
    """Operands cut out of one large block in turn, so that they come from memory and not from the caches.

    Results are kept a while, so that each one is written to fresh memory, as in a training step.
    """

    def __init__(self, dtype: torch.dtype, num_bytes: int = 96 << 20, kept_bytes: int = 96 << 20):
        self._block = torch.full((num_bytes // dtype.itemsize,), 0.5, dtype=dtype)
        self._next, self._kept_bytes, self._kept = 0, kept_bytes, deque()
        self._held = 0

    def take(self, *shape: int) -> Tensor:
        """A tensor of the next piece of the block."""
        size = math.prod(shape)
        if self._next + size > len(self._block):
            self._next = 0
        piece = self._block[self._next:self._next + size].view(shape)
        self._next += size
        return piece

    def keep(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Hold a result until enough others have come."""
        num_bytes = sum(tensor.nbytes for tensor in (result if isinstance(result, tuple) else (result,)))
        self._kept.append((num_bytes, result))
        self._held += num_bytes
        while self._held > self._kept_bytes or len(self._kept) > 256:
            self._held -= self._kept.popleft()[0]


def time_call(call: Callable[[], object], budget: float = 0.03, repeats: int = 5) -> float:
    """Seconds of one call: the median of ``repeats`` rounds of at least one call, about ``budget`` seconds in all."""
    start = time.perf_counter()
    call()
    count = max(1, min(100, int(budget / repeats / max(time.perf_counter() - start, 1e-7))))
    rounds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - start) / count)
    return median(rounds)


def gloo_rates() -> dict[str, float]:
    """Bytes per second and seconds per hop of an all-reduce between two processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        store = f"file://{folder}/store"
        ranks = [context.Process(target=_all_reduces, args=(rank, store, results)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert not any(each.exitcode for each in ranks), "the gloo benchmark failed"
        tiny, large = results.get()
    return {"gloo_bytes_per_second": GLOO_BENCHMARK_BYTES / (large - tiny), "gloo_latency_seconds": tiny / 2}


def _all_reduces(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    seconds = []
    for num_bytes in (4, GLOO_BENCHMARK_BYTES):
        tensor = torch.ones(num_bytes // 4)
        seconds.append(time_call(lambda x=tensor: torch.distributed.all_reduce(x), budget=1e-9, repeats=8))
    if rank == 0:
        results.put(seconds)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def gemm_call(layout: str, m: int, n: int, k: int, pool: Pool) -> Callable[[], None]:
    """A matrix product as a linear layer's forward ("nt", with bias) or backward ("nn", "tn") makes it."""
    if layout == "nt":
        return lambda: pool.keep(torch.addmm(pool.take(n), pool.take(m, k), pool.take(n, k).t()))
    if layout == "nn":
        return lambda: pool.keep(torch.mm(pool.take(m, k), pool.take(k, n)))
    return lambda: pool.keep(torch.mm(pool.take(k, m).t(), pool.take(k, n)))


def bmm_call(batch: int, m: int, n: int, k: int, pool: Pool) -> Callable[[], None]:
    """A batched product of unfused attention."""
    return lambda: pool.keep(torch.bmm(pool.take(batch, m, k), pool.take(batch, k, n)))


def attention_calls(rows: int, tokens: int, head_size: int, pool: Pool) -> tuple[Callable, Callable]:
    """Fused attention's forward and backward on a CPU, with the layout that a joint qkv projection gives."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def operands() -> tuple[Tensor, ...]:
        return pool.take(rows, tokens, 3, 1, head_size).permute(2, 0, 3, 1, 4).unbind(0)

    out, logsumexp = forward(*operands())
    return (lambda: pool.keep(forward(*operands())),
            lambda: pool.keep(backward(pool.take(*out.shape), *operands(), out, logsumexp, 0.0, False)))

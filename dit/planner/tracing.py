"""Trace the project's own optimizer step on the meta device: three whole steps, for a device that need not be there."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from dit.codec import Codec, build_codec, codec_spec
from dit.config import TrainConfig
from dit.ema import warmed_up_decay
from dit.planner.emulation import Emulation, MetaPrecision, MetaScaler
from dit.planner.kernels import internals, replacements
from dit.planner.record import Recorder
from dit.planner.trace import TRACED_STEPS, Recording
from dit.step import StepParts, build_parts, train_step

META = torch.device("meta")
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def record(config: TrainConfig, micro_batch: int, *, device_kind: str, dtype: str | None, attention: str) -> Recording:
    """Run three steps at ``micro_batch`` images and at most two micro-steps, and return what they took and did.

    ``device_kind`` is cuda or cpu; ``dtype`` None, bf16 or fp16; ``attention`` a key of ``emulation.ATTENTION``.
    """
    recorder = Recorder(internals(device_kind), replacements(device_kind))

    def emulation(autocast_dtype: torch.dtype | None = DTYPES[dtype]) -> Emulation:
        return Emulation(device_kind, autocast_dtype, lambda query: attention,
                         lambda weight: recorder.label([weight], "cast_copies"))

    gc.collect()
    gc.disable()  # when it comes would be chance; nothing in a step needs it
    with _multi_tensor_on_meta(), recorder, recorder.hooks():
        parts = build_parts(config, META, _codec(config), MetaPrecision(emulation, MetaScaler(dtype == "fp16", META)))
        parts.model.checkpoint_context_fn = lambda: (nullcontext(), emulation())
        _label_parts(recorder, parts)
        batches = _batches(config, micro_batch, torch.device("cpu") if device_kind == "cuda" else META)
        phase = _phase(recorder, parts, emulation)
        for step in range(1, TRACED_STEPS + 1):
            recorder.begin_step(step)
            recorder.records_ops = step == 2
            result = train_step(parts, batches, min(config.memory.grad_accum, 2), lr=config.optim.lr,
                                ema_decay=warmed_up_decay(config.optim.ema_decay, step), phase=phase)
            recorder.end_step()
    del result
    gc.enable()
    return recorder.finish(micro_batch)


def _codec(config: TrainConfig) -> Codec:
    if not config.encodes_in_loop:
        return Codec(codec_spec("none"))
    return build_codec(config.vae, device=META, chunk=config.data.encode_chunk, random_weights=True)


def _label_parts(recorder: Recorder, parts: StepParts) -> None:
    recorder.name_modules(parts.model)
    recorder.label(parts.model.parameters(), "parameters")
    for state in parts.optimizer.state.values():
        recorder.label((value for value in state.values() if isinstance(value, Tensor)), "optimizer")
    if parts.ema is not None:
        recorder.label(parts.ema.averages.values(), "ema")
    if parts.codec.vae is not None:
        recorder.name_modules(parts.codec.vae, "vae")
        recorder.label([*parts.codec.vae.parameters(), *parts.codec.vae.buffers()], "vae")


def _batches(config: TrainConfig, micro_batch: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Micro-batches as ``dit.data`` makes them, on the host or (``device`` meta) where the step runs."""
    shapes = {"x": (3, *config.image_hw) if config.encodes_in_loop else config.latent_shape,
              "noise": config.latent_shape, "y": (), "t": (), "drop": ()}
    if config.encodes_in_loop:
        shapes["posterior_noise"] = config.latent_shape
    dtypes = {"y": torch.int64, "t": torch.int64, "drop": torch.bool}

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = dtypes.get(name, torch.float32)
        if device.type == "meta":
            return torch.empty(micro_batch, *shape, dtype=dtype, device=device)
        return torch.zeros((), dtype=dtype).expand(micro_batch, *shape)  # no memory, however many images

    while True:
        yield {name: tensor(name, shape) for name, shape in shapes.items()}


def _phase(recorder: Recorder, parts: StepParts,
           emulation: Callable[[None], Emulation]) -> Callable[[str], AbstractContextManager]:
    """The step's observer: labels phases and gradients, and emulates attention where the codec runs."""
    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with recorder.in_phase(name), emulation(None) if name == "encode" else nullcontext():
            yield
            if name == "backward":
                recorder.label((p.grad for p in parts.model.parameters() if p.grad is not None), "gradients")

    return phase


@contextmanager
def _multi_tensor_on_meta() -> Iterator[None]:
    """Let torch's helpers run multi-tensor operations on meta, as they do on a CPU and on a GPU."""
    supported = _foreach_utils._get_foreach_kernels_supported_devices
    devices = [*supported(), "meta"]
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: devices
    try:
        yield
    finally:
        _foreach_utils._get_foreach_kernels_supported_devices = supported

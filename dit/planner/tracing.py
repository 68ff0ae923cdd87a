"""Trace the project's own optimizer step on the meta device: three whole steps, for a device that need not be there."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from dit import low_bit
from dit.codec import Codec, build_codec, codec_spec
from dit.config import TrainConfig
from dit.ema import warmed_up_decay
from dit.planner.emulation import Emulation, MetaPrecision, MetaScaler
from dit.planner.kernels import internals, replacements
from dit.planner.record import Recorder
from dit.planner.trace import TRACED_STEPS, Recording
from dit.sampling import grid_batches
from dit.step import Phase, StepParts, build_parts, train_step

META = torch.device("meta")
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def record(config: TrainConfig, micro_batch: int, *, device_kind: str, dtype: str | None, attention: str,
           num_steps: int = TRACED_STEPS) -> Recording:
    """Run three steps at ``micro_batch`` images and at most two micro-steps, and return what they took and did.

    Operations are those of the second step, if ``num_steps`` goes so far. ``device_kind`` is cuda or cpu; ``dtype``
    None, bf16 or fp16; ``attention`` a key of ``emulation.ATTENTION``.
    """
    recorder = Recorder(internals(device_kind), replacements(device_kind))

    def emulation(autocast_dtype: torch.dtype | None = DTYPES[dtype]) -> Emulation:
        return Emulation(device_kind, autocast_dtype, lambda query: attention,
                         lambda weight: recorder.label([weight], "cast_copies"))

    collects = gc.isenabled()
    gc.disable()  # when it comes would be chance; nothing in a step needs it
    with _multi_tensor_on_meta(), recorder, recorder.hooks():
        parts = build_parts(config, META, _codec(config), MetaPrecision(emulation, MetaScaler(dtype == "fp16", META)))
        parts.model.checkpoint_context_fn = lambda: (nullcontext(), emulation())
        on_host = _host_memory(config, parts) if device_kind == "cpu" else []
        recorder.label(on_host, "ema")
        _label_parts(recorder, parts)
        draws = _drawing(config, parts, recorder) if config.run.sample_every else None
        batches = _batches(config, micro_batch, torch.device("cpu") if device_kind == "cuda" else META)
        phase = _phase(recorder, parts, emulation)
        for step in range(1, num_steps + 1):
            recorder.begin_step(step)
            recorder.records_ops = step == 2
            result = train_step(parts, batches, min(config.memory.grad_accum, 2), lr=config.optim.lr,
                                ema_decay=warmed_up_decay(config.optim.ema_decay, step), phase=phase)
            recorder.end_step()
            recorder.records_ops = False
            if draws is not None and step == min(2, num_steps):
                draws(phase)
    del result, on_host
    if collects:
        gc.enable()
    return recorder.finish(micro_batch)


def _codec(config: TrainConfig) -> Codec:
    if not config.encodes_in_loop:
        return Codec(codec_spec("none"))
    return build_codec(config.vae, device=META, chunk=config.data.encode_chunk, random_weights=True)


def _host_memory(config: TrainConfig, parts: StepParts) -> list[Tensor]:
    """What a CPU has in its own memory, where other devices have nothing: the average on the host with its buffer, and
    the temporaries of a low-bit optimizer's step, which is not compiled there.
    """
    trainable = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    if low_bit.is_low_bit(parts.optimizer):
        parts.optimizer = low_bit.build_torchao(config.optim, trainable)
    return [torch.empty_like(each) for each in trainable for _ in range(2)] if config.optim.ema == "host" else []


def _drawing(config: TrainConfig, parts: StepParts, recorder: Recorder) -> Callable[[Phase], None]:
    """What draws two batches of the sample grid between two steps, two diffusion steps each: later ones are alike."""
    codec = parts.codec
    if not config.encodes_in_loop:
        codec = build_codec(config.vae, device=META, random_weights=True)
        _label_vae(recorder, codec)

    def draw(phase: Phase) -> None:
        with phase("sample"), parts.ema.swapped_in() if parts.ema is not None else nullcontext():
            batches = grid_batches(config, parts.model, parts.diffusion, codec, device=META,
                                   autocast=parts.precision.autocast, num_steps=2)
            for _ in range(2):
                next(batches)
            batches.close()

    return draw


def _label_parts(recorder: Recorder, parts: StepParts) -> None:
    recorder.name_modules(parts.model)
    recorder.label(parts.model.parameters(), "parameters")
    for state in parts.optimizer.state.values():
        recorder.label((part for value in state.values() for part in _parts_of(value)), "optimizer")
    if parts.ema is not None:
        recorder.label(parts.ema.averages.values(), "ema")
    _label_vae(recorder, parts.codec)


def _label_vae(recorder: Recorder, codec: Codec) -> None:
    if codec.vae is not None:
        recorder.name_modules(codec.vae, "vae")
        recorder.label([*codec.vae.parameters(), *codec.vae.buffers()], "vae")


def _parts_of(value: object) -> list[Tensor]:
    """The tensors that hold a moment: itself, or codes, scales and table."""
    if hasattr(value, "codes"):
        return [value.codes, value.scale, value.qmap]
    return [value] if isinstance(value, Tensor) else []


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
        with recorder.in_phase(name), emulation(None) if name in ("encode", "sample") else nullcontext():
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

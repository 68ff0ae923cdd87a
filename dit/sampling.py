"""Images from a model: classifier-free guidance, noise named by seeds, batches, PNG files.

The image of a seed does not depend on the batch it was made in or on its place there: every random number of an image
is a function of its seed and the step, drawn on the host, so it is the same on every device too.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dit.codec import Codec
from dit.config import TrainConfig, UsageError
from dit.diffusion import Diffusion, Model, upcast_half
from dit.randomness import normals

# Part of the key of every random number (see dit/randomness.py): changing it changes the image of every seed.
STREAM_SAMPLING = 64
_MAX_SEED = 2**64 - 1


class SampleBatch(NamedTuple):
    """Finished images, on the CPU."""

    images: Tensor  # (N, C, H, W) uint8
    classes: list[int]
    seeds: list[int]


# ---- guidance ----

def forward_with_cfg(model: Model, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float,
                     cfg_channels: int | None = None) -> Tensor:
    """Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598) on the official batch layout.

    Args:
        model: ``model(x, t, y)`` -> (N, C, H, W) or (N, 2C, H, W).
        x: (N, C, H, W) with N even; the first half is used for both halves.
        t, y: (N,); the second half of y is the null class.
        cfg_scale: 1 is no guidance.
        cfg_channels: guide only the first so many channels; None guides all C. The official code guides 3 of 4.

    Returns the model's output with the noise of both halves replaced by the guided noise. For code that expects the
    official method: ``functools.partial(forward_with_cfg, model)``.
    """
    half = x[: len(x) // 2]
    _check_cfg_channels(cfg_channels, x.shape[1])
    output = upcast_half(model(torch.cat([half, half]), t, y))  # guidance multiplies rounding errors by its scale
    channels = x.shape[1] if cfg_channels is None else cfg_channels
    eps, rest = output[:, :channels], output[:, channels:]
    conditional, unconditional = eps.chunk(2)
    guided = unconditional + cfg_scale * (conditional - unconditional)
    return torch.cat([guided.repeat(2, 1, 1, 1), rest], dim=1)


def with_guidance(model: Model, cfg_scale: float, null_class: int | None, cfg_channels: int | None = None) -> Model:
    """A callable ``f(x, t, y)`` that guides ``model``; it sends x through the model twice, or once if the scale is 1.

    Raises UsageError if the guidance could not take effect.
    """
    if not math.isfinite(cfg_scale):
        raise UsageError(f"--cfg-scale {cfg_scale}: must be a finite number")
    if cfg_scale == 1.0:
        if cfg_channels is not None:
            raise UsageError(f"--cfg-channels {cfg_channels} has no effect with --cfg-scale 1, which is no guidance")
        return model
    if null_class is None:
        raise UsageError(f"--cfg-scale {cfg_scale:g}: the model was trained without label dropout "
                         "(--class-dropout-prob 0) and cannot be guided; use --cfg-scale 1")
    if null_class == 0:
        raise UsageError(f"--cfg-scale {cfg_scale:g} has no effect: the model has no classes; use --cfg-scale 1")

    def guided(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([y, torch.full_like(y, null_class)])
        output = forward_with_cfg(model, torch.cat([x, x]), torch.cat([t, t]), both, cfg_scale, cfg_channels)
        return output[: len(x)]

    return guided


def _check_cfg_channels(cfg_channels: int | None, channels: int) -> None:
    if cfg_channels is not None and not 1 <= cfg_channels <= channels:
        raise UsageError(f"--cfg-channels {cfg_channels}: must be from 1 to {channels}, the channels of the latents")


# ---- noise ----

def seed_noise(seeds: Sequence[int], step: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normals (N, *shape) float32 on the CPU, image i a function of (seeds[i], step, shape) alone.

    Step 0 is the start of sampling; the k-th call of the model adds the noise of step k.
    """
    position = np.array([step])
    return torch.from_numpy(np.concatenate([normals(seed, STREAM_SAMPLING, position, shape) for seed in seeds]))


# ---- sampling ----

def generate(model: Model, diffusion: Diffusion, decode: Callable[[Tensor], Tensor], classes: Sequence[int],
             seeds: Sequence[int], *, latent_shape: tuple[int, int, int], null_class: int | None, cfg_scale: float,
             cfg_channels: int | None = None, sampler: Literal["ddpm", "ddim"] = "ddpm", num_steps: int | None = None,
             eta: float = 0.0, batch_size: int = 16, clip_denoised: bool = False, device: torch.device | str = "cpu",
             autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext,
             progress: Callable[[int, int], None] | None = None) -> Iterator[SampleBatch]:
    """One image per (class, seed) pair, in that order, as batches of at most ``batch_size``.

    Args:
        model: ``model(x, t, y)``. A module runs in evaluation mode and gets its own mode back after every batch.
        diffusion: the process; its kept steps matter only if ``num_steps`` is None.
        decode: latents (N, C, H, W) float32 -> pixels (N, c, h, w) in [-1, 1].
        latent_shape: (C, H, W).
        null_class: the model's label for "no class", which is also the largest label; None if it has none.
        cfg_scale, cfg_channels: see :func:`with_guidance` and :func:`forward_with_cfg`.
        num_steps: calls of the model per image, evenly spread over the schedule.
        eta: DDIM's noise, 0 to 1.
        clip_denoised: clip every predicted x_0 to [-1, 1]: for pixels, not for latents.
        autocast: makes the context of a model call; the arithmetic between the calls is fp32 in any case.
        progress: called after every step with (steps done, steps in all), counted over all batches.

    Raises UsageError, before anything is computed.
    """
    check_request(classes, seeds, null_class, getattr(model, "num_classes", None))
    _check_sampler(sampler, eta, num_steps, diffusion.num_full_timesteps, batch_size)
    _check_cfg_channels(cfg_channels, latent_shape[0])
    diffusion = diffusion if num_steps is None else diffusion.respaced(num_steps)
    guided = with_guidance(_under(model, autocast), cfg_scale, null_class, cfg_channels)
    if sampler == "ddim":
        loop = partial(diffusion.ddim_sample_loop_progressive, guided, clip_denoised=clip_denoised, eta=eta)
    else:
        loop = partial(diffusion.p_sample_loop_progressive, guided, clip_denoised=clip_denoised)
    # The noise of the last step is multiplied by 0, as is all of deterministic DDIM's.
    noisy_steps = 0 if sampler == "ddim" and eta == 0 else diffusion.num_timesteps - 1
    starts = range(0, len(seeds), batch_size)
    total_steps = len(starts) * diffusion.num_timesteps

    def batches() -> Iterator[SampleBatch]:
        steps_done = 0
        for start in starts:
            batch_classes, batch_seeds = (list(items[start:start + batch_size]) for items in (classes, seeds))
            latents = seed_noise(batch_seeds, 0, latent_shape).to(device)
            y = torch.tensor(batch_classes, dtype=torch.long, device=device)
            with torch.no_grad(), _evaluating(model):
                for output in loop(latents.shape, latents, model_kwargs={"y": y},
                                   noise_fn=partial(_step_noise, batch_seeds, noisy_steps)):
                    latents = output["sample"]
                    steps_done += 1
                    if progress is not None:
                        progress(steps_done, total_steps)
                images = to_uint8(decode(latents)).cpu()
            yield SampleBatch(images, batch_classes, batch_seeds)

    return batches()


GRID_IMAGES, GRID_AT_ONCE, GRID_STEPS, GRID_GUIDANCE = 16, 4, 50, 2.0


def grid_batches(config: TrainConfig, model: nn.Module, diffusion: Diffusion, codec: Codec, *, device: torch.device,
                 autocast: Callable[[], AbstractContextManager],
                 num_steps: int = GRID_STEPS) -> Iterator[SampleBatch]:
    """The images of a run's sample grid (--sample-every), the same classes and seeds each time, a few at a time so that
    it needs little memory. The trainer draws them, the planner traces them.
    """
    num_classes, null_class = max(1, config.model.num_classes), model.null_class
    is_guided = null_class is not None and config.model.num_classes > 0
    return generate(model, diffusion, codec.decode, [index % num_classes for index in range(GRID_IMAGES)],
                    range(GRID_IMAGES), latent_shape=config.latent_shape, null_class=null_class, num_steps=num_steps,
                    cfg_scale=GRID_GUIDANCE if is_guided else 1.0, batch_size=GRID_AT_ONCE,
                    clip_denoised=codec.spec.vae_config is None, device=device, autocast=autocast)


def check_request(classes: Sequence[int], seeds: Sequence[int], null_class: int | None,
                  num_classes: int | None = None) -> None:
    """Raises UsageError unless every class is one of the model's and every seed can be one."""
    if len(classes) != len(seeds):
        raise UsageError(f"{len(classes)} classes for {len(seeds)} seeds; there must be one seed per class")
    largest = null_class if null_class is not None else None if num_classes is None else num_classes - 1
    for label in classes:
        if label < 0 or largest is not None and label > largest:
            null = f" ({null_class} is the null class)" if null_class is not None else ""
            raise UsageError(f"--classes {label}: the model knows 0 to {largest}{null}" if largest is not None
                             else f"--classes {label}: must not be negative")
    for seed in seeds:
        if not 0 <= seed <= _MAX_SEED:
            raise UsageError(f"--seed {seed}: must be from 0 to 2^64 - 1")


def _check_sampler(sampler: str, eta: float, num_steps: int | None, most_steps: int, batch_size: int) -> None:
    if num_steps is not None and not 1 <= num_steps <= most_steps:
        raise UsageError(f"--num-sampling-steps {num_steps}: must be from 1 to {most_steps}")
    if batch_size < 1:
        raise UsageError(f"--batch-size {batch_size}: must be at least 1")
    if sampler not in ("ddpm", "ddim"):
        raise UsageError(f"--sampler {sampler}: must be ddpm or ddim")
    if sampler == "ddpm" and eta != 0:
        raise UsageError(f"--eta {eta:g} has no effect with --sampler ddpm; use --sampler ddim")
    if not 0 <= eta <= 1:
        raise UsageError(f"--eta {eta:g}: must be from 0 to 1")


def _step_noise(seeds: Sequence[int], noisy_steps: int, step: int, x: Tensor) -> Tensor:
    return seed_noise(seeds, step, tuple(x.shape[1:])).to(x.device) if step <= noisy_steps else torch.zeros_like(x)


def _under(model: Model, autocast: Callable[[], AbstractContextManager]) -> Model:
    def call(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        with autocast():
            return model(x, t, y)

    return call


@contextlib.contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode, in which no label is dropped at random, for as long as the context lasts."""
    if not (isinstance(model, nn.Module) and model.training):
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


# ---- pictures ----

def to_uint8(pixels: Tensor) -> Tensor:
    """Pixels in [-1, 1] -> 0 to 255, rounded to the nearest, values outside clipped."""
    return (127.5 * pixels.float() + 128.0).clamp(0, 255).to(torch.uint8)


def save_grid(images: Tensor, path: str | Path, columns: int | None = None, scale: int = 1) -> Path:
    """Write images (N, C, H, W) uint8, C 1 or 3, as one PNG, row by row; each pixel ``scale`` x ``scale`` pixels large.

    ``columns`` defaults to a square. Raises UsageError if C is neither 1 nor 3.
    """
    from torchvision.utils import make_grid
    columns = math.ceil(math.sqrt(len(images))) if columns is None else columns
    return _write_png(make_grid(_enlarge(images, scale), nrow=columns, padding=2), path)


def save_images(batch: SampleBatch, folder: str | Path, scale: int = 1) -> list[Path]:
    """Write every image of a batch as ``class0007-seed000042.png`` into a folder, which is made. Returns the paths."""
    return [_write_png(image, Path(folder) / f"class{label:04d}-seed{seed:06d}.png")
            for image, label, seed in zip(_enlarge(batch.images, scale), batch.classes, batch.seeds, strict=True)]


def _enlarge(images: Tensor, scale: int) -> Tensor:
    assert images.dtype == torch.uint8 and images.dim() == 4
    if images.shape[1] not in (1, 3):
        raise UsageError(f"images have {images.shape[1]} channels; a PNG file needs 1 or 3 (decode latents first)")
    return images.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)


def _write_png(image: Tensor, path: str | Path) -> Path:
    from torchvision.transforms.functional import to_pil_image
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    to_pil_image(image).save(path, format="PNG")
    return path

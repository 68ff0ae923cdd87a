"""Sample images from a checkpoint file. Every setting of the model comes from the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dit.cli import parse_flags, run
from dit.config import UsageError
from dit.terminal import progress_bar


@dataclass(frozen=True)
class SampleConfig:
    """Sample images from a checkpoint file of train.py, or an official DiT one.

    The same seed gives the same image, whatever the batch size and the other images. Writes grid.png and single images.
    """

    ckpt: str
    """The checkpoint file."""
    classes: tuple[int, ...] = ()
    """Classes to draw. Default: all of them, or the first 16."""
    num_per_class: int = 1
    """Images of each class."""
    cfg_scale: float = 4.0
    """Strength of classifier-free guidance. 1: none."""
    cfg_channels: int | None = None
    """Guide the first N latent channels only; the official scripts guided 3. Default: all."""
    num_sampling_steps: int = 250
    """Calls of the model per image."""
    sampler: Literal["ddpm", "ddim"] = "ddpm"
    """ddpm, or ddim for few steps."""
    eta: float = 0.0
    """DDIM's noise, 0 (none) to 1."""
    weights: Literal["ema", "model"] = "ema"
    """The moving average of the weights, or the weights themselves."""
    seed: int = 0
    """Seed of the first image; the others count on from it."""
    batch_size: int = 64
    """Images sampled at once. Changes speed and memory, not the images."""
    vae: str | None = None
    """VAE that decodes the latents: ema, mse or a path. Default: the one of training."""
    amp: bool = False
    """Run the model under autocast, in bf16 where the device has it, else fp16."""
    scale: int | None = None
    """Enlarge every pixel to N x N in the pictures. Default: until an image is 64 pixels high."""
    output: str = "samples"
    """Folder for grid.png and the single images."""


def main(args: list[str]) -> int:
    config = parse_flags(SampleConfig, args, prog="sample.py")
    check(config)

    import torch

    from dit.pipeline import load_pipeline
    from dit.sampling import save_grid, save_images

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = load_pipeline(config.ckpt, device, weights=config.weights, vae=config.vae, amp=config.amp)
    chosen = config.classes or tuple(range(min(16, max(1, pipeline.num_classes))))
    classes = [label for label in chosen for _ in range(config.num_per_class)]
    seeds = [config.seed + index for index in range(len(classes))]
    folder = make_folder(config.output)
    with progress_bar(f"sampling {len(classes)} images") as progress:
        batches = pipeline.draw(classes, seeds, cfg_scale=config.cfg_scale, cfg_channels=config.cfg_channels,
                                num_steps=config.num_sampling_steps, sampler=config.sampler, eta=config.eta,
                                batch_size=config.batch_size, progress=progress)
        images = []
        for batch in batches:
            images.append(batch.images)
            save_images(batch, folder, scale=config.scale or enlargement(batch.images))
    grid = torch.cat(images)
    columns = config.num_per_class if config.num_per_class > 1 else None
    path = save_grid(grid, folder / "grid.png", columns, config.scale or enlargement(grid))
    print(f"{len(grid)} images of classes {', '.join(map(str, chosen))}: {path}")
    return 0


def check(config: SampleConfig) -> None:
    """Raise UsageError for numbers that cannot be, before anything is loaded."""
    for flag, value in (("--num-per-class", config.num_per_class), ("--batch-size", config.batch_size),
                        ("--num-sampling-steps", config.num_sampling_steps), ("--scale", config.scale),
                        ("--cfg-channels", config.cfg_channels)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: must be at least 1")


def make_folder(name: str) -> Path:
    """The output folder. Raises UsageError where it cannot be made."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {name}: cannot be written ({error.strerror})") from None
    return Path(name)


def enlargement(images) -> int:
    """How much to enlarge small images so that a person can see them."""
    return max(1, 64 // images.shape[-2])


if __name__ == "__main__":
    run(main)

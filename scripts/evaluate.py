"""Evaluate a checkpoint file: draw samples of every class and measure them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dit.cli import parse_flags, run
from dit.config import UsageError
from dit.terminal import progress_bar


@dataclass(frozen=True)
class EvaluateConfig:
    """Share of samples in which a 3-nearest-neighbour classifier, fitted on the real data, finds the class asked for.

    For the embedded digits; the metric compares pixels and means nothing on photographs.
    """

    ckpt: str
    """The checkpoint file."""
    num_samples: int = 200
    """Samples to draw, spread evenly over the classes."""
    cfg_scale: float = 2.0
    """Strength of classifier-free guidance. 1: none."""
    num_sampling_steps: int = 50
    """Calls of the model per image."""
    sampler: Literal["ddpm", "ddim"] = "ddpm"
    """ddpm, or ddim for few steps."""
    weights: Literal["ema", "model"] = "ema"
    """The moving average of the weights, or the weights themselves."""
    seed: int = 0
    """Seed of the first sample; the others count on from it."""
    batch_size: int = 200
    """Samples drawn at once."""
    grid: str | None = None
    """Also write the first eight samples of every class as a PNG, one class per row."""


def main(args: list[str]) -> int:
    config = parse_flags(EvaluateConfig, args, prog="evaluate.py")
    for flag, value in (("--num-samples", config.num_samples), ("--num-sampling-steps", config.num_sampling_steps),
                        ("--batch-size", config.batch_size)):
        if value < 1:
            raise UsageError(f"{flag} {value}: must be at least 1")

    import torch

    from dit.data import DigitsData
    from dit.evaluation import class_accuracy
    from dit.pipeline import load_pipeline
    from dit.sampling import save_grid, to_uint8

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = load_pipeline(config.ckpt, device, weights=config.weights)
    real = DigitsData()
    if pipeline.num_classes != real.num_classes or pipeline.shape.in_channels != real.sample_shape[0]:
        raise UsageError(f"--ckpt {config.ckpt}: was not trained on --data digits, the only data this measures")
    images, labels = real.read(range(real.num_samples), None)
    classes = [index % real.num_classes for index in range(config.num_samples)]
    seeds = [config.seed + index for index in range(config.num_samples)]
    with progress_bar(f"sampling {config.num_samples} images") as progress:
        batches = list(pipeline.draw(classes, seeds, cfg_scale=config.cfg_scale, num_steps=config.num_sampling_steps,
                                     sampler=config.sampler, batch_size=config.batch_size, progress=progress))
    accuracy = class_accuracy(batches, to_uint8(torch.from_numpy(images)).numpy(), labels)
    print(f"a 3-nearest-neighbour classifier finds the asked class in {100 * accuracy:.1f} % of {config.num_samples} "
          f"samples (step {pipeline.step}, {config.weights} weights, guidance {config.cfg_scale:g})")
    if config.grid:
        drawn = torch.cat([batch.images for batch in batches])
        rows = [drawn[label::real.num_classes][:8] for label in range(real.num_classes)]
        columns = len(rows[-1])
        print(f"grid: {save_grid(torch.cat([row[:columns] for row in rows]), Path(config.grid), columns, scale=8)}")
    return 0


if __name__ == "__main__":
    run(main)

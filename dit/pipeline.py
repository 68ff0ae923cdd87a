"""From a checkpoint file to images: the model, its diffusion and its codec, every setting taken from the file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dit import checkpoint
from dit.codec import Codec, build_codec
from dit.config import ModelShape, TrainConfig, UsageError, replace
from dit.config_files import from_tree
from dit.diffusion import Diffusion, create_diffusion
from dit.model import build_model
from dit.precision import Precision, resolve
from dit.sampling import SampleBatch, generate


@dataclass(frozen=True)
class Pipeline:
    """Everything that turns classes and seeds into images."""

    model: nn.Module
    shape: ModelShape
    diffusion: Diffusion
    codec: Codec
    precision: Precision
    device: torch.device
    step: int | None
    """Steps the weights were trained for; None where the file does not say."""

    def draw(self, classes: Sequence[int], seeds: Sequence[int], *, cfg_scale: float, num_steps: int | None,
             sampler: str = "ddpm", eta: float = 0.0, cfg_channels: int | None = None, batch_size: int = 64,
             progress: Callable[[int, int], None] | None = None) -> Iterator[SampleBatch]:
        """One image per (class, seed), as batches of uint8 tensors (N, C, H, W); see ``sampling.generate``."""
        shape = self.shape
        return generate(self.model, self.diffusion, self.codec.decode, classes, seeds,
                        latent_shape=(shape.in_channels, *shape.input_size), null_class=self.model.null_class,
                        cfg_scale=cfg_scale, cfg_channels=cfg_channels, sampler=sampler, num_steps=num_steps, eta=eta,
                        batch_size=batch_size, clip_denoised=self.codec.spec.vae_config is None, device=self.device,
                        autocast=self.precision.autocast, progress=progress)

    @property
    def num_classes(self) -> int:
        return self.shape.num_classes


def load_pipeline(path: str | Path, device: torch.device, *, weights: str = "ema", vae: str | None = None,
                  amp: bool = False) -> Pipeline:
    """Build a pipeline from a checkpoint file of train.py or an official one.

    ``vae`` replaces the VAE the file names (an official file names none: ema). Raises UsageError in one line.
    """
    state = checkpoint.load(path)
    tensors = checkpoint.weights(state, weights, str(path))
    shape = checkpoint.shape_of(state, tensors)
    config = from_tree(state["config"], TrainConfig(), str(path)) if "config" in state else TrainConfig()
    with device:
        model = build_model(shape)
    checkpoint.load_weights(model, tensors, str(path))
    if vae is not None and config.vae == "none":
        raise UsageError(f"--vae {vae}: {path} was trained on pixels and needs none")
    return Pipeline(model=model.eval(), shape=shape, diffusion=create_diffusion(learn_sigma=shape.learn_sigma),
                    codec=build_codec(vae or config.vae, device=device),
                    precision=resolve(replace(config, amp=amp, amp_dtype="auto"), device), device=device,
                    step=state.get("step"))

"""Sample grids while a run trains: the same classes and seeds each time, so that they can be compared."""

from contextlib import nullcontext

import torch

from dit.codec import build_codec
from dit.config import TrainConfig
from dit.run_folder import RunFolder
from dit.sampling import generate, save_grid
from dit.step import StepParts

NUM_IMAGES, IMAGES_AT_ONCE, SAMPLING_STEPS, GUIDANCE = 16, 4, 50, 2.0


class Preview:
    """Draws ``samples/0000500.png`` with the averaged weights (the model's own where there is no average).

    Ranks that hold a model between them all draw, and one of them, which ``writes``, keeps the picture.

    Raises UsageError, when made, if the VAE that decodes the latents cannot be found.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, parts: StepParts, writes: bool = True):
        self._config, self._folder, self._parts, self._writes = config, folder, parts, writes
        self._codec = parts.codec if config.encodes_in_loop else build_codec(config.vae, device=parts.device)

    def __call__(self, step: int) -> str:
        """Draw the grid of ``step``, a few images at a time so that it needs little memory. Returns the file's path."""
        parts, num_classes = self._parts, max(1, self._config.model.num_classes)
        classes = [index % num_classes for index in range(NUM_IMAGES)]
        null_class = parts.model.null_class
        with parts.ema.swapped_in() if parts.ema is not None else nullcontext():
            batches = list(generate(
                parts.model, parts.diffusion, self._codec.decode, classes, range(NUM_IMAGES),
                latent_shape=self._config.latent_shape, null_class=null_class, num_steps=SAMPLING_STEPS,
                cfg_scale=1.0 if null_class is None or not self._config.model.num_classes else GUIDANCE,
                batch_size=IMAGES_AT_ONCE, clip_denoised=self._codec.spec.vae_config is None, device=parts.device,
                autocast=parts.precision.autocast))
        images = torch.cat([batch.images for batch in batches])
        path = self._folder.samples / f"{step:07d}.png"
        return str(save_grid(images, path, scale=max(1, 64 // images.shape[-1])) if self._writes else path)

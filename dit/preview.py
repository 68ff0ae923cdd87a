"""Sample grids while a run trains: the same classes and seeds each time, so that they can be compared."""

from contextlib import nullcontext

import torch

from dit.codec import build_codec
from dit.config import TrainConfig
from dit.run_folder import RunFolder
from dit.sampling import GRID_STEPS, grid_batches, save_grid
from dit.step import StepParts


class Preview:
    """Draws ``samples/0000500.png`` with the averaged weights (the model's own where there is no average).

    Ranks that hold a model between them all draw, and one of them, which ``writes``, keeps the picture.

    Raises UsageError, when made, if the VAE that decodes the latents cannot be found.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, parts: StepParts, writes: bool = True):
        self._config, self._folder, self._parts, self._writes = config, folder, parts, writes
        self._codec = parts.codec if config.encodes_in_loop else build_codec(config.vae, device=parts.device)

    def __call__(self, step: int) -> str:
        """Draw the grid of ``step``. Returns the file's path."""
        parts = self._parts
        with parts.ema.swapped_in() if parts.ema is not None else nullcontext():
            batches = list(grid_batches(self._config, parts.model, parts.diffusion, self._codec, device=parts.device,
                                        autocast=parts.precision.autocast, num_steps=GRID_STEPS))
        images = torch.cat([batch.images for batch in batches])
        path = self._folder.samples / f"{step:07d}.png"
        return str(save_grid(images, path, scale=max(1, 64 // images.shape[-1])) if self._writes else path)

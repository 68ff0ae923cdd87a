"""Latent shards: moments of the VAE for an image and its mirror image, read by position."""
from __future__ import annotations

from dit.config import UsageError


class LatentData:
    """Source over a folder that scripts/extract_latents.py wrote."""

    def __init__(self, root: str, latent_shape: tuple[int, int, int]):
        raise UsageError(f"--data latents --data-path {root}: not available yet")

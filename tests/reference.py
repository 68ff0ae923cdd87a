"""Inputs and weights of the reference numbers in tests/golden, as defined in its README, and how arrays compare."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden" / "official_dit.npz"
TIMESTEPS = (0, 1, 250, 999)


def cosine_input(shape: tuple[int, ...], phase: float = 0.0, frequency: float = 0.013) -> Tensor:
    """cos(frequency * k + phase) over the flat index k, computed in float64."""
    return torch.from_numpy(np.cos(frequency * np.arange(np.prod(shape)) + phase).astype(np.float32)).reshape(shape)


@torch.no_grad()
def fill_weights(model: nn.Module) -> nn.Module:
    """Weights by formula, none of them zero; the position table keeps its values."""
    state = model.state_dict()
    for index, name in enumerate(sorted(state)):
        if name != "pos_embed":
            flat = 0.05 * np.sin(0.37 * np.arange(state[name].numel()) + 1.1 * index + 0.5)
            state[name].copy_(torch.from_numpy(flat).reshape(state[name].shape))
    return model


def relative_error(actual, expected) -> float:
    """Largest difference over the largest expected magnitude."""
    actual, expected = (np.asarray(x.detach() if isinstance(x, Tensor) else x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())

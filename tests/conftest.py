"""One thread per test process: the suite runs in several processes, and more threads would only compete."""

import torch
from extracted import copy, images, latents, vae  # noqa: F401 - fixtures

torch.set_num_threads(1)

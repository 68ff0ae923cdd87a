"""One thread per test process: the suite runs in several processes, and more threads would only compete."""

import torch

torch.set_num_threads(1)
